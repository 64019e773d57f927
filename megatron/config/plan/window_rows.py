"""Which keys a window lets context-parallel ranks see of one another, in integers alone: what ring
attention sends, and the plan of it.

Positions are cut as in megatron/parallel/zigzag.py: rank i of n has chunks i and 2 n - 1 - i.
"""

from functools import cache
from typing import NamedTuple


def chunks(rank: int, ranks: int) -> tuple[int, int]:
    """The early and the late chunk of a rank."""
    return rank, 2 * ranks - 1 - rank


def first_seen(queries: int, keys: int, chunk: int, window: int) -> int:
    """The first row of the chunk `keys` that the first query of the later chunk `queries` sees;
    `chunk` or more where it sees none."""
    return max(0, (queries - keys) * chunk - window + 1)


@cache
def rows_seen(
    rank: int, source: int, ranks: int, chunk: int, window: int
) -> tuple[tuple[int, int], ...]:
    """The rows (start, stop) of the 2 x `chunk` keys of another rank that a query of `rank` sees:
    ends of its two chunks, or of one, or none."""
    rows = []
    for half, keys in enumerate(chunks(source, ranks)):
        later = [queries for queries in chunks(rank, ranks) if queries > keys]
        first = min((first_seen(queries, keys, chunk, window) for queries in later), default=chunk)
        if first < chunk:
            rows.append((half * chunk + first, (half + 1) * chunk))
    return tuple(rows)


def rows_of(rank: int, source: int, ranks: int, chunk: int, window: int) -> int:
    """How many `rows_seen` are."""
    return sum(stop - start for start, stop in rows_seen(rank, source, ranks, chunk, window))


@cache
def steps(ranks: int, chunk: int, window: int) -> tuple[int, ...]:
    """How far keys go: rank r + step (modulo `ranks`) sees some of rank r, for some r."""
    return tuple(
        step
        for step in range(1, ranks)
        if any(rows_of((r + step) % ranks, r, ranks, chunk, window) for r in range(ranks))
    )


class Exchanged(NamedTuple):
    """Rows of keys that a rank sends to others, and those that it gets and returns the gradients
    of; each with the number of messages."""

    messages_sent: int
    sent: int
    messages_received: int
    received: int


@cache
def exchanged(ranks: int, chunk: int, window: int) -> tuple[Exchanged, ...]:
    """What each rank sends and gets."""
    every = []
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        sent = [rows_of(other, rank, ranks, chunk, window) for other in others]
        received = [rows_of(rank, other, ranks, chunk, window) for other in others]
        counts = (sum(n > 0 for n in sent), sum(sent), sum(n > 0 for n in received), sum(received))
        every.append(Exchanged(*counts))
    return tuple(every)
