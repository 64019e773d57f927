"""What context-parallel ranks send each other in attention."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.config.plan.transfer import Transfer
from megatron.model.blocks.block import Sizes

Attention = Any  # of facts.py, which loads this module


class ContextTraffic(NamedTuple):
    """Keys and values for one pass of the core, and their gradients; what ranks that exchange heads
    send; keys once more, for the largest scores."""

    keys: Transfer
    gradients: Transfer
    exchanged: list[Transfer]
    recorded: list[Transfer]


def context_traffic(mixer: Attention, sizes: Sizes) -> ContextTraffic:
    """Of a micro-batch on a rank."""
    return ContextTraffic(*_ring(mixer, sizes), _heads(mixer, sizes), _recorded(mixer, sizes))


def _recorded(mixer: Attention, sizes: Sizes) -> list[Transfer]:
    """Keys once more, for the largest scores."""
    if not sizes.config.scored_by:
        return []
    both, _ = _ring(mixer, sizes)
    of_keys = both.nbytes * mixer.head_dim // (mixer.head_dim + mixer.value_dim)
    return [both._replace(nbytes=of_keys)]


def _heads(mixer: Attention, sizes: Sizes) -> list[Transfer]:
    """(queries, keys and values that go to the ranks of their heads; results, which come back);
    shared keys go to each rank that needs them."""
    ranks = mixer.exchanging(sizes)
    if ranks == 1:
        return []
    axis = "cp" if ranks == sizes.cp else "cp_heads"
    heads = mixer.model.num_attention_heads // sizes.tp
    keys_values = max(ranks, mixer.groups_of_rank(sizes.tp)) * (mixer.head_dim + mixer.value_dim)
    widths = (heads * mixer.head_dim + keys_values, heads * mixer.value_dim)
    return [
        Transfer(axis, "all-to-all", 1, sizes.tokens * width * sizes.itemsize) for width in widths
    ]


def _ring(mixer: Attention, sizes: Sizes) -> tuple[Transfer, Transfer]:
    """(keys and values for one pass of the core; their gradients), of the rank that sends most
    in a window."""
    exchanging, ring = sizes.config.parallel.split_context(mixer.comm_type)
    axis = "cp" if exchanging == 1 else "cp_ring"
    groups = max(exchanging, mixer.groups_of_rank(sizes.tp))
    keys_values = sizes.tokens * groups * (mixer.head_dim + mixer.value_dim)
    if mixer.comm_type == "all_gather":
        whole = sizes.cp * keys_values
        return (
            Transfer("cp", "all-gather", 1, whole * sizes.itemsize),
            Transfer("cp", "reduce-scatter", 1, whole * sizes.wide),
        )
    if window := mixer.window_in(mixer.model.seq_length):
        from megatron.config.plan.window_rows import exchanged

        chunk = mixer.model.seq_length // (2 * ring)
        of_row = keys_values // (2 * chunk)
        most = max(
            exchanged(ring, chunk, window),
            key=lambda rank: 2 * rank.sent * sizes.itemsize + rank.received * sizes.wide,
        )
        sent, returned = most.sent * sizes.itemsize, most.received * sizes.wide
        return (
            Transfer(axis, "send", most.messages_sent, sent * of_row),
            Transfer(axis, "send", most.messages_received, returned * of_row),
        )
    hops = ring - 1  # of two parts each
    return (
        Transfer(axis, "send", 2 * hops, hops * keys_values * sizes.itemsize),
        Transfer(axis, "send", 2 * hops, hops * keys_values * sizes.wide),
    )
