"""How fast a run would be, with which layout, how long and at what cost, before it starts. See
addons/planner/planner.md.

Flags that are not listed here are those of the run, as pretrain_gpt.py takes them (@FILE, too).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from megatron.args_file import expand_files
from megatron.arguments import is_flag
from megatron.config.command_line import CommandLine, planned
from megatron.config.plan.fit import GIB, SPARE, fullest, gib
from megatron.config.plan.plan import make_plan
from megatron.data.tokenizers.planned import planned_vocabulary
from megatron.problems import error_lines
from tools.shared.program import complain, read

from .options import Options, divided


def _planned(words: list[str], gpus: int) -> CommandLine:
    """The run. Exits with 2 where its flags are wrong."""
    line, problems = planned(words, gpus)
    if problems:
        print(error_lines(problems), end="", file=sys.stderr)
        raise SystemExit(2)
    return line


def _without_layout(words: Sequence[str]) -> list[str]:
    """The words of a run without the flags that say its layout."""
    from .search import LAYOUT

    layout = {f"--{name.replace('_', '-')}" for name in LAYOUT}
    result: list[str] = []
    left_out = False
    for word in words:
        if is_flag(word):
            left_out = word.partition("=")[0].replace("_", "-") in layout
        if not left_out:
            result.append(word)
    return result


def _evaluate(options: Options, path: str) -> None:
    from . import evaluate

    rows, notes = evaluate.read(path)
    if options.known:
        from .known import table

        for text in table(rows):
            print(text, flush=True)
        return
    if options.refit:
        evaluate.refit(rows)
    lines, found = evaluate.report(rows, options.leave_out)
    print("\n".join([*notes, *lines]))
    if options.plot:
        from .picture import draw_errors

        draw_errors(options.plot, found)
        print(f"wrote {options.plot}")


def _plan(options: Options, words: list[str], gpus: int) -> None:
    from .forecast import lines
    from .machines import load
    from .run_sizes import NATURAL, sizes
    from .step_time import step_seconds

    machine = load(options.gpu)
    line = _planned(words, gpus)
    vocabulary = planned_vocabulary(line.config.data)[0]
    plan = make_plan(line.config, gpus, vocabulary)
    run = sizes(line.config, plan, machine)
    rank = fullest(line.config, plan)
    limit = machine.facts["memory_gib"] * GIB
    fits = rank.total <= limit * (1 - SPARE)
    print(
        f"memory: {gib(rank.total)} of {gib(limit)} on the fullest rank, "
        f"{'fits' if fits else 'does not fit'}; largest: {rank.largest()}"
    )
    seconds = {kind: float(time) for kind, time in step_seconds(machine.constants, run).items()}
    text = lines(
        run,
        seconds,
        machine,
        gpus,
        tokens=options.tokens,
        mtbf_hours=options.mtbf_hours,
        price=options.price,
        save_seconds=options.save_seconds,
        restart_seconds=options.restart_seconds,
    )
    print("\n".join(text))
    if len(plan.trained) < len(plan.parameters):
        print(
            "--train-only: time and TFLOP/s are those of training all weights, memory is the run's"
        )
    if run.experts:
        slow = step_seconds(machine.constants, replace(run, uneven=NATURAL))
        print(
            f"experts: {sum(seconds.values()):.4g} s where all get as many tokens (forced), "
            f"{float(sum(slow.values())):.4g} s where one rank gets {NATURAL:g} times the mean "
            "(natural)"
        )
    if options.plot:
        from .picture import draw_step

        draw_step(options.plot, [(f"{gpus} x {machine.name}", seconds)])
        print(f"wrote {options.plot}")


def _calibrate(options: Options, words: list[str], gpus: int, path: str) -> None:
    from .calibrate import calibrate, measured_steps, write
    from .machines import load
    from .run_sizes import sizes

    if not (options.output or "").endswith(".toml"):
        raise ValueError(
            f"--output {options.output}: --calibrate writes a machine file; give a name that ends "
            "with .toml [flag-missing]"
        )
    machine = load(options.gpu)
    line = _planned(words, gpus)
    plan = make_plan(line.config, gpus, planned_vocabulary(line.config.data)[0])
    found = calibrate(machine, sizes(line.config, plan, machine), measured_steps(path))
    for batch, count, measured, before, after in found.steps:
        print(
            f"batch {batch}: {measured:.4g} s measured (median of {count}), {after:.4g} s after "
            f"calibration ({after / measured - 1:+.1%}), {before:.4g} s before"
        )
    write(options.output or "", machine, found, path)
    print(f"wrote {options.output}")


def _search(options: Options, words: list[str], gpus: int) -> None:
    from .machines import load
    from .search import search, why_slower

    machine = load(options.gpu)
    words = _without_layout(words)
    line, problems = planned([*words, "--micro-batch-size", "1"], gpus)
    # what only a layout lacks is no problem of the run
    if problems and not line.config.model.hidden_size:
        raise SystemExit(error_lines(problems))
    vocabulary = planned_vocabulary(line.config.data)[0]
    found, count = search(line, words, machine, vocabulary, options.top)
    shown = found[: options.top]
    print(f"{count:,} layouts of {gpus} x {machine.name}, the {len(shown)} best that fit:")
    for number, each in enumerate(shown):
        rate = line.config.model.seq_length * (line.config.training.global_batch_size or 1)
        print(
            f"{number + 1:3}. {each.step:.4g} s, {rate / each.step / gpus:,.0f} tokens/s a GPU, "
            f"{gib(each.memory.total)}: {' '.join(each.flags)}"
        )
        if number:
            print(f"     loses by {each.step - found[0].step:.4g} s: {why_slower(found[0], each)}")
    if len(found) > options.top:
        print(
            f"the next loses by {found[-1].step - found[0].step:.4g} s: "
            f"{why_slower(found[0], found[-1])}"
        )
    if options.plot:
        from .picture import draw_step

        draw_step(options.plot, [(" ".join(each.flags), each.seconds) for each in shown])
        print(f"wrote {options.plot}")


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 2 a wrong command line or file."""
    own, words = divided(argv)
    options = read(Options, own, prog="plan.py", description=__doc__ or "")
    try:
        if options.evaluate is not None:
            _evaluate(options, options.evaluate)
            return 0
        words = expand_files(words)
        if options.gpus is None:
            unknown = [each for each in planned(words, 1)[1] if each.endswith("[flag-unknown]")]
            missing = "--gpus is missing: number of GPUs of the run [flag-missing]"
            print(error_lines([*unknown, missing]), end="", file=sys.stderr)
            return 2
        if options.calibrate is not None:
            _calibrate(options, words, options.gpus, options.calibrate)
        else:
            (_search if options.search else _plan)(options, words, options.gpus)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    return 0
