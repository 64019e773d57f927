"""Which positions a context-parallel rank holds and computes with: every pair once, in the right
place, as many on each."""

import pytest
import torch

from megatron.config.plan.window_rows import exchanged, rows_seen, steps
from megatron.parallel.context import Axis
from megatron.parallel.zigzag import PARTS, chunks_of, my_chunks, part_rows, tiles, tiles_in_window

SIZES = [(cp, chunk) for cp in (1, 2, 3, 4, 8) for chunk in (1, 2, 3, 5, 8)]


def test_a_rank_holds_an_early_and_a_late_chunk():
    x = torch.arange(16).expand(2, 16)
    assert [chunks_of(x, rank, 4)[0].tolist() for rank in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]
    assert (
        torch.equal(my_chunks(x, Axis("cp", 4, 2)), chunks_of(x, 2, 4))
        and my_chunks(x, Axis("cp")) is x
    )
    assert chunks_of(torch.arange(8)[:, None], 1, 2, dim=0).flatten().tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("cp, chunk", SIZES)
def test_tiles_cover_what_a_causal_mask_lets_through_once(cp, chunk):
    """Every (query, key) pair of positions with key <= query, and no other, is computed by the rank
    of the query."""
    s = 2 * cp * chunk
    positions = [chunks_of(torch.arange(s), rank, cp, dim=0) for rank in range(cp)]
    seen = torch.zeros(s, s, dtype=torch.int64)
    for rank in range(cp):
        for source in range(cp):
            for part in PARTS:
                keys = positions[source]
                if source != rank:
                    keys = torch.cat([keys[rows] for rows in part_rows(chunk, part)])
                    assert len(keys) == chunk
                for tile in tiles(rank, source, chunk, part):
                    rows = positions[rank][tile.queries]
                    columns = keys[tile.keys]
                    mask = torch.ones(len(rows), len(columns), dtype=torch.int64)
                    seen[rows[:, None], columns] += mask.tril() if tile.causal else mask
    assert torch.equal(seen, torch.ones(s, s, dtype=torch.int64).tril())


@pytest.mark.parametrize("cp, chunk", SIZES)
@pytest.mark.parametrize("window", [1, 2, 5, 9, 100])
def test_tiles_in_a_window_have_all_of_it_and_nothing_that_is_wholly_outside(cp, chunk, window):
    s = 2 * cp * chunk
    positions = [chunks_of(torch.arange(s), rank, cp, dim=0) for rank in range(cp)]
    seen = torch.zeros(s, s, dtype=torch.int64)
    for rank in range(cp):
        for source in range(cp):
            keys = positions[source]
            if source != rank:
                runs = rows_seen(rank, source, cp, chunk, window)
                keys = torch.cat([keys[:0], *(keys[slice(*run)] for run in runs)])
            for tile in tiles_in_window(rank, source, cp, chunk, window):
                rows = positions[rank][tile.queries]
                columns = keys[tile.keys]
                back = rows[:, None] - columns
                assert back[0, 0] == tile.distance
                assert rows.diff().eq(1).all() and columns.diff().eq(1).all()
                visible = (back >= 0) & (back < window)
                assert visible[0].any() and visible[-1].any() and visible[:, -1].any()
                assert tile.causal or back.min() > 0 and visible[:, 0].any()
                seen[rows[:, None], columns] += visible.long()
    back = torch.arange(s)[:, None] - torch.arange(s)
    assert torch.equal(seen, ((back >= 0) & (back < window)).long())


@pytest.mark.parametrize("cp, chunk", SIZES)
@pytest.mark.parametrize("window", [1, 2, 5, 9, 100])
def test_a_rank_gets_the_rows_that_its_windows_have(cp, chunk, window):
    """Each key of another rank that a query sees, and no other; and how many each rank sends and
    gets, however far they go."""
    positions = [chunks_of(torch.arange(2 * cp * chunk), rank, cp, dim=0) for rank in range(cp)]
    counts = torch.zeros(cp, cp, dtype=torch.int64)
    for rank, queries in enumerate(positions):
        for source, keys in enumerate(positions):
            if source == rank:
                continue
            back = queries[:, None] - keys
            seen = ((back >= 0) & (back < window)).any(0).nonzero().flatten().tolist()
            runs = rows_seen(rank, source, cp, chunk, window)
            assert [row for run in runs for row in range(*run)] == seen
            counts[source, rank] = len(seen)
    apart = (torch.arange(cp) - torch.arange(cp)[:, None]) % cp  # of source and rank
    assert steps(cp, chunk, window) == tuple(sorted(set(apart[counts > 0].tolist())))
    numbers = [sums for each in (counts, counts.T) for sums in ((each > 0).sum(1), each.sum(1))]
    assert [list(rank) for rank in exchanged(cp, chunk, window)] == torch.stack(numbers, 1).tolist()


@pytest.mark.parametrize("cp, chunk", SIZES)
def test_every_rank_has_the_same_work_in_every_turn(cp, chunk):
    """Scores computed, a causal square whole: chunk^2 in each turn of the ring (2 chunk^2 where a
    rank starts), to the row that an odd chunk leaves over; together the same on every rank."""

    def area(rank, source, part):
        return sum(
            (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            for tile in tiles(rank, source, chunk, part)
        )

    for rank in range(cp):
        assert [area(rank, rank, part) for part in PARTS] == [2 * chunk**2, chunk**2]
        for source in set(range(cp)) - {rank}:
            turns = [area(rank, source, part) for part in PARTS]
            assert sum(turns) == 2 * chunk**2 and abs(turns[0] - turns[1]) <= 2 * chunk * (
                chunk % 2
            )
