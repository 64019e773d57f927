"""Which ranks and links stand out, from what all ranks have measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low
from typing import NamedTuple

from .probes import Measured

Ranks = tuple[int, ...]  # one, or the two of a link
Round = Sequence[Measured]  # of each rank
SLOW = {1: "[rank-slow]", 2: "[link-slow]"}  # a rank, a link
DEVIATIONS = 6 * 1.4826  # of the median absolute one: six standard deviations of a normal


class Tolerance(NamedTuple):
    """What counts as slow: so many times the median, and so many seconds more."""

    ratio: float
    seconds: float


# Of a computation and of a link. Those of a GPU are alike within some percent. On a CPU messages
# wait for a core, and two processes on one core disturb each other.
TOLERANCES = {
    "cpu": (Tolerance(3.0, 0.0), Tolerance(5.0, 0.5)),
    "gpu": (Tolerance(1.1, 0.0), Tolerance(1.5, 50e-6)),
}


class Finding(NamedTuple):
    """Ranks that are named, and what is wrong with them, with its code."""

    ranks: Ranks
    text: str

    def line(self, hosts: Sequence[str]) -> str:
        """As it is printed; `hosts` are those of all ranks."""
        where = ", ".join(sorted({hosts[rank] for rank in self.ranks}))
        label = "rank" if len(self.ranks) == 1 else "ranks"
        who = " and ".join(map(str, self.ranks))
        return f"{label} {who} on {where}: {self.text}"


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Median and median absolute deviation; the lower of two values where they have two medians, so
    that of two ranks the slow one stands out."""
    values = list(values)
    middle = median_low(values)
    return middle, median_low([abs(value - middle) for value in values])


def outliers(values: Mapping[Ranks, float], tolerance: Tolerance) -> dict[Ranks, float]:
    """The values that are too high, with the others' median."""
    middle, deviation = spread(values.values())
    limit = max(tolerance.ratio * middle, middle + max(tolerance.seconds, DEVIATIONS * deviation))
    return {key: middle for key, value in values.items() if value > limit}


def slow(ranks: Round, devices: Sequence[str]) -> dict[tuple[Ranks, str], str]:
    """What is slow in a round: (ranks, operation) and how slow; a pair of ranks is their link.
    Devices of one name are compared."""
    compute, link = TOLERANCES["cpu" if devices[0].startswith("cpu") else "gpu"]
    named: dict[tuple[Ranks, str], str] = {}
    for name in ("gemm", "copy"):
        for device in set(devices):
            own: dict[Ranks, float] = {
                (rank,): median(each.seconds[name])
                for rank, each in enumerate(ranks)
                if devices[rank] == device
            }
            _note(named, name, own, outliers(own, compute))
    for name in sorted({name for each in ranks for name in each.links}):
        ends: dict[Ranks, list[float]] = defaultdict(list)
        for rank, each in enumerate(ranks):
            for peer, seconds in each.links.get(name, {}).items():
                ends[min(rank, peer), max(rank, peer)].append(median(seconds))
        links = {pair: min(both) for pair, both in ends.items()}  # who came last did not wait
        best: dict[Ranks, float] = {
            (rank,): min(seconds for pair, seconds in links.items() if rank in pair)
            for rank in {rank for pair in links for rank in pair}
        }
        bad = outliers(best, link)
        _note(named, f"send/recv {name}", best, bad)
        rest = {
            pair: middle
            for pair, middle in outliers(links, link).items()
            if not any((rank,) in bad for rank in pair)
        }
        _note(named, f"send/recv {name}", links, rest)
    return named


def _note(
    named: dict[tuple[Ranks, str], str],
    name: str,
    values: Mapping[Ranks, float],
    bad: Mapping[Ranks, float],
) -> None:
    for who, middle in bad.items():
        named[who, name] = f"{name} {1e3 * values[who]:.3g} ms, median {1e3 * middle:.3g} ms"


def flipping(ranks: Round, devices: Sequence[str]) -> list[Finding]:
    """The ranks whose results have other bits than those of most, or that send other numbers than
    they should."""
    operations: dict[int, set[str]] = defaultdict(set)
    for name in ("gemm", "copy"):
        for device in set(devices):
            own = {
                rank: each.bits[name] for rank, each in enumerate(ranks) if devices[rank] == device
            }
            for rank in _minority(own):
                operations[rank].add(name)
    pairs = Counter(
        (min(rank, peer), max(rank, peer), name)
        for rank, each in enumerate(ranks)
        for name, peers in each.wrong.items()
        for peer in peers
    )
    edges = {edge for edge in pairs if not operations.keys() & set(edge[:2])}
    links = []
    while edges:
        rank, count = Counter(rank for edge in edges for rank in edge[:2]).most_common(1)[0]
        touched = {edge for edge in edges if rank in edge[:2]}
        if len({edge[:2] for edge in touched}) > 1:
            operations[rank] |= {edge[2] for edge in touched}
        else:
            links.append(next(iter(touched)))
        edges -= touched
    out = [
        Finding((rank,), f"wrong bits in {', '.join(sorted(names))} [rank-flips]")
        for rank, names in sorted(operations.items())
    ]
    out += [Finding(edge[:2], f"wrong bits in {edge[2]} [rank-flips]") for edge in links]
    seen = [rank for rank, each in enumerate(ranks) if each.sums]
    if seen and not out:
        names = sorted({name for rank in seen for name in ranks[rank].sums})
        out.append(Finding(tuple(seen), f"wrong sums seen in {', '.join(names)} [rank-flips]"))
    return out


def _minority(bits: Mapping[int, Sequence[int]]) -> list[int]:
    """The ranks with other bits than most; without a majority, those whose repeats differ, or
    all."""
    most, count = Counter(each for repeats in bits.values() for each in repeats).most_common(1)[0]
    other = [rank for rank, repeats in bits.items() if set(repeats) != {most}]
    if 2 * count <= sum(map(len, bits.values())):
        return [rank for rank in other if len(set(bits[rank])) > 1] or list(bits)
    return other


def judge(rounds: Sequence[Round], devices: Sequence[str]) -> list[Finding]:
    """What is wrong. A rank is slow if it is in every round, as one round may have been disturbed;
    numbers are wrong if they were once."""
    each = [slow(ranks, devices) for ranks in rounds]
    again = set.intersection(*(set(named) for named in each))
    slow_ranks: dict[Ranks, list[str]] = defaultdict(list)
    for who, name in sorted(again):
        slow_ranks[who].append(each[-1][who, name])
    out = list(dict.fromkeys(finding for ranks in rounds for finding in flipping(ranks, devices)))
    return out + [
        Finding(who, f"slow: {'; '.join(texts)} {SLOW[len(who)]}")
        for who, texts in slow_ranks.items()
    ]
