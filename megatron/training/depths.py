"""What the losses of multi-token prediction weigh in a step, and what they tell the log."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megatron.model.blocks.mtp.module import Depths, rolled
from megatron.parallel.collectives import all_reduce
from megatron.training.batch import MicroBatch, masks_of
from megatron.training.run import Run

if TYPE_CHECKING:
    from megatron.training.step_sums import MetricValue

Scales = Sequence[float | torch.Tensor]


def with_scales(
    run: Run,
    samples: Iterator[MicroBatch],
    count: int,
    backward_scale: float,
    take: Callable[[Iterator[MicroBatch]], MicroBatch],
) -> tuple[Iterator[MicroBatch], Scales]:
    """The samples, and of each depth the factor of its sum of losses in backward, with which its
    mean over the tokens that count, of all ranks and the `count` micro-batches, is added to the
    mean loss. `take`: the next of the samples."""
    model = run.config.model
    depths = len(model.mtp_layers)
    weight = backward_scale * model.mtp_loss_scaling_factor / depths
    own = [take(samples)]
    if not (own[0].packed or run.rules.reset_attention_mask or run.rules.eod_mask_loss):
        s = own[0].tokens.shape[1]
        return itertools.chain(own, samples), [
            weight * s / max(1, s - k) for k in range(1, depths + 1)
        ]
    # Gradients are divided by the tokens of the loss, of which a depth has another share on each
    # rank and in each micro-batch: it is counted in the samples, before the first gradient.
    own += itertools.islice(samples, count - 1)
    counts = torch.zeros(1 + depths, dtype=torch.float64)
    for micro_batch in own:
        tokens = micro_batch.tokens
        mask, _, documents = masks_of(micro_batch, run.rules)
        counts[0] += tokens.numel() if mask is None else mask.sum()
        for k, depth in enumerate(rolled(tokens, micro_batch.labels, mask, documents, depths), 1):
            counts[k] += depth.mask.sum()
    total = all_reduce(counts.to(run.runtime.device), run.runtime.ctx.dp)
    scales = (weight * total[0] / total[1:].clamp(min=1)).unbind()
    return itertools.chain(own, samples), scales


def metrics(depths: Depths) -> dict[str, MetricValue]:
    """Loss and acceptance of each depth. Raises ValueError where the model was not given them."""
    if not depths.metrics:
        raise ValueError(
            "--mtp-num-layers: the model computed no losses of them; forward_step must pass "
            "labels= and **batch.extras to it, or omit the flag [extras-missing]"
        )
    return dict(depths.metrics)
