"""What counts something in a training step, over all ranks, without a collective of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

    from megatron.training.batch import Batch, MicroBatch


class StepCounter:
    """Counts that are summed over ranks together with the loss, in `size` float64 slots. An entry
    of `Run.counters`; a subclass overrides what it needs.

    The slots of all ranks are added, those of tensor, pipeline and context ranks too, which have
    the same samples: one of them alone may count a sample."""

    size = 0
    # TOKEN_METRICS that `add` reads in `batch.token_metrics`
    token_metrics: tuple[str, ...] = ()
    with_subset = False  # whether `MicroBatch.subset_ids` is needed
    # a function of a sample's number and array; the sum over a micro-batch is `MicroBatch.hash`
    hash_of: Callable[[int, np.ndarray], int] | None = None

    def see(self, samples: MicroBatch) -> None:
        """A micro-batch was read on this rank; it is still on the host."""

    def add(self, slots: torch.Tensor, batch: Batch) -> None:
        """The loss of a micro-batch was computed, on the last pipeline stage; `slots` [size] are
        the sums of this step."""

    def close(self, slots: torch.Tensor) -> None:
        """The micro-batches are over: complete this rank's `slots` [size], and forget them. All
        ranks call this: what is no sum may be agreed on here."""

    def summed(self, iteration: int, sums: list[float]) -> Mapping[str, float | int | None]:
        """Called with the sums [size] of all ranks; what to report of the iteration, by name."""
        return {}

    def logged(self) -> Mapping[str, float]:
        """Called after the update; further metrics of the iteration, which its line has, too."""
        return {}
