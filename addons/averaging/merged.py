"""The mean of the newest checkpoints of a run, put in the model's weights for a validation: what
tools/merge_checkpoints.py would write of them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatron.checkpoint import reading
from megatron.checkpoint.sharded_reader import Reader
from megatron.config.history import History, led_to
from megatron.config.run_directory import RunDirectory
from megatron.parallel.sharding import sharding_of
from megatron.training.checkpointing.load import read_into
from megatron.training.checkpointing.save import boxes_of, save_directory
from megatron.training.run import Run

from .average import in_the_model
from .decays import DECAYS, decay_weights

NAME = "merged"
MASTER = "optimizer.fp32_param."


def newest(run: Run, count: int) -> list[int]:
    """The iterations of the last `count` checkpoints in --save that led to this run, oldest
    first."""
    now = run.progress.iteration
    own = History.parse(run.progress.history.dump(now))
    stored = RunDirectory(save_directory(run.config.checkpoint)).histories
    return sorted(led_to(own, now, stored))[-count:]


@contextmanager
def merged(run: Run, window: int, decay: str) -> Iterator[bool]:
    """The model has the mean of the last `window` checkpoints while this is open; False where there
    are fewer."""
    iterations = run.of_rank_0(lambda: newest(run, window))
    if len(iterations) < window:
        yield False
        return
    directory = save_directory(run.config.checkpoint)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(reading.Candidate(directory, iteration).open().reader())
            for iteration in iterations
        ]
        means = _means(run, readers, decay_weights(DECAYS[decay], window))
    with in_the_model(run, means):
        yield True


@torch.no_grad()
def _means(run: Run, readers: Sequence[Reader], weights: Sequence[float]) -> list[torch.Tensor]:
    """Of each of this rank's main weights, summed in float64 and rounded once to what the model
    has."""
    stored = set(readers[0].names())
    means = []
    for param, main in run.optimizer.weights:
        sharding = sharding_of(param)
        name = sharding.name
        source = MASTER + name if MASTER + name in stored else name
        total = torch.zeros(main.shape, dtype=torch.float64)
        part = torch.empty(main.shape, dtype=readers[0].dtype(source))
        for reader, weight in zip(readers, weights, strict=True):
            span = getattr(param, "span", None)
            for box, values in boxes_of(sharding, run.runtime.ctx, part, span):
                read_into(values, reader, source, sharding, box, run.plan.vocab_size)
            reader.wait()
            total.add_(part, alpha=weight)
        means.append(total.to(param.dtype).to(param.device))
    return means
