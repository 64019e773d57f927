"""What a run has skipped so far, and the records that say why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.checkpoint.skip_log import SkipRecord


@dataclass
class SkipHistory:
    """`records` of what is skipped; `executed`: ranges [first, last] skipped so far, ascending,
    `total` iterations in all."""

    records: list[SkipRecord] = field(default_factory=list)
    executed: list[list[int]] = field(default_factory=list)
    total: int = 0

    def lines(self) -> list[str]:
        """The records as lines of the file."""
        return [record.line() for record in self.records]

    def reason(self, iteration: int) -> str:
        """Why an iteration is skipped: `user`, unless a record says otherwise."""
        not_users = (r for r in self.records if r.reason != "user")
        return next((r.reason for r in not_users if r.iterations.is_skipped(iteration)), "user")

    def note(self, first: int, last: int) -> None:
        """Record that iterations first to last were skipped."""
        self.total += last - first + 1
        if self.executed and self.executed[-1][1] == first - 1:
            self.executed[-1][1] = last
        else:
            self.executed.append([first, last])

    def take(self, executed: Iterable[Sequence[int]], iteration: int) -> None:
        """Take over this history for a resume from `iteration`, without later iterations."""
        self.executed = [
            [first, min(last, iteration)] for first, last in executed if first <= iteration
        ]
        self.total = sum(last - first + 1 for first, last in self.executed)
