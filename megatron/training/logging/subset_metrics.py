"""Metrics per subset of the data, and how packed rows are filled."""

import math
from collections.abc import Sequence

import torch

from megatron.model.gpt import TOKEN_METRICS, UNSMOOTHED_LOSS
from megatron.parallel.context import ParallelContext
from megatron.training.batch import Batch, MicroBatch
from megatron.training.step_counter import StepCounter

# Of the rows of data-parallel rank 0: pieces, the longest one's tokens, the
# most and the fewest pieces of a row.
FILLED = ("num_samples_in_batch", "largest_length", "largest_batch", "smallest_batch")


class SubsetMetrics(StepCounter):
    """One rank's part of a step's counts."""

    with_subset = True

    def __init__(
        self,
        subsets: Sequence[str],
        ctx: ParallelContext,
        accuracy: bool = False,
        packed: bool = True,
    ) -> None:
        self.subsets = tuple(subsets)
        self.filled = FILLED if packed else ()
        # with the number of tokens, the sums
        self.token_metrics = TOKEN_METRICS if accuracy else (UNSMOOTHED_LOSS,)
        self.kinds = 1 + len(self.token_metrics)
        self.size = len(self.filled) + self.kinds * len(self.subsets)
        self._reports = not (ctx.dp.rank or ctx.cp.rank or ctx.tp.rank or ctx.pp.rank)
        self._sums = ctx.tp.rank == 0  # the others have the same losses
        self._rows: list[tuple[int, int]] = []

    def see(self, samples: MicroBatch) -> None:
        """Count how a micro-batch of this rank, still on the host, is filled, if its samples are
        packed."""
        if self._reports and self.filled and (positions := samples.positions) is not None:
            row = positions[0]
            self._rows.append((int((row == 0).sum()), int(row.max()) + 1))

    def add(self, slots: torch.Tensor, batch: Batch) -> None:
        """Add a micro-batch's losses, tokens and correct labels to those of its subsets; all tokens
        of a row are of one subset, `batch.subset_ids` [b, 1 or s]."""
        # this class is there where subsets are counted
        assert batch.subset_ids is not None and batch.token_metrics is not None
        mask = batch.loss_mask
        values = batch.token_metrics.values
        if not values:
            raise ValueError(
                "--log-subsets, --packed-samples: the model told nothing of single tokens; "
                "forward_step must pass **batch.extras to it [extras-missing]"
            )
        losses, *correct = (values[name] for name in self.token_metrics)
        kinds = [losses, torch.ones_like(losses) if mask is None else mask, *correct]
        if mask is not None:
            kinds[::2] = [kind * mask for kind in kinds[::2]]
        sums = torch.stack([kind.sum(1, dtype=slots.dtype) for kind in kinds])
        slots[len(self.filled) :].view(self.kinds, -1).index_add_(1, batch.subset_ids[:, 0], sums)

    def close(self, slots: torch.Tensor) -> None:
        """The step is over: complete this rank's slots, and start the next step's."""
        if not self._sums:
            slots.zero_()
        if self._reports and self.filled:
            packed, longest = zip(*self._rows, strict=True)
            counts = [sum(packed), max(longest), max(packed), min(packed)]
            slots[: len(counts)] = torch.tensor(counts, dtype=slots.dtype)
        self._rows.clear()

    def summed(self, iteration: int, sums: Sequence[float]) -> dict[str, float | int | None]:
        """The sums of all ranks by name; the loss of a subset without tokens is None."""
        first = len(self.filled)
        count = len(self.subsets)
        report: dict[str, float | int | None] = {
            name: int(value) for name, value in zip(self.filled, sums, strict=False)
        }
        losses, tokens, *right = (
            sums[first + kind * count :][:count] for kind in range(self.kinds)
        )
        mean = sum(losses) / max(1.0, sum(tokens))
        report |= {
            "loss_from_metric": mean,
            "perplexity": math.exp(mean) if mean < 700.0 else math.inf,
        }
        if right:
            report["acc"] = sum(right[0]) / max(1.0, sum(tokens))
            report |= {
                f"acc/{name}": hits / value if value else None
                for name, hits, value in zip(self.subsets, right[0], tokens, strict=True)
            }
        report |= {
            f"tokens/{name}": int(value) for name, value in zip(self.subsets, tokens, strict=True)
        }
        report |= {
            f"loss/{name}": loss / value if value else None
            for name, loss, value in zip(self.subsets, losses, tokens, strict=True)
        }
        return report
