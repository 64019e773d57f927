#!/usr/bin/env python
"""What one process pays for the parallel code being there: the training step against the same step
without it.

Both train one model object with the same kernels, batches, timers and optimizer. "With" is the
suite's `train_step`. "Without" is a loop written here, in which
  - linear layers, embedding and loss call their kernel directly (no column- or row-parallel layer,
    no axis asked),
  - micro-batches run in a plain for loop (no schedule, no runner, no links between stages),
  - gradients are not reduced, losses not summed, norms not added up over ranks, weights not
    gathered.
So the difference is what rank 0 of 1 pays for code that 1,000 ranks need. The first two figures
have a goal of at most 2 %:
  - instructions of a step, counted by valgrind's callgrind (Python's included). They hardly depend
    on the machine or on other work there, which a clock does. The model is tiny on purpose: a real
    one has the same number of calls and more work in each, so its share is smaller.
  - the same for the rank monitor and run_events.jsonl, as a share of that step: the hooks of an
    iteration, one look of the monitor's thread and one line written (a run does these two once per
    second). Goal: at most 0.5 %.
  - microseconds of processor time: each parallel piece timed alone, again and again, against the
    direct call it stands for, on tensors so small that the kernel is all overhead; times its calls
    in a step, as a share of the time of a step.
  - microseconds of processor time that the spike detector takes per iteration, outside the step.
  - calls of Python and C functions in a step, for what they say where valgrind takes too long (it
    needs some ten minutes of processor time to load torch): they count alike whatever a call costs,
    so they have no goal.
Needs torch and numpy; valgrind and cc for the instructions (omitted without them, --no-callgrind:
not wanted).
"""

from __future__ import annotations

import argparse
import ctypes
import io
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent / "step")]

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch  # noqa: E402
from sizes import Size, command_line, parse_size  # noqa: E402

from megatron.config import command_line as megatron_command_line  # noqa: E402
from megatron.kernels import functional as kernels  # noqa: E402
from megatron.optimizer.optimizer import MixedPrecisionOptimizer  # noqa: E402
from megatron.parallel.collectives import all_reduce, all_reduce_  # noqa: E402
from megatron.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    embedding,
    vocab_parallel_cross_entropy,  # noqa: E402
)  # noqa: E402
from megatron.parallel.random import DropoutSeeds  # noqa: E402
from megatron.timers import Timers  # noqa: E402
from megatron.training import build
from megatron.training.batch import MicroBatch, make_batch  # noqa: E402
from megatron.training.launch import initialize
from megatron.training.launch.hang_limits import Limits, Phase  # noqa: E402
from megatron.training.launch.hang_watch import HangWatch  # noqa: E402
from megatron.training.launch.rank_monitor import MonitorClient  # noqa: E402
from megatron.training.launch.signals import SignalWatch  # noqa: E402
from megatron.training.logging.iteration import IterationResult  # noqa: E402
from megatron.training.logging.run_events import RunEvents  # noqa: E402
from megatron.training.run import Services  # noqa: E402
from megatron.training.spikes import detector as spikes  # noqa: E402
from megatron.training.spikes.policy import SpikePolicy  # noqa: E402
from megatron.training.step import train_step  # noqa: E402
from pretrain_gpt import forward_step  # noqa: E402

DEFAULT_SIZE = (
    "overhead:layers=4,hidden=128,heads=4,seq=128,micro_batch=2,micro_batches=4,vocab=1024"
)
GOAL = 0.02
WATCH_GOAL = 0.005
WATCHED = 100  # iterations whose hooks are counted
SECONDS = 7200  # for valgrind
HEADER = "/usr/include/valgrind/callgrind.h"
# To count only what is wanted: everything before runs several times faster.
SWITCH = f"""
#include "{HEADER}"
void on(void) {{ CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }}
void off(void) {{ CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }}
"""


