"""Samples that were read once, put through a trained model again: the loss of every token, forward
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron.data.samples import sample_of
from megatron.model.gpt import GPTModel
from megatron.training.batch import BatchRules, MicroBatch, make_batch

from .loss_outliers import MASKED


@torch.inference_mode()
def token_losses(
    model: GPTModel, rules: BatchRules, samples: Sequence[np.ndarray], micro_batch_size: int
) -> Iterator[np.ndarray]:
    """The losses [s] in nats of the tokens 1 .. s of each of the samples [s+1], MASKED where
    training masks the loss.

    `micro_batch_size` samples go through the model at once; dropout is off.
    """
    device = next(model.parameters()).device
    for first in range(0, len(samples), micro_batch_size):
        rows = samples[first : first + micro_batch_size]
        batch = make_batch(MicroBatch.pack([sample_of(row) for row in rows]), rules, device)
        losses = model(batch.tokens, batch.position_ids, labels=batch.labels, **batch.extras)
        losses = losses.float()
        if batch.loss_mask is not None:
            losses = losses.masked_fill(batch.loss_mask == 0, MASKED)
        yield from losses.cpu().numpy()
