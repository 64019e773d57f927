"""Which positions of a sequence a context-parallel rank holds, and which of them see which. Knows
no communication.

A sequence of s positions is cut into 2 cp chunks, and rank i holds chunks i and 2 cp - 1 - i, in
this order: under a causal mask early positions have few keys and late ones many, and together every
rank's two chunks have the same work. With 4 ranks, the keys that a query of each chunk sees:

    chunk   0 1 2 3 4 5 6 7     rank 0 holds chunks 0 and 7: 1 + 8 = 9 chunks of keys
    keys    1 2 3 4 5 6 7 8     rank 1 holds chunks 1 and 6: 2 + 7 = 9, and so on

The same holds for each pair of ranks (`tiles`), so that no rank waits for another in any hop of the
ring. K and V of a rank travel in two parts, so that one part on its way and one at work are no more
than one rank's K and V. Inside a window a rank gets the rows that it sees and no others.
"""

from typing import NamedTuple

import torch

from megatron.config.plan.window_rows import chunks as numbers
from megatron.config.plan.window_rows import first_seen, rows_seen
from megatron.parallel.context import Axis

PARTS = (0, 1)


def my_chunks(x: torch.Tensor, cp: Axis, dim: int = 1) -> torch.Tensor:
    """This rank's two chunks of `x` along `dim`; `x` itself with one rank."""
    return x if cp.size == 1 else chunks_of(x, cp.rank, cp.size, dim)


def chunks_of(x: torch.Tensor, rank: int, ranks: int, dim: int = 1) -> torch.Tensor:
    """The two chunks of `x` along `dim` that `rank` of `ranks` holds."""
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim)


def part_rows(chunk: int, part: int) -> tuple[slice, slice]:
    """The rows, of a rank's 2 x `chunk`, of a part: some of the first chunk and some of the second,
    `chunk` together."""
    half = (chunk + 1) // 2
    return (
        (slice(0, half), slice(chunk, 2 * chunk - half)),
        (slice(half, chunk), slice(2 * chunk - half, 2 * chunk)),
    )[part]


class Tile(NamedTuple):
    """Rows of my queries that see rows of a block of keys: all of them, or (causal) each those up
    to its own position. distance: from the first key to the first query, where both are runs of
    positions."""

    queries: slice
    keys: slice
    causal: bool = False
    distance: int = 0


def tiles(rank: int, source: int, chunk: int, part: int) -> list[Tile]:
    """What `rank` computes with a part of the keys of `source`: about chunk x chunk scores on every
    rank.

    `keys` counts from the start of the part; of a rank's own keys, which are there as a whole, from
    their start. The first tiles of the own keys give every query a key.
    """
    early = slice(0, chunk)
    late = slice(chunk, 2 * chunk)
    both = slice(0, 2 * chunk)
    if source == rank:
        # Two triangles on the diagonal, then the square of late queries and early keys.
        if part == 0:
            return [Tile(early, early, True), Tile(late, late, True)]
        return [Tile(late, early)]
    if source > rank:
        # Its chunks are rank < source and 2 cp - 1 - source < 2 cp - 1 - rank: both lie between
        # this rank's two, so the late queries see all of the part, as long as a chunk.
        return [Tile(late, slice(0, chunk))]
    # This rank's two chunks lie between its: all queries see the rows of its early chunk.
    first, _ = part_rows(chunk, part)
    rows = first.stop - first.start
    return [Tile(both, slice(0, rows))] if rows else []


def tiles_in_window(rank: int, source: int, ranks: int, chunk: int, window: int) -> list[Tile]:
    """What `rank` computes with the keys of `source` that are in the window of one of its queries:
    its own from the start of each chunk on, others as `rows_seen` packs them. Each tile has the
    queries and the keys that see one another, and those between."""
    begins = {0: 0, 1: chunk}  # where the rows of an early and of a late chunk are
    firsts = {0: 0, 1: 0}  # what they are from
    if source != rank:
        begins, firsts, held = {}, {}, 0
        for start, stop in rows_seen(rank, source, ranks, chunk, window):
            half, first = divmod(start, chunk)
            begins[half], firsts[half] = held, first
            held += stop - start
    tiles = []
    for i, queries in enumerate(numbers(rank, ranks)):
        for half, keys in enumerate(numbers(source, ranks)):
            if queries == keys:
                run = slice(i * chunk, (i + 1) * chunk)
                tiles.append(Tile(run, run, True))
            first = first_seen(queries, keys, chunk, window)
            if queries <= keys or first >= chunk:
                continue
            back = (queries - keys) * chunk  # from a key to the query of the same row
            seeing = min(chunk, chunk - 1 + window - back)
            held_from = begins[half] - firsts[half]
            tiles.append(
                Tile(
                    slice(i * chunk, i * chunk + seeing),
                    slice(held_from + first, held_from + chunk),
                    distance=back - first,
                )
            )
    # the first of the own keys give every query a key
    return sorted(tiles, key=lambda tile: not tile.causal)
