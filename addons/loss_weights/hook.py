"""Weights of tokens by their source, and the losses of the sources on the log line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.training.batch import Batch
from megatron.training.hook import Hook, Step
from megatron.training.logging.subset_metrics import SubsetMetrics
from megatron.training.result import IterationResult
from megatron.training.run import Run

LOSS = "loss/"  # of the names of `SubsetMetrics`


def weigh_by_source(run: Run, weights: Sequence[float]) -> None:
    """From now on a token's loss counts `weights` [sources] times in training.

    The step divides the sum of losses by the sum of `loss_mask` over micro-batches and ranks: with
    weights in the mask both are weighted. Only their ratios matter; the largest becomes 1, so that
    no sum in fp16 is larger than without them.
    """
    dtype = getattr(torch, run.config.precision.main_dtype)
    table = torch.tensor(weights, dtype=dtype, device=run.runtime.device) / max(weights)

    def weigh(batch: Batch) -> Batch:
        assert batch.subset_ids is not None, "they are demanded"
        mask = batch.loss_mask
        if mask is None:
            mask = torch.ones_like(batch.labels, dtype=torch.float32)
        return replace(batch, loss_mask=mask * table[batch.subset_ids], counted=mask)

    run.weigh = weigh


class SourceLosses(Hook):
    """Moves the loss of each source, which is without weights, from the counts of a step to the
    metrics, which the log line has."""

    before = ("IterationLog",)

    def __init__(self, run: Run):
        counters = (counter for counter in run.counters if isinstance(counter, SubsetMetrics))
        self.sources = [name for counter in counters for name in counter.subsets]

    def wrap_step(self, step: Step) -> Step:
        """The step with the losses in its metrics."""

        def logged(*args: Any) -> IterationResult:
            result = step(*args)
            losses = {name: value for name, value in result.counts.items() if name.startswith(LOSS)}
            counts = {name: n for name, n in result.counts.items() if name not in losses}
            return replace(result, counts=counts, metrics={**result.metrics, **losses})

        return logged
