"""What nanotron's first rank holds at most, for its sweep of runs: another program keeps other
tensors than this suite, whose own memory is the plan's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.config.plan.fit import GIB

from .step_time import Numbers, Runs, parameters

# Bytes, fitted to the sweep. Of a parameter: weights in bf16 and sums of gradients in fp32; where
# data are parallel, most of the gradients in bf16; master weights and Adam's moments; of the
# embedding, the gradients of its two uses.
STATE, GRADIENT, OPTIMIZER, EMBEDDING = 6, 1.5, 12.4, 2.8
# Of a token: per hidden element two norms and their inputs, queries, keys and values before and
# after their rotation, attention; per element of the MLP gate, up, activation and product; 2 % more
# than these 20 and 8 bytes, as the allocator rounds.
HIDDEN, WIDE = 20.4, 8.2
LAYERS_OF_BACKWARD = 1.7  # what a layer's gradients take, in layers
LOGIT, LOGIT_BEFORE = 6.8, 2.9  # ... and of the micro-batch before
GATHERED = 5.7  # buffers of whole sequences where tensors are parallel
# ... and what is kept of them, without stages and with: of a layer, and of all
KEPT, KEPT_OF_STAGE = (1.3, 64), (1.5, 25)
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
    layer = r.tokens * (HIDDEN * r.hidden + WIDE * r.ffn) / r.tp
    logits = np.where(r.micro_batches > 1, LOGIT + LOGIT_BEFORE, LOGIT) * one
    whole = np.where(np.asarray(r.tp) > 1, r.tokens * r.hidden, 0)
    again = (
        (STATE + GRADIENT * (np.asarray(r.dp) > 1) + OPTIMIZER / shard) * own
        + EMBEDDING * ends
        + layer * (alive + LAYERS_OF_BACKWARD)
        + logits * r.tokens * r.vocab / r.tp
        + GATHERED * whole
        + REST
    )
    (layers_kept, kept), (of_stage, stage_kept) = KEPT, KEPT_OF_STAGE
    sequences = np.where(one, layers_kept * alive + kept, of_stage * alive + stage_kept)
    return Held(again, again + sequences * whole)


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