class Step:
    """One model with its samples, and a step with and one without the parallel code on it."""

    def __init__(self, size: Size):
        line = megatron_command_line.read(command_line(size, "fp32", "cpu"), {})
        with redirect_stdout(io.StringIO()):
            tokenizer = build.make_tokenizer(line.config)
            plan = build.plan_run(line.config, 1, tokenizer.vocab_size)
            self.run = build.build_run(
                line.config, plan, initialize.initialize(line.config), Timers(0), tokenizer
            )
        steps = self.run.plan.num_microbatches(1)
        generator = torch.Generator().manual_seed(1)
        self.samples = [
            MicroBatch(
                torch.randint(0, size.vocab, (size.micro_batch, size.seq + 1), generator=generator)
            )
            for _ in range(steps)
        ]
        self.optimizer = MixedPrecisionOptimizer(self.run.buffers.params, self.run.config.optimizer)
        for group, ours in zip(
            self.optimizer.param_groups, self.run.optimizer.param_groups, strict=True
        ):
            group["lr"] = ours["lr"]

    def with_parallel_code(self) -> float:
        """This suite's step; its loss."""
        return train_step(self.run, forward_step, iter(self.samples), 1).loss

    def without(self) -> float:
        """The same arithmetic and the same log spans; its loss."""
        run = self.run
        timers = self.run.timers
        model = self.model
        nominal = run.plan.global_batch_size(1) * run.config.model.seq_length
        totals = torch.zeros(2, dtype=torch.float64)
        run.buffers.flat.zero_()
        for p in run.buffers.params:
            p.grad = p.main_grad
        with timers("forward-backward", 1):
            for number, samples in enumerate(self.samples):
                with timers("batch-generator", 2):
                    seeds = DropoutSeeds(run.config.training.seed, 1, number, 0)
                    batch = make_batch(samples, run.rules, run.runtime.device, seeds)
                with timers("forward-compute", 2):
                    loss, tokens, _ = forward_step(batch, model)
                totals[0] += loss.detach()
                totals[1] += tokens
                with timers("backward-compute", 2):
                    (loss * (1.0 / nominal)).backward()
        loss_sum, tokens = totals.tolist()
        with timers("optimizer", 1):
            self.optimizer.step(grad_factor=nominal / max(1.0, tokens))
        return loss_sum / max(1.0, tokens)

    @property
    def model(self) -> torch.nn.Module:
        """The whole model."""
        (whole,) = self.run.model
        return whole

    def strip(self) -> Callable[[], None]:
        """Make layers and loss call their kernels directly; the function that is returned undoes
        it."""
        model = self.model
        vocab = self.run.plan.vocab_size
        changed = [module for module in model.modules() if type(module) in DIRECT]
        for module in changed:
            module.forward = DIRECT[type(module)](module)
        whole = model.forward

        def forward(
            tokens: Any, position_ids: Any, labels: Any, document_ids: Any, dropout: Any, **_: Any
        ) -> Any:
            x = model.embedding(tokens, position_ids, dropout)
            rotary = None if model.rotary is None else model.rotary(tokens.shape[1], position_ids)
            logits = model.output_layer(model.decoder(x, rotary, document_ids, dropout))
            s, b, v = logits.shape
            losses = kernels.cross_entropy(
                logits.view(s * b, v), labels.t().reshape(s * b), vocab_size=vocab
            )
            return losses.view(s, b).t(), {}

        model.forward = forward

        def undo() -> None:
            model.forward = whole
            for module in changed:
                del module.forward

        return undo


def direct_linear(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The kernel with the layer's weight and bias (of a gated layer as matrix and vector, as they
    lie there)."""
    weight = layer.weight
    bias = layer.bias
    total = layer.weight.main_grad
    if weight.dim() == 2:
        return lambda x: kernels.linear(x, weight, bias, accumulate_into=total)
    total = total.flatten(0, -2)
    return lambda x: kernels.linear(
        x, weight.flatten(0, -2), None if bias is None else bias.flatten(), accumulate_into=total
    )


def direct_embedding(layer: VocabParallelEmbedding) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows by token."""
    return lambda tokens: embedding(tokens.t(), layer.weight)


