"""The stages of a run as command lines: that of the user, with the flags of each stage in place of
its own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron import launcher
from megatron.arguments import flags_of
from megatron.config import command_line
from megatron.config.command_line import CommandLine
from megatron.config.plan import fit
from megatron.config.plan.plan import batch_schedule, data_parallel_size, make_plan
from megatron.config.tree import Config
from megatron.data.request import Before, DataRequest
from megatron.data.tokenizers.planned import planned_vocabulary
from megatron.training import preflight
from megatron.training.feature import data_source

from .stage_file import DATA, SCHEDULE, Stage, read_stages, typed
from .staged_source import Reading, StagedSource

SHOWN = 20  # data sets of a stage


@dataclass(frozen=True)
class Planned:
    """A stage, its command line, the iterations and samples before it and at its end."""

    stage: Stage
    line: CommandLine
    first: int
    last: int
    samples: tuple[int, int]
    batch: int

    @property
    def config(self) -> Config:
        return self.line.config


def remaining(line: CommandLine, own: Any) -> list[CommandLine]:
    """The command lines of the stages that a run has not finished; at its end the last. `own`: the
    flags of this feature. Exits with one line for each problem of the file, and of the command
    lines that it makes."""
    try:
        stages = staged(line, own)
        if not (line.config.training.dry_run or line.script.datasets_provider):
            for _ in readings(stages):
                pass  # a mix that cannot be read is said before the first stage
    except (ValueError, OSError) as error:
        command_line.refuse([str(error)], launcher.info())
    state = preflight.resumed_state(line)
    iteration = state.iteration if state else 0
    begun = min(sum(each.last <= iteration for each in stages), len(stages) - 1)
    return [stages[begun].line, *(_going_on(each.line) for each in stages[begun + 1 :])]


def _going_on(line: CommandLine) -> CommandLine:
    """From what the stage before has saved."""
    c = line.config.checkpoint
    going_on = replace(c, load=c.save, finetune=False, no_load_optim=False, ckpt_step=None)
    return replace(line, config=replace(line.config, checkpoint=going_on))


def staged(line: CommandLine, own: Any) -> list[Planned]:
    """All stages of the file. Raises ValueError; exits for problems of their command lines."""
    path = own.stage_file
    if line.save_url or line.load_url or line.snapshot_url:
        raise ValueError(
            f"--stages {path}: --save, --load and --snapshot-dir must be directories of this "
            "machine: where a run in an object store goes on is not known before it starts "
            "[flags-exclude-each-other]"
        )
    stages = read_stages(path, flags_of(type(line.config)))
    lines = _read(line, stages)
    total = line.config.training.train_iters or 0
    planned: list[Planned] = []
    iteration = samples = tokens = 0
    for stage, of_stage in zip(stages, lines, strict=True):
        config = of_stage.config
        batch = batch_schedule(config, line.world_size).final_global_batch_size
        length = config.model.seq_length
        last = total
        if stage.until is not None:
            done = {"until_samples": samples, "until_tokens": tokens}
            per = {"until_samples": batch, "until_tokens": batch * length}
            unit = str(stage.unit)
            last = iteration + -(-(stage.until - done.get(unit, iteration)) // per.get(unit, 1))
        if last <= iteration:
            raise ValueError(
                f"{stage.place}: {stage.unit or '--train-iters'} {stage.until or last}: is reached "
                f"before it begins, after iteration {iteration}; ends are counted from the start "
                "of the run [stage-ends-malformed]"
            )
        before = samples
        samples += (last - iteration) * batch
        tokens += (last - iteration) * batch * length
        planned.append(Planned(stage, of_stage, iteration, last, (before, samples), batch))
        iteration = last
    if iteration != total:
        raise ValueError(
            f"--train-iters {total}: the last stage of --stages {path} "
            f"ends at iteration {iteration}; give --train-iters {iteration}, or leave out the end "
            "of the last stage [stage-ends-malformed]"
        )
    return [replace(each, line=_as_part(each, planned, own)) for each in planned]


def readings(stages: Sequence[Planned]) -> Iterator[Reading]:
    """What each stage reads. Raises ValueError and OSError for data that cannot be read, said of
    the stage."""
    before: Before | None = None
    for each in stages:
        source = data_source(each.config)
        assert isinstance(source, StagedSource)
        t = each.config.training
        length = each.config.model.seq_length
        request = DataRequest(
            sizes=(each.samples[1], 0, 0), sequence_length=length, seed=t.seed, before=before
        )
        try:
            reading = source.reading(each.config.data, request)
        except ValueError as error:
            raise ValueError(f"{each.stage.place}: {error}") from error
        yield reading
        before = Before({**reading.order}, each.samples[1])


def _read(line: CommandLine, stages: list[Stage]) -> list[CommandLine]:
    """The command line of each stage. Exits for what is wrong with them, said of the stage."""
    tree = type(line.config)
    flags = flags_of(tree)
    lines: list[CommandLine] = []
    problems: list[str] = []
    for stage in stages:
        of_stage = typed(stage.flags, flags)
        words = [*line.words, *of_stage]
        provider = line.script.extra_args_provider
        read, wrong = command_line.planned(words, line.world_size, tree, provider)
        problems += [f"{stage.place}: {text}" for text in wrong]
        if not line.config.training.dry_run and not problems:
            read = command_line.read(words, os.environ, line.script, tree)
        replaced = tuple(f"{word} is given more than once" for word in of_stage)
        notes = [text for text in read.notes if not text.startswith(replaced)]
        lines.append(
            replace(read, notes=notes, words=line.words, script=line.script, more=line.more)
        )
    if problems:
        command_line.refuse(problems, launcher.info())
    return lines


def _as_part(stage: Planned, stages: list[Planned], own: Any) -> CommandLine:
    """The command line of a stage as that of a job that does this part of the run: all jobs count
    iterations, samples and the learning rate's schedule alike."""
    config = stage.config
    changed = {name for each in stages for name in each.stage.flags}
    ends = tuple(each.last for each in stages[:-1])
    own = replace(own, phase_transition_iterations=",".join(map(str, ends)) or None)
    parts: dict[str, Any] = {type(own).__name__: own}
    if changed & {*DATA, "seq_length"}:  # validation reads others, which are not trained on
        parts["data"] = replace(config.data, allow_data_order_change=True)
    if changed & {*SCHEDULE}:
        parts["optimizer"] = replace(config.optimizer, override_opt_param_scheduler=True)
    if len({each.batch for each in stages}) > 1:
        parts["training"] = _batches(config, stage, stages)
    part = range(stage.first, stage.last + (stage.last == stages[-1].last))
    return replace(stage.line, config=replace(config, **parts), part=part)


