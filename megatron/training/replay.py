"""Samples that were read once, put through a trained model again: the loss of every token, forward only.

It knows a model and token ids; it must not know files, datasets, iterations or an optimizer.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.model.gpt import GPTModel
from megatron.training.batch import BatchRules, make_batch
from megatron.training.spikes import SIGMA

STANDS_OUT = 6.0        # sigma above the median of the samples
LEAST_EXCESS = 0.5      # nats above it


@torch.inference_mode()
def token_losses(model: GPTModel, rules: BatchRules, samples: Sequence[np.ndarray], micro_batch_size: int
                 ) -> Iterator[np.ndarray]:
    """The losses [s] in nats of the tokens 1 .. s of each of the samples [s+1], NaN where training masks the loss.

    `micro_batch_size` samples go through the model at once; dropout is off.
    """
    device = next(model.parameters()).device
    for first in range(0, len(samples), micro_batch_size):
        batch = make_batch(torch.from_numpy(np.stack(samples[first:first + micro_batch_size])), rules, device)
        losses = model(batch.tokens, batch.position_ids, batch.labels, batch.document_ids).float()
        if batch.loss_mask is not None:
            losses = losses.masked_fill(batch.loss_mask == 0, float("nan"))
        yield from losses.cpu().numpy()


def mean_loss(losses: np.ndarray) -> float:
    """The mean of the losses that count; NaN where none does."""
    counted = losses[~np.isnan(losses)]
    return float(counted.mean(dtype=np.float64)) if len(counted) else float("nan")


@dataclass(frozen=True)
class Scale:
    """The usual loss of a sample at one state of the model: `median` in nats and `sigma`, 1.4826 x the median distance."""
    median: float
    sigma: float

    def z(self, loss: float) -> float:
        """How far a loss lies above the median, in sigma."""
        return (loss - self.median) / max(self.sigma, 1e-12)

    def stands_out(self, loss: float) -> bool:
        """Is it far above all that is usual? A loss that is no number is."""
        return not np.isfinite(loss) or (self.z(loss) > STANDS_OUT and loss - self.median > LEAST_EXCESS)


def scale_of(losses: Sequence[float]) -> Scale:
    """The scale of these losses of samples; those that are no numbers do not count."""
    finite = np.array([loss for loss in losses if np.isfinite(loss)])
    if not len(finite):
        return Scale(float("nan"), float("nan"))
    median = float(np.median(finite))
    return Scale(median, SIGMA * float(np.median(np.abs(finite - median))))
