"""Which iterations a run that resumes at iteration n skips: a pure function of the ranges requested
now, those recorded before, and what the run has done so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

from megatron.checkpoint import skip_log
from megatron.checkpoint.skip_log import SkipRecord
from megatron.config.plan.plan import Plan
from megatron.config.skip_flags import SHOWN, shorten
from megatron.config.skip_ranges import RANGE_FLAG, Range, SkipRanges

FORGET_FLAG = "--forget-skip"


@dataclass(frozen=True)
class Position:
    """Where a run continues: iterations done, samples consumed, and which of those iterations were
    omitted."""

    iteration: int = 0
    consumed: int = 0
    executed: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Recorded:
    """What was found on disk: the active `records`, `origins` (where each id ever recorded was
    found) and the `checkpoints` of `load`."""

    records: dict[str, SkipRecord] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    checkpoints: Sequence[int] = ()
    load: str = ""


@dataclass(frozen=True)
class Resolution:
    """`problems` end the run, `notes` are printed. Otherwise the run skips `skips`: `kept` records,
    `moved` ones (old id, reason, new range) and `new` ranges of the command line, without
    `forgotten` ids."""

    iteration: int
    problems: list[str]
    notes: list[str]
    skips: SkipRanges
    kept: dict[str, SkipRecord]
    moved: list[tuple[str, str, Range]]
    forgotten: list[str]
    new: list[Range]


def resolve(
    plan: Plan, typed: SkipRanges, forget: Sequence[str], recorded: Recorded, at: Position
) -> Resolution:
    """Combine the ranges `typed` and those `recorded`, without the ids in `forget`, at a
    position."""
    problems: list[str] = []
    executed = SkipRanges().joined((first, last) for first, last in at.executed)
    asked = set(typed.ranges)
    dropped = _forgotten(forget, typed, recorded, at, executed, problems)
    records = {name: record for name, record in recorded.records.items() if name not in dropped}
    for first, last in takewhile(lambda one: one[0] <= at.iteration, typed.ranges):
        problems += _trained(
            (first, last),
            f"{RANGE_FLAG} {first} {last}",
            "omit the range",
            recorded,
            at,
            executed,
        )
    for name, record in records.items():
        for place in takewhile(lambda one: one[0] <= at.iteration, record.parts.ranges):
            if place not in asked:
                problems += _trained(
                    place,
                    f"{recorded.origins[name]}: {name}",
                    f"{FORGET_FLAG} {name}",
                    recorded,
                    at,
                    executed,
                )
    moved = _moved(plan, records, recorded, at, problems)
    removed = {name for name, _, _ in moved}
    kept = {name: record for name, record in records.items() if name not in removed}
    persisted = SkipRanges().joined(
        [
            *chain.from_iterable(r.parts.ranges for r in kept.values()),
            *(place for _, _, place in moved),
        ]
    )
    covered = persisted.joined(executed.ranges)
    have = set(persisted.ranges)
    new = [
        one
        for one in typed.ranges
        if one not in have and covered.count_in(*one) < one[1] - one[0] + 1
    ]
    skips = persisted.joined(typed.ranges).cut(plan.train_iters)
    if not problems and new and skips.nothing_to_train(at.iteration, plan.train_iters):
        problems.append(
            f"{RANGE_FLAG}: nothing to train, iterations {at.iteration + 1} to {plan.train_iters} "
            "are skipped; narrow the ranges [skip-leaves-nothing-to-train]"
        )
    notes = [f"{recorded.origins[name]}: {name} is forgotten ({FORGET_FLAG})" for name in dropped]
    notes += [
        f"{recorded.origins[name]}: {name} is iterations {first} to {last} now, since batch sizes "
        "have changed"
        for name, _, (first, last) in moved
    ]
    notes += _listed(kept, moved, new, recorded, at)
    return Resolution(at.iteration, shorten(problems), notes, skips, kept, moved, dropped, new)


def _forgotten(
    forget: Sequence[str],
    typed: SkipRanges,
    recorded: Recorded,
    at: Position,
    executed: SkipRanges,
    problems: list[str],
) -> list[str]:
    """The ids to drop."""
    dropped = []
    for name in dict.fromkeys(forget):
        record = recorded.records.get(name)
        if record is None:
            # otherwise an earlier run with these flags has forgotten it
            if name not in recorded.origins:
                have = (
                    f"there are {', '.join(list(recorded.records)[:SHOWN])}"
                    if recorded.records
                    else "none is recorded"
                )
                problems.append(
                    f"{FORGET_FLAG} {name}: there is no such id; {have} [skip-id-unknown]"
                )
        elif _common(typed, record.parts):
            problems.append(
                f"{FORGET_FLAG} {name}: {RANGE_FLAG} requests iterations of it again; omit one "
                "of the two [flags-exclude-each-other]"
            )
        elif record.b <= at.iteration and _common(executed, record.parts) == len(record.parts):
            problems.append(
                f"{FORGET_FLAG} {name}: these iterations have been skipped already, the run "
                f"resumes from iteration {at.iteration}; {_earlier(recorded, record.a)}, or omit "
                f"{FORGET_FLAG} {name} [skip-already-done]"
            )
        else:
            dropped.append(name)
    return dropped


def _common(some: SkipRanges, others: SkipRanges) -> int:
    """Number of iterations in both."""
    return sum(some.count_in(first, last) for first, last in others.ranges)


def _trained(
    wanted: Range,
    named: str,
    otherwise: str,
    recorded: Recorded,
    at: Position,
    executed: SkipRanges,
) -> list[str]:
    """The problem if iterations of a range have been trained already."""
    first = wanted[0]
    last = min(wanted[1], at.iteration)
    if executed.count_in(first, last) >= last - first + 1:
        return []
    return [
        f"{named}: iterations of {first} to {last} have been trained already, the run resumes "
        f"from iteration {at.iteration}; {_earlier(recorded, first)}, or {otherwise} "
        "[skip-already-trained]"
    ]


def _earlier(recorded: Recorded, first: int) -> str:
    """The remedy: how to resume from before an iteration."""
    before = [number for number in recorded.checkpoints if number < first]
    if before:
        return f"give --ckpt-step {max(before)}, the newest checkpoint before them"
    return (
        f"{recorded.load or 'there'} has no checkpoint before them: start a new run without "
        "--load, into another --save"
    )


def _moved(
    plan: Plan,
    records: dict[str, SkipRecord],
    recorded: Recorded,
    at: Position,
    problems: list[str],
) -> list[tuple[str, str, Range]]:
    """(id, reason, new range) of the records whose remaining samples are in other iterations with
    the batch sizes of `plan`."""
    shift = at.consumed - plan.consumed_samples(at.iteration)
    moved = []
    for name, r in records.items():
        if r.s1 <= at.consumed:
            continue
        start = at.consumed if r.a <= at.iteration else r.s0
        ends = r.s1 == plan.consumed_samples(r.b) + shift
        if ends and (r.a <= at.iteration or r.s0 == plan.consumed_samples(r.a - 1) + shift):
            continue
        if r.ranges:
            problems.append(
                f"{recorded.origins[name]}: the {len(r.parts.ranges)} ranges of {name} are other "
                f"samples with these batch sizes; give those of before, or {FORGET_FLAG} {name} "
                "and the ranges as they are now [skip-record-not-applicable]"
            )
            continue
        first = plan.batch.iterations_within(max(0, start - shift)) + 1
        last = plan.batch.iterations_within(max(0, r.s1 - 1 - shift)) + 1
        if (plan.consumed_samples(first - 1) + shift, plan.consumed_samples(last) + shift) == (
            start,
            r.s1,
        ):
            moved.append((name, r.reason, (first, last)))
        else:
            problems.append(
                f"{recorded.origins[name]}: {name} skips samples {r.s0} to {r.s1 - 1}, which are "
                f"parts of iterations {first} to {last} with these batch sizes; give those of "
                f"before, or {FORGET_FLAG} {name} {RANGE_FLAG} {first} {last} "
                "[skip-record-not-applicable]"
            )
    return moved


def _listed(
    kept: dict[str, SkipRecord],
    moved: list[tuple[str, str, Range]],
    new: list[Range],
    recorded: Recorded,
    at: Position,
) -> list[str]:
    """A line with the ranges to come, their ids and where they come from."""
    shown = [
        f"{name} ({r.reason}, {recorded.origins[name]})"
        for name, r in kept.items()
        if r.b > at.iteration
    ]
    shown += [f"{first}-{last} ({reason}, was {name})" for name, reason, (first, last) in moved]
    shown += [
        f"{skip_log.named(one)['id']} (user, command line, new)" for one in skip_log.grouped(new)
    ]
    behind = sum(r.b <= at.iteration for r in kept.values())
    if not shown and not behind:
        return []
    more = [f"{len(shown) - SHOWN} more"] * (len(shown) > SHOWN) + [
        f"{behind} already skipped"
    ] * bool(behind)
    return ["iterations to skip: " + ", ".join([*(shown[:SHOWN] or ["none left"]), *more])]
