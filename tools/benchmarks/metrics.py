#!/usr/bin/env python
"""What the metrics add to the time of a step: each part of --log-subsets, --log-accuracy and
--log-format internlm alone.

Every part is timed in processor time, again and again, of which the least counts: other work only
ever adds. Where the step does something without metrics, too (the loss, a row of the metrics file),
the difference counts. Goal: all together at most 1 % of a step of the 10M model. Reading and
summing on the host are counted as well, which a GPU would hide.
"""

from __future__ import annotations

import argparse
import functools
import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2]),
    str(Path(__file__).resolve().parent / "step"),
]

import numpy as np  # noqa: E402
from overhead import Step, microseconds  # noqa: E402
from sizes import parse_size  # noqa: E402

from megatron.data.samples import Sample  # noqa: E402
from megatron.kernels import functional as kernels  # noqa: E402  (after overhead.py, which sets threads)
from megatron.model.gpt import CORRECT, UNSMOOTHED_LOSS  # noqa: E402
from megatron.training.batch import MicroBatch, make_batch  # noqa: E402
from megatron.training.logging.iteration import IterationResult  # noqa: E402
from megatron.training.logging.metrics_file import MetricsFile  # noqa: E402
from megatron.training.logging.output import OutputFile  # noqa: E402
from megatron.training.logging.points import Boards
from megatron.training.logging.subset_metrics import SubsetMetrics  # noqa: E402
from megatron.training.logging.tensorboard import TensorBoard  # noqa: E402
from megatron.training.logging.training_log import TrainingLog  # noqa: E402

torch = sys.modules["torch"]
GOAL = 0.01
NAMES = ("en", "cn", "code")


def parts(
    step: Step, folder: str, opened: ExitStack
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]:
    """By name, what a step does for its metrics, and what it would do without (None: nothing)."""
    run = step.run
    samples = step.samples
    rows = SubsetMetrics(NAMES, run.runtime.ctx, accuracy=True, packed=False)
    slots = torch.zeros(rows.size, dtype=torch.float64)
    micro_batch, length = samples[0].tokens.shape
    of_subsets = MicroBatch.pack(
        [
            Sample(row, subset=number % len(NAMES))
            for number, row in enumerate(samples[0].rows.numpy())
        ]
    )
    batch = make_batch(of_subsets, run.rules, run.runtime.device)
    losses = torch.rand(micro_batch, length)
    logits = torch.randn(micro_batch * length, run.plan.padded_vocab_size)
    labels = batch.labels.reshape(-1)
    right = torch.empty(len(labels), dtype=torch.bool)
    one = samples[0].rows[0].numpy()

    def loss(right: Any) -> None:
        with torch.no_grad():
            for _ in samples:
                kernels.cross_entropy(logits, labels, vocab_size=run.plan.vocab_size, right=right)

    def sums() -> None:
        for _ in samples:
            metrics = {UNSMOOTHED_LOSS: losses, CORRECT: right.view(micro_batch, length)}
            rows.add(slots, batch, metrics)
        rows.close(slots)
        rows.named(slots.tolist())

    def ids_of_samples() -> None:
        for _ in range(len(samples) * micro_batch):
            np.append(one, 1)

    config = replace(
        run.config,
        logging=replace(run.config.logging, log_format="internlm", metrics_file=f"{folder}/rows"),
    )
    result = IterationResult(
        1,
        run.plan.global_batch_size(1),
        16,
        1e-4,
        1.0,
        1.0,
        3.0,
        1.0,
        fwd_bwd_seconds=0.9,
        packed=rows.named([1.0] * rows.size),
        adam_beta2=0.95,
    )
    more, less = (
        _told(config, run, folder, each, opened) for each in (result, replace(result, packed=None))
    )
    return {
        "ids of subsets behind samples": (ids_of_samples, None),
        "which labels are first, in the loss": (lambda: loss(right), lambda: loss(None)),
        "sums by subset": (sums, None),
        "line, metrics file, TensorBoard": (more, less),
    }


def _told(
    config: Any, run: Any, folder: str, result: IterationResult, opened: ExitStack
) -> Callable[[], None]:
    """One iteration written down everywhere."""
    rows = OutputFile(f"{folder}/rows", "--metrics-file")
    writers = [
        MetricsFile(rows, config.model.seq_length),
        Boards([TensorBoard(folder, 1000)], config.logging),
    ]
    lines = TrainingLog(config, run.plan, run.timers, run.runtime.ctx.world, writers, run.runtime)
    opened.callback(lines.close)

    def tell() -> None:
        with redirect_stdout(io.StringIO()):
            lines.add(result)

    return tell


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [OPTION ...]",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--size", default="gpt10m", help="as of train_step.py (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=20, help="repeats of each timing (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if they are above the goal."""
    options = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    try:
        size = parse_size(options.size)
    except ValueError as error:
        print(f"error: --size {error}", file=sys.stderr)
        return 2
    step = Step(size)
    total = 0.0
    whole = microseconds(step.with_parallel_code, max(2, options.repeats // 5), 1)
    print(
        f"{size.name}: {size.micro_batches} x {size.micro_batch} samples of {size.seq} tokens, "
        f"one thread, {len(NAMES)} subsets"
    )
    timed = functools.partial(microseconds, repeats=options.repeats, loops=3)
    with tempfile.TemporaryDirectory(prefix="metrics-") as folder, ExitStack() as opened:
        for name, (ours, other) in parts(step, folder, opened).items():
            taken = timed(ours) - (timed(other) if other else 0.0)
            total += taken
            print(f"  {name:40}{taken:10.1f} us a step")
    share = total / whole
    print(
        f"together {total:.1f} us of a step of {whole:.0f} us: {100 * share:.2f} % (goal: at "
        f"most {100 * GOAL:.0f} %)"
    )
    return int(share > GOAL)


if __name__ == "__main__":
    sys.exit(main())
