"""What nanotron's first rank holds at most, for its sweep of runs: another program keeps other
tensors than this suite, whose own memory is the plan's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.config.plan.fit import GIB

from .step_time import Numbers, Runs, parameters

# Bytes that nanotron's code (huggingface/nanotron, 2026-04) says. Of a parameter: weights in bf16
# and sums of gradients in fp32; DDP's buckets in bf16 where data are parallel; master weights and
# Adam's moments; the second gradient of the embedding. Of a token: per hidden element two norms and
# their inputs, queries, keys and values before and after their rotation, attention; per element of
# the MLP gate and up, activation and product; 2 % more, as the allocator rounds.
STATE, GRADIENT, OPTIMIZER, EMBEDDING = 6, 2, 12, 2
HIDDEN, WIDE, ROUNDED = 20, 8, 1.02
# Fitted to the sweep: how much of DDP's buckets stays with ZeRO 1; what a layer's gradients take,
# in layers; logits, and those of the micro-batch before; buffers of whole sequences where tensors
# are parallel; of a layer, and of a logit without stages, where they are kept.
GRADIENT_OF_SHARDS = 1.5
LAYERS_OF_BACKWARD = 1.75
LOGIT, LOGIT_BEFORE = 6.3, 3.0
GATHERED = 5.8
KEPT, KEPT_OF_LOGIT = 2.4, 0.78
REST = 0.2 * GIB
FULL = 74 * GIB  # what none of its runs of this kind takes


class Held(NamedTuple):
    """Bytes, where backward gathers sequences again (its default since 2025) and where what forward
    gathered is kept; which of the two a run had is not published."""

    again: Numbers
    kept: Numbers


def held(r: Runs) -> Held:
    """Of these runs."""
    dense, _, embedding = parameters(r)
    one = np.asarray(r.pp) == 1
    layers = r.first_layers
    ends = embedding * np.where(one & ~np.asarray(r.tied, bool), 2, 1)
    own = dense * r.pp * layers / r.layers + ends
    shard = np.where(np.asarray(r.zero) > 0, r.dp, 1)
    alive = layers * np.minimum(r.pp, r.micro_batches)
    layer = ROUNDED * r.tokens * (HIDDEN * r.hidden + WIDE * r.ffn) / r.tp
    bucket = np.where(np.asarray(r.zero) > 0, GRADIENT_OF_SHARDS, GRADIENT)
    logits = np.where(r.micro_batches > 1, LOGIT + LOGIT_BEFORE, LOGIT) * one
    whole = np.where(np.asarray(r.tp) > 1, r.tokens * r.hidden, 0)
    again = (
        (STATE + bucket * (np.asarray(r.dp) > 1) + OPTIMIZER / shard) * own
        + EMBEDDING * ends
        + layer * (alive + LAYERS_OF_BACKWARD)
        + logits * r.tokens * r.vocab / r.tp
        + GATHERED * whole
        + REST
    )
    logit = KEPT_OF_LOGIT * one * r.tokens * r.vocab * (np.asarray(r.tp) > 1)
    return Held(again, again + KEPT * alive * whole + logit)


def guessed(r: Runs, both: Held) -> Numbers:
    """The one that a run most likely had: on many GPUs, on two stages, on stages that 32 ranks
    share, and where the other does not fit, nearly all gather again."""
    many = r.tp * r.pp * r.dp >= 512
    late = many | (np.asarray(r.pp) == 2) | ((r.tp >= 32) & (r.pp > 1)) | (both.kept > FULL)
    return np.where(late, both.again, both.kept)


def late_series(r: Runs) -> Numbers:
    """Seconds that a step of its later runs takes more on average (planner.md): those gather again,
    and nearly all on more than 256 GPUs are of them. Medians, whatever the sizes: of a micro-batch
    between two stages, and of more; of each layer whose ranks share tensors across nodes; and the
    rate of an all-reduce of all gradients."""
    stages = np.where(r.pp == 1, 0, np.where(r.pp == 2, 0.5, 1.0)) * (r.micro_batches + r.pp - 1)
    layers = 0.045 * (np.ceil(r.tp / r.node) - 1) * r.micro_batches * r.of_stage
    dense, _, embedding = parameters(r)
    whole = np.where((r.zero == 0) & (r.dp > 1), 4 * (dense + 2 * embedding / r.pp), 0)
    return np.where(r.tp * r.pp * r.dp > 256, 0.8, 0) * (stages + layers + whole / 1.5e9)
