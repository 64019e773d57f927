"""What nanotron's first rank holds at most in its sweep of runs, and which of two programs a run
had: another program keeps other tensors than this suite, whose own memory is the plan's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.config.plan.fit import GIB

from .step_time import Numbers, Runs, parameters

# Bytes that nanotron's code (huggingface/nanotron, 2024-12) says. Of a parameter: weights in bf16
# and sums of gradients in fp32; DDP's buckets in bf16 where data are parallel; master weights and
# Adam's moments. Of a token: per hidden element two norms and their inputs, queries, keys and
# values before and after their rotation, attention; per element of the MLP gate and up, activation
# and product. Of a whole sequence's element what a layer gathers: two inputs in bf16.
STATE, GRADIENT, OPTIMIZER = 6, 2, 12
HIDDEN, WIDE, TWO_INPUTS = 20, 8, 4
# Fitted to the sweep: what the allocator rounds; gradients beside ZeRO 1, and the embedding's; a
# logit; buffers of whole sequences where tensors are parallel; how much of these the host asks for
# before the device, whose queue of launches is bounded, has freed any.
ROUNDED = 1.05
GRADIENT_OF_SHARDS = 1.5
EMBEDDING = 4
LOGIT = 9.1
GATHERED = 6.7
AHEAD = 100.0
REST = 0.14 * GIB
FULL = 72 * GIB  # above it there are no runs of the earlier program
RATE, LAUNCH = 4e14, 3e-3  # FLOP/s of an H100 in its layers, seconds that launching one takes
POLL = 0.2  # seconds until the later program has seen a message: twice it sleeps 0.1


class Held(NamedTuple):
    """Bytes by the later program, whose host waits for the device, and by the earlier."""

    later: Numbers
    earlier: Numbers


def held(r: Runs) -> Held:
    """Of these runs."""
    # the later program's first stage takes one block more where blocks and share end together
    one_more = np.minimum(np.floor(r.share_of_stage + 1e-9) + 1, r.layers)
    return Held(_held(r, one_more, 0), _held(r, r.first_layers, _ahead(r)))


def _held(r: Runs, layers: Numbers, ahead: Numbers) -> Numbers:
    """With so many layers on the first stage, and `ahead` bytes of a whole sequence's element."""
    dense, _, embedding = parameters(r)
    one = np.asarray(r.pp) == 1
    ends = embedding * np.where(one & ~np.asarray(r.tied, bool), 2, 1)
    own = dense * r.pp * layers / r.layers + ends
    zero = np.asarray(r.zero) > 0
    bucket = np.where(zero, GRADIENT_OF_SHARDS, GRADIENT) * (np.asarray(r.dp) > 1)
    layer = ROUNDED * r.tokens * (HIDDEN * r.hidden + WIDE * r.ffn) / r.tp
    return (
        (STATE + bucket + OPTIMIZER / np.where(zero, r.dp, 1)) * own
        + EMBEDDING * ends
        + layer * layers * np.minimum(r.pp, r.micro_batches)
        + LOGIT * one * r.tokens * r.vocab / r.tp
        + np.where(np.asarray(r.tp) > 1, r.tokens * r.hidden, 0) * (GATHERED + ahead)
        + REST
    )


def _ahead(r: Runs) -> Numbers:
    """Bytes of a whole sequence's element that the host asks for ahead of the device: with stages
    in the first forwards but two; in all micro-batches without stages, or where the device takes
    longer for a layer than the host."""
    device = r.tokens / r.tp * (6 * r.products + 24 * r.keys * r.hidden) / RATE
    busy = (device > r.stall * r.tp + LAUNCH) & (r.micro_batches > r.pp)
    forwards = np.maximum(np.minimum(r.pp, r.micro_batches) - 2, 0)
    forwards = np.where(busy | (np.asarray(r.pp) == 1), r.micro_batches, forwards)
    return np.minimum(AHEAD, TWO_INPUTS * r.first_layers * forwards)


def later(r: Runs) -> Numbers:
    """Which runs are certainly of the later program: what the earlier cannot hold, and stages that
    more than two nodes share."""
    wide = np.asarray(r.tp) > 2 * r.node
    return (held(r).earlier > FULL) | ((np.asarray(r.pp) > 1) & wide)


def likely_later(r: Runs) -> Numbers:
    """Which runs most likely are: on more than 256 GPUs nearly all but those of more than two nodes
    that share tensors without stages (planner.md)."""
    many = r.tp * r.pp * r.dp > 256
    return later(r) | (many & ((np.asarray(r.pp) > 1) | (np.asarray(r.tp) <= 2 * r.node)))


def slow_sums(r: Runs) -> Numbers:
    """Seconds that the later program takes more for sums of all gradients over many nodes, at the
    rate measured."""
    dense, _, embedding = parameters(r)
    many = (r.zero == 0) & (r.dp > 1) & (r.tp * r.pp * r.dp > 256)
    return np.where(many, 4 * (dense + 2 * embedding / r.pp), 0) / 1.5e9
