"""`tools/spikes.py replay`: samples of some iterations at the state of a checkpoint, forward only,
and which stand out.

One process reads a checkpoint of any
layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron import threads
from megatron.analysis.run_reader import checkpoints
from megatron.checkpoint.filesystem import CheckpointError
from megatron.inference.load_model import TrainedModel, open_trained_model
from megatron.training.batch import BatchRules
from tools.shared.program import complain
from tools.shared.progress import Progress
from tools.shared.run_data import Reading, open_run

from .loss_outliers import Scale, mean_loss, scale_of
from .no_nan import without_nan
from .options import ReplayOptions
from .suspects import (
    BatchRow,
    Suspect,
    batch_rows,
    height,
    neighbours,
    suspects,
    usual,
)
from .text_anomalies import Measures
from .token_losses import token_losses


@dataclass(frozen=True)
class State:
    """A checkpoint's model, to ask for losses."""

    trained: TrainedModel
    rules: BatchRules

    @property
    def directory(self) -> str:
        """Where it comes from."""
        return self.trained.directory

    def losses(self, samples: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """The losses [s] of the tokens 1 .. s of each sample [s+1]."""
        return token_losses(
            self.trained.model, self.rules, samples, self.trained.config.training.micro_batch_size
        )


def open_state(path: str, step: int | None, device: str = "auto") -> State:
    """The model of a checkpoint. Raises ValueError or CheckpointError."""
    with contextlib.redirect_stdout(io.StringIO()):  # what training would log of its model
        trained = open_trained_model(path, step, device=device, dtype="fp32")
    d = trained.config.data
    return State(
        trained,
        BatchRules(
            trained.tokenizer.eod, d.reset_position_ids, d.reset_attention_mask, d.eod_mask_loss
        ),
    )


def state_before(run: str, iteration: int, step: int | None, device: str = "auto") -> State:
    """The state of `step`, else of the newest checkpoint before an iteration. Raises ValueError."""
    root = str(Path(run).parent) if re.fullmatch(r"iter_\d{7,}", Path(run).name) else run
    before = [number for number in checkpoints(root) if number < iteration]
    if step is None and not before:
        raise ValueError(
            f"{root}: no checkpoint before iteration {iteration}; give another one with --ckpt-step"
        )
    try:
        return open_state(root, before[-1] if step is None else step, device)
    except CheckpointError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class Replayed:
    """A sample and its mean losses: at the checkpoint, and at the other one if there is one."""

    iteration: int
    batch_row: BatchRow
    loss: float
    other_loss: float | None


Row = tuple[Replayed, np.ndarray]  # with the loss of each token


def check_replayable(reading: Reading) -> None:
    """Raises ValueError for rows of packed samples."""
    if reading.config.packed:
        raise ValueError(
            "rows of packed samples are not replayed: each has many samples, which have no loss "
            "of their own; `spikes.py docs --iteration N` ranks their documents by suspicion"
        )


def replay_iteration(
    reading: Reading, iteration: int, state: State, other_state: State | None
) -> list[Row]:
    """All samples of an iteration."""
    read = batch_rows(reading, iteration)
    check_replayable(reading)
    samples = [reading.dataset[row.sample] for row in read]
    losses_at_other = (
        [mean_loss(of_tokens) for of_tokens in other_state.losses(samples)]
        if other_state
        else [None] * len(read)
    )
    return [
        (Replayed(iteration, batch_row, mean_loss(of_tokens), loss), of_tokens)
        for batch_row, of_tokens, loss in zip(
            read, state.losses(samples), losses_at_other, strict=True
        )
    ]


def verdict(sample: Replayed, other_scale: Scale | None, iteration: int) -> str:
    """What a sample that stands out at the checkpoint is, by its loss at the other one, of
    `iteration`."""
    if other_scale is None or sample.other_loss is None:
        return "stands out here; --other-ckpt shows whether that is the data alone"
    loss = f"{sample.other_loss:.2f}, {other_scale.z(sample.other_loss):.1f} sigma"
    if other_scale.stands_out(sample.other_loss):
        return f"data: at iteration {iteration} it stands out too ({loss})"
    return f"data x state: at iteration {iteration} it is as others ({loss})"


def opened(args: ReplayOptions) -> tuple[Reading, range, State, State | None]:
    """Open what the command line names. Raises ValueError or CheckpointError."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", args.iterations)
    if not match:
        raise ValueError(
            f"--iterations {args.iterations}: give the first and the last as A-B, say 398-404"
        )
    first = int(match[1])
    last = int(match[2] or match[1])
    run = args.ckpt or args.load
    assert run is not None, "problems() refuses neither --ckpt nor --load"
    reading = open_run(run, None, first, args.world_size)
    if not 1 <= first <= last <= reading.plan.train_iters:
        raise ValueError(
            f"--iterations {args.iterations}: the run has the iterations 1 to "
            f"{reading.plan.train_iters}, and the first must not be behind the last"
        )
    state = (
        open_state(args.ckpt, args.ckpt_step, args.device)
        if args.ckpt
        else state_before(run, first, args.ckpt_step, args.device)
    )
    other_state = None
    if args.other_ckpt is not None:
        root = str(Path(state.directory).parent)
        other_state = (
            open_state(root, int(args.other_ckpt), args.device)
            if args.other_ckpt.isdecimal()
            else open_state(args.other_ckpt, None, args.device)
        )
    return reading, range(first, last + 1), state, other_state


def replay(args: ReplayOptions) -> int:
    """The samples of some iterations at a checkpoint's state, forward only: which of them have a
    loss far above the others, what they hold, and whether another state finds that too. Exit codes:
    0, 2 unreadable."""
    threads.set_waiting()
    try:
        reading, wanted, state, other_state = opened(args)
        around = neighbours(reading, wanted.start, wanted.stop - 1)
        samples, highest = _replayed(reading, wanted, around, state, other_state, args)
        if not args.json:
            _show(reading, samples, highest, wanted, around, state, other_state)
    except (ValueError, OSError, CheckpointError) as error:
        complain(error)
        return 2
    return 0


def _replayed(
    reading: Reading,
    wanted: range,
    around: Sequence[int],
    state: State,
    other_state: State | None,
    args: ReplayOptions,
) -> tuple[list[Replayed], list[Row]]:
    """Every sample of the range and of its neighbours, and those of the range with the highest
    losses. Prints one line per iteration, or per sample, as they come."""
    progress = Progress(0)
    start = time.monotonic()
    replayed: list[Replayed] = []
    highest: list[Row] = []
    measures = usual(reading, around) if args.json else []
    if not args.json:
        iterations = (
            f"iterations {wanted.start} to {wanted.stop - 1}"
            if len(wanted) > 1
            else f"iteration {wanted.start}"
        )
        also = f" and {other_state.directory}" if other_state else ""
        print(f"{iterations} at {state.directory}{also}, forward only", flush=True)
    count = len(wanted) + len(around)
    for number, iteration in enumerate([*wanted, *([] if args.json else around)], 1):
        rows = replay_iteration(reading, iteration, state, other_state)
        replayed += [row for row, _ in rows]
        remaining = (time.monotonic() - start) / number * (count - number)
        progress.update(0, f"  {number} of {count} iterations, {remaining:.0f} s left")
        if iteration not in wanted:
            continue
        highest = sorted(highest + rows, key=lambda row: -height(row[0].loss))[: args.top]
        if args.json:
            for row in rows:
                print(json.dumps(without_nan(_as_json(reading, row, measures))), flush=True)
        else:
            print(_line(iteration, [row for row, _ in rows]), flush=True)
    progress.clear()
    return replayed, highest


def _line(iteration: int, rows: Sequence[Replayed]) -> str:
    mean = float(np.mean([row.loss for row in rows]))
    also = (
        ""
        if rows[0].other_loss is None
        else f", {np.mean([row.other_loss for row in rows]):.4f} there"
    )
    return (
        f"iteration {iteration}: loss {mean:.4f}{also}; highest sample "
        f"{max(height(row.loss) for row in rows):.4f}"
    )


def _suspects(reading: Reading, row: Row, measures: Sequence[Measures]) -> list[Suspect]:
    return suspects(reading, [row[0].batch_row], measures, lambda _: iter([row[1]]))


def _as_json(reading: Reading, row: Row, measures: Sequence[Measures]) -> dict[str, Any]:
    replayed = row[0]
    return {
        "iteration": replayed.iteration,
        **dataclasses.asdict(replayed.batch_row),
        "loss": replayed.loss,
        "other": replayed.other_loss,
        "pieces": [dataclasses.asdict(suspect) for suspect in _suspects(reading, row, measures)],
    }


def _show(
    reading: Reading,
    samples: Sequence[Replayed],
    highest: Sequence[Row],
    wanted: range,
    around: Sequence[int],
    state: State,
    other_state: State | None,
) -> None:
    """Which samples stand out, for a reader."""
    scale = scale_of([sample.loss for sample in samples])
    scale_at_other = (
        scale_of([sample.other_loss for sample in samples if sample.other_loss is not None])
        if other_state
        else None
    )
    inside = [sample for sample in samples if sample.iteration in wanted]
    out = sum(scale.stands_out(sample.loss) for sample in inside)
    print(
        f"usual is {scale.median:.2f} +- {scale.sigma:.2f} ({len(samples)} samples, "
        f"{len(samples) - len(inside)} of them of neighbouring iterations); {out} of "
        f"{len(inside)} stand out"
    )
    measures = usual(reading, around) if out else []
    for row in highest:
        sample = row[0]
        if not scale.stands_out(sample.loss):
            break
        worst = max(_suspects(reading, row, measures), key=lambda suspect: height(suspect.loss))
        conclusion = verdict(
            sample, scale_at_other, other_state.trained.iteration if other_state else 0
        )
        print(
            f"{sample.loss:6.2f}  {scale.z(sample.loss):.1f} sigma: sample "
            f"{sample.batch_row.sample} of iteration {sample.iteration} (rank "
            f"{sample.batch_row.dp_rank}, micro-batch {sample.batch_row.micro_batch})\n"
            f"        {conclusion}\n"
            f"        worst in it: {worst.line()}: {worst.loss:.2f} nats per token; "
            f"{worst.reason}\n"
            f"        {json.dumps(worst.head, ensure_ascii=False)}"
        )
    if not out:
        print(
            "no sample stands out at this state: if the run spiked here, state and data made it "
            "together; try the newest checkpoint before the spike, or a wider range"
        )