DIRECT = {
    ColumnParallelLinear: direct_linear,
    RowParallelLinear: direct_linear,
    VocabParallelEmbedding: direct_embedding,
}


@dataclass(frozen=True)
class Piece:
    """A parallel piece: what is called, the direct call it stands for, and how often a step calls
    it."""

    name: str
    ours: Callable[[], Any]
    direct: Callable[[], Any]
    calls: int


def pieces(step: Step) -> list[Piece]:
    """Every place where a step of one process goes through code that is there for several."""
    run = step.run
    micro_batches = len(step.samples)
    ctx = run.runtime.ctx
    model = step.model
    x = torch.zeros(1, 1, run.config.model.hidden_size)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    layer = next(iter(model.decoder.layers.values()))
    norm = torch.zeros(())
    logits = torch.zeros(1, 1, 8)

    def linear(module: Any, x: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
        plain = direct_linear(module)
        return (lambda: module.forward(x)), (lambda: plain(x))

    wide = torch.zeros(1, 1, layer.mlp.linear_fc2.weight.shape[1])
    count = {kind: micro_batches * sum(type(m) is kind for m in model.modules()) for kind in DIRECT}
    table = model.embedding.word_embeddings
    rows = direct_embedding(model.embedding.word_embeddings)

    def plain_loop() -> None:
        for micro_batch in range(micro_batches):
            _no_backward(_no_forward(micro_batch, 0, None), None)

    def loss() -> torch.Tensor:
        return (
            kernels.cross_entropy(logits.view(1, 8), ids.t().reshape(1), vocab_size=8)
            .view(1, 1)
            .t()
        )

    return [
        Piece(
            "column-parallel linear", *linear(layer.mlp.linear_fc1, x), count[ColumnParallelLinear]
        ),
        Piece("row-parallel linear", *linear(layer.mlp.linear_fc2, wide), count[RowParallelLinear]),
        Piece(
            "vocabulary-parallel embedding",
            lambda: table.forward(ids),
            lambda: rows(ids),
            micro_batches,
        ),
        Piece(
            "vocabulary-parallel loss",
            lambda: vocab_parallel_cross_entropy(logits, ids, vocab_size=8, tp=ctx.tp),
            loss,
            micro_batches,
        ),
        Piece(
            "schedule and runner",
            lambda: run.pipeline.run(micro_batches, _no_forward, _no_backward),
            plain_loop,
            1,
        ),
        Piece("gradient reduction", run.buffers.reduce, _nothing, 1),
        Piece("gathering weights", run.buffers.gather_weights, _nothing, 1),
        Piece(
            "sums of loss and norm",
            lambda: (all_reduce_(norm, ctx.world), all_reduce(norm, ctx.optimizer)),
            lambda: (norm, norm),
            1,
        ),
    ]


def _nothing() -> None:
    pass


def _no_forward(micro_batch: int, chunk: int, hidden: torch.Tensor | None) -> None:
    return None


def _no_backward(output: Any, gradient: Any) -> None:
    return None


def microseconds(function: Callable[[], Any], repeats: int, loops: int) -> float:
    """The smallest mean of `loops` calls, over the repeats, in this thread's processor time: other
    work only ever adds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(loops):
            function()
        best = min(best, (time.thread_time() - start) / loops)
    return 1e6 * best


def detector_microseconds(repeats: int) -> float:
    """What the spike detector takes an iteration, with loss, norm and full windows."""
    policy = SpikePolicy("log")
    numbers = itertools.count(1)
    values = itertools.cycle([3.0, 3.01, 2.99, 3.02, 2.98, 3.005, 2.995])

    def judge() -> None:
        value = next(values)
        policy.check(next(numbers), value, value)

    microseconds(judge, 1, 2 * spikes.WINDOW)
    return microseconds(judge, repeats, 100)


def watch_iteration(folder: str, run: Any) -> Callable[[], None]:
    """What rank 0 of many does beside the step: hooks of the hang watch and of the run's events, a
    look of the monitor's thread, and a line in run_events.jsonl."""
    monitor = MonitorClient.__new__(MonitorClient)
    main = threading.main_thread().ident
    monitor.__dict__ |= {
        "_phase": Phase("start", announced=False),
        "_wire": None,
        "_seen": (),
        "_main": main,
    }
    monitor.__dict__ |= {name: 0 for name in ("_ticks", "_phase_ticks", "_busy_ticks")}
    limits = Limits(540.0, 540.0, 540.0, 540.0, None)
    watch = HangWatch(monitor, limits, run)
    watch._seconds.append(0.1)
    run.services = Services(SignalWatch())
    events = RunEvents(run, time.time())
    events._path = Path(folder, "run_events.jsonl")
    numbers = itertools.count(1)

    def iteration() -> None:
        number = next(numbers)
        result = IterationResult(number, 8, 8 * number, 1e-3, 1.0, 0.1, 2.0, 1.0)
        watch.before_step(number)
        monitor._tick()
        for hook in (watch, events):
            hook.after_step(result)
            hook.after_iteration(number, None)
        events._write_steps(number)

    return iteration


def function_calls(function: Callable[[], Any]) -> int:
    """Calls of Python and C functions in this thread while it runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def instructions(size_text: str, steps: int) -> dict[str, int]:
    """Instructions of a step with and without, counted in a process of its own under callgrind."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        Path(folder, "switch.c").write_text(SWITCH)
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", f"{folder}/switch.so", f"{folder}/switch.c"],
            check=True,
        )
        words = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            "--dump-instr=no",
            "--separate-threads=no",
            f"--callgrind-out-file={folder}/out",
            sys.executable,
            __file__,
            "--inside",
            "--size",
            size_text,
            "--steps",
            str(steps),
            "--switch",
            f"{folder}/switch.so",
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"valgrind ended with {done.returncode}: {done.stderr[-2000:]}")
        counts = []
        for number in (1, 2, 3):
            text = Path(f"{folder}/out.{number}").read_text(errors="replace")
            counts.append(int(re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)[1]))
    return {
        "with": counts[0] // steps,
        "without": counts[1] // steps,
        "watch": counts[2] // WATCHED,
    }


