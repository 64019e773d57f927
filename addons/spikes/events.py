"""Groups iterations with spikes of loss or gradient norm into events, with the ranges to skip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.analysis.log_reader import Record
from megatron.features.spikes.detector import SIGMA, TOGETHER, Finding, SpikeDetector

RECOVERY = 200  # iterations in which a benign spike is over


@dataclass(frozen=True)
class Event:
    """A spike. `first` and `last` are the iterations out of line, `peak` the worst of them; skip
    `start` to `end`.

    `kind`: `benign` (the loss is back on its line, to one median deviation, within 200 iterations
    of the worst), `slow` (later), `malignant` (never), `open` (the log ends before that can be
    said), `non-finite`.
    """

    first: int
    last: int
    peak: int
    start: int
    end: int
    kind: str
    finding: Finding
    loss: float
    grad_norm: float | None


def log_interval(records: Sequence[Record]) -> int:
    """Iterations from one record to the next, most often."""
    steps = Counter(b.iteration - a.iteration for a, b in zip(records, records[1:], strict=False))
    return steps.most_common(1)[0][0] if steps else 1


def find_events(records: Sequence[Record]) -> list[Event]:
    """All spikes of a run in order. Records without a loss, and updates that fp16 skipped, are not
    looked at."""
    interval = log_interval(records)
    examined = _judged(records)
    detector = SpikeDetector()
    findings = [detector.check(_loss(r), r.grad_norm) for r in examined]
    groups: list[list[int]] = []
    for index, finding in enumerate(findings):
        if finding.spike and groups and index - groups[-1][-1] <= TOGETHER:
            groups[-1].append(index)
        elif finding.spike:
            groups.append([index])
    before = [0, *(group[-1] + 1 for group in groups)]
    return [
        _event(examined, findings, group, start, interval)
        for group, start in zip(groups, before, strict=False)
    ]


def not_judged(records: Sequence[Record]) -> list[tuple[int, int]]:
    """(first, last) iterations in which only a number that is not finite would have been found: at
    the start, and after the level of the loss has changed, the detector has too few accepted losses
    to compare with."""
    interval = log_interval(records)
    detector = SpikeDetector()
    spans: list[tuple[int, int]] = []
    warming_up = False
    for record in _judged(records):
        if not detector.ready:
            first = spans.pop()[0] if warming_up else max(1, record.iteration - interval + 1)
            spans.append((first, record.iteration))
        warming_up = not detector.ready
        detector.check(_loss(record), record.grad_norm)
    return spans


def _judged(records: Sequence[Record]) -> list[Record]:
    """Those with a loss that changed the weights, as far as the log shows."""
    interval = log_interval(records)
    return [r for r in records if r.trained and not (r.skipped and interval == 1)]


def _loss(record: Record) -> float:
    """That of a record of `_judged`."""
    assert record.loss is not None, record
    return record.loss


def _event(
    examined: Sequence[Record],
    findings: Sequence[Finding],
    group: Sequence[int],
    free: int,
    interval: int,
) -> Event:
    """The event of the records at the indices `group`; records before `free` belong to another."""
    first = group[0]
    last = group[-1]
    marked = [index for index in range(max(free, first - TOGETHER), first) if findings[index].kind]
    peak = max(
        group, key=lambda index: (findings[index].kind == "non-finite", findings[index].loss_z)
    )
    start = examined[min([*marked, first])].iteration - 2 * interval + 1
    return Event(
        examined[first].iteration,
        examined[last].iteration,
        examined[peak].iteration,
        max(1, start),
        examined[last].iteration + interval,
        _kind(examined, findings, group, peak),
        findings[peak],
        _loss(examined[peak]),
        examined[peak].grad_norm,
    )


def _kind(
    examined: Sequence[Record], findings: Sequence[Finding], group: Sequence[int], peak: int
) -> str:
    if any(findings[index].kind == "non-finite" for index in group):
        return "non-finite"
    first = group[0]
    worst = examined[peak].iteration
    f = findings[first]
    deviation = f.excess / f.loss_z / SIGMA if f.loss_z else 0.0
    limit = _loss(examined[first]) - f.excess + abs(deviation)
    for record in examined[peak + 1 :]:
        if _loss(record) <= limit:
            return "benign" if record.iteration - worst <= RECOVERY else "slow"
    return "malignant" if examined[-1].iteration - worst > RECOVERY else "open"