def _batches(config: Config, stage: Planned, stages: list[Planned]) -> Any:
    """The training flags of a stage with the batch sizes of all; its own have been checked."""
    t = config.training
    length = config.model.seq_length  # which the thresholds, in tokens, are divided by
    steps = [f"{each.samples[0] * length}:{each.batch}" for each in stages]
    final = stages[-1].batch
    ranks = data_parallel_size(config, stage.line.world_size)
    rows = math.gcd(t.micro_batch_size, max(1, final // ranks))
    return replace(
        t,
        global_batch_size=final,
        step_batch_size_schedule=" ".join(steps),
        eval_global_batch_size=t.eval_global_batch_size or final,
        eval_micro_batch_size=t.eval_micro_batch_size or rows,
    )


def table(line: CommandLine, own: Any) -> Iterator[str]:
    """What a dry run prints: of each stage its length, memory, flags and where its data sets go on;
    and which stage needs most memory."""
    stages = staged(line, own)
    peaks: list[int] = []
    yield f"stages of {own.stage_file}:"
    for each in stages:
        config = each.config
        vocabulary = planned_vocabulary(config.data)[0]
        plan = make_plan(config, line.world_size, vocabulary)
        peaks.append(fit.fullest(config, plan).total)
        samples = each.samples[1] - each.samples[0]
        words = " ".join(typed(each.stage.own, flags_of(type(config)))) or "as before"
        yield (
            f"  {each.stage.number}: until iteration {each.last}, {samples:,} samples of "
            f"{config.model.seq_length:,} tokens, {samples * config.model.seq_length:,} tokens, "
            f"{fit.gib(peaks[-1])} on the fullest rank: {words}"
        )
    most = peaks.index(max(peaks))
    number = stages[most].stage.number
    yield f"  stage {number} needs most memory: {fit.gib(peaks[most])} by the plan"
    if line.script.datasets_provider:
        return
    try:
        yield from _data_rows(stages)
    except OSError as error:
        yield f"  data cannot be read on this machine: {error}"


def _data_rows(stages: Sequence[Planned]) -> Iterator[str]:
    """Of each stage, from which token on it reads how many of each data set."""
    yield "  data, as tokens before the stage + tokens of it:"
    for each, reading in zip(stages, readings(stages), strict=True):
        length = each.config.model.seq_length
        counts = zip(reading.members, reading.starts, reading.samples, strict=True)
        sets = [f"{m.prefix} {start:,} + {n * length:,}" for m, start, n in counts]
        more = f", and {len(sets) - SHOWN} more" * (len(sets) > SHOWN)
        yield f"  {each.stage.number}: {', '.join(sets[:SHOWN])}{more}"