def inside(size: Size, steps: int, switch: ctypes.CDLL) -> None:
    """Under callgrind: warm up and count steps with, steps without, then what watches a step."""
    step = Step(size)
    for turn in (step.with_parallel_code, step.without):
        undo = step.strip() if turn == step.without else _nothing
        turn()
        turn()
        switch.on()
        for _ in range(steps):
            turn()
        switch.off()
        undo()
    with tempfile.TemporaryDirectory() as folder:
        step.run.config = replace(
            step.run.config, checkpoint=replace(step.run.config.checkpoint, save=folder)
        )
        iteration = watch_iteration(folder, step.run)
        for number in range(WATCHED + 10):
            if number == 10:
                switch.on()
            iteration()
        switch.off()


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [OPTION ...]",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--size", default=DEFAULT_SIZE, help="as of train_step.py (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=2, help="steps counted by callgrind (default: 2)"
    )
    parser.add_argument(
        "--repeats", type=int, default=30, help="repeats of each timing, of which the best counts"
    )
    parser.add_argument("--no-callgrind", action="store_true", help="only microseconds")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--switch", help=argparse.SUPPRESS)
    return parser


def timed(size: Size, repeats: int) -> dict[str, Any]:
    """Microseconds of every piece and of a step; the losses of both steps must agree first."""
    step = Step(size)
    start = {p: p.detach().clone() for p in step.model.parameters()}
    ours = step.with_parallel_code()
    with torch.no_grad():
        for p, values in start.items():
            p.copy_(values)
    undo = step.strip()
    plain = step.without()
    calls = {"without": function_calls(step.without)}
    undo()
    calls["with"] = function_calls(step.with_parallel_code)
    if ours != plain:
        raise RuntimeError(
            f"the loss is {ours!r} with the parallel code and {plain!r} without: not the same step"
        )
    whole = microseconds(step.with_parallel_code, max(3, repeats // 6), 1)
    rows = []
    for piece in pieces(step):
        loops = 20 if piece.calls == 1 else 100
        pairs = [
            (microseconds(piece.ours, 1, loops), microseconds(piece.direct, 1, loops))
            for _ in range(repeats)
        ]
        ours, direct = (min(values) for values in zip(*pairs, strict=True))
        rows.append(
            {
                "piece": piece.name,
                "us": ours,
                "direct_us": direct,
                "calls": piece.calls,
                "us_per_step": (ours - direct) * piece.calls,
                "spread": statistics.pstdev(a - b for a, b in pairs),
            }
        )
    return {
        "step_us": whole,
        "pieces": rows,
        "calls": calls,
        "detector_us": detector_microseconds(repeats),
        "share": sum(row["us_per_step"] for row in rows) / whole,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Both figures; 1 if one of them is above the goal or cannot be had."""
    options = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    try:
        size = parse_size(options.size)
    except ValueError as error:
        print(f"error: --size {error}", file=sys.stderr)
        return 2
    if options.inside:
        with redirect_stdout(io.StringIO()):
            inside(size, options.steps, ctypes.CDLL(options.switch))
        return 0
    try:
        report: dict[str, Any] = timed(size, options.repeats)
        if not options.no_callgrind:
            report["instructions"] = counted(options)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shares = [report["share"]]
    print(
        f"{size.name}: {size.layers} layers, hidden {size.hidden}, sequence {size.seq}, "
        f"{size.micro_batches} x {size.micro_batch} samples, one thread, torch {torch.__version__}"
    )
    print(f"  {'piece':32}{'us a call':>10}{'direct':>9}{'calls':>7}{'us a step':>11}")
    for row in report["pieces"]:
        print(
            "  "
            f"{row['piece']:32}{row['us']:10.2f}{row['direct_us']:9.2f}{row['calls']:7}{row['us_per_step']:11.1f}"
        )
    print(
        f"microseconds: {100 * report['share']:.2f} % of a step of {report['step_us']:.0f} us "
        "(goal: at most 2 %)"
    )
    print(f"spike detector: {report['detector_us']:.1f} us an iteration, and no synchronisation")
    calls = report["calls"]
    print(
        f"calls of functions: {calls['with']} a step with the parallel code, {calls['without']} "
        f"without: {100 * (calls['with'] / calls['without'] - 1):+.1f} %"
    )
    if report.get("instructions"):
        counts = report["instructions"]
        report["instruction_share"] = counts["with"] / counts["without"] - 1.0
        shares.append(report["instruction_share"])
        print(
            f"instructions: {counts['with']:,} a step with the parallel code, "
            f"{counts['without']:,} without: {100 * shares[-1]:+.2f} % (goal: at most 2 %)"
        )
        report["watch_share"] = counts["watch"] / counts["with"]
        print(
            f"rank monitor and run events: {counts['watch']:,} instructions an iteration, "
            f"{100 * report['watch_share']:.3f} % of the step (goal: at most 0.5 %)"
        )
        shares.append(report["watch_share"] * GOAL / WATCH_GOAL)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(max(shares) > GOAL)


def counted(options: argparse.Namespace) -> dict[str, int] | None:
    """Instructions, or None with the reason said where they cannot be counted."""
    if shutil.which("valgrind") is None or shutil.which("cc") is None or not Path(HEADER).exists():
        print(
            f"valgrind, its header {HEADER} or a C compiler is not there: instructions are not "
            "counted"
        )
        return None
    return instructions(options.size, options.steps)


if __name__ == "__main__":
    sys.exit(main())
