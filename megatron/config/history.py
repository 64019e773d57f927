"""Which checkpoints are of one history: `state.json` names the branches that led to each of them.

A branch begins where a run starts or rolls back. A checkpoint of an earlier program names none, and
counts as one of the history of its directory.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BRANCH = re.compile(r"[0-9a-f]{16}|of [0-9a-f]{8}")


@dataclass(frozen=True)
class History:
    """`branches`: (id, iteration at which the next one begins), oldest first, the last one with the
    iteration of the checkpoint; those of one run begin alike. `number`: the branches that its
    directory had when the last one began. Without branches: of a checkpoint that names none."""

    branches: tuple[tuple[str, int], ...] = ()
    number: int = 0

    @classmethod
    def parse(cls, table: Any) -> History:
        """What a run state has as `history`. Raises TypeError."""
        if table == {}:
            return cls()
        try:
            branches = tuple((branch, iteration) for branch, iteration in table["branches"])
            history = cls(branches, table["number"])
        except (KeyError, ValueError) as error:
            raise TypeError(f"history: {type(error).__name__} {error}") from None
        if (
            type(history.number) is not int
            or not branches
            or not all(
                isinstance(branch, str) and _BRANCH.fullmatch(branch) and type(iteration) is int
                for branch, iteration in branches
            )
        ):
            raise TypeError(f"history: {table}")
        return history

    @property
    def iteration(self) -> int:
        """That of the checkpoint."""
        return self.branches[-1][1]

    def dump(self, iteration: int) -> dict[str, Any]:
        """What the state of a run at `iteration` has as `history`."""
        *before, (branch, _) = self.branches
        return {"branches": [*map(list, before), [branch, iteration]], "number": self.number}

    def branch(self) -> History:
        """That of a run that begins at this checkpoint."""
        new = secrets.token_hex(8), self.branches[-1][1] if self.branches else 0
        return History((*self.branches, new), self.number + 1)

    def leads_to(self, other: History) -> bool:
        """Whether `other` continues this one."""
        branch, iteration = self.branches[-1]
        return any(name == branch and iteration <= last for name, last in other.branches)


def without_branches(crc32: str, iteration: int) -> History:
    """That of a checkpoint that names none, for what continues it: the checksum of its manifest
    stands for a branch."""
    return History(((f"of {crc32[:8]}", iteration),))


def led_to(own: History | None, iteration: int, others: Mapping[int, History | None]) -> list[int]:
    """Which of the `others` in its directory a checkpoint of `iteration` continues, itself
    included. One that cannot be read is not known to be of another branch."""

    def leads(n: int, other: History | None) -> bool:
        if not own or not own.branches or other is None:
            return True
        if not other.branches:
            branch, last = own.branches[0]
            return branch.startswith("of ") and n <= last
        return other.leads_to(own)

    return [n for n, other in others.items() if n <= iteration and leads(n, other)]


def foreign(own: History, others: Mapping[int, History | None]) -> list[int]:
    """Which of the `others`, of one directory, are of another history than a run that begins at
    `own`: they neither led to it nor continue it."""
    branch, last = own.branches[0]
    begins = {other.branches[0][0] for other in others.values() if other and other.branches}

    def is_own(n: int, other: History | None) -> bool:
        if other is None or not other.branches:
            return branch in begins and n <= last
        return other.leads_to(own) or own.leads_to(other)

    return [n for n, other in others.items() if not is_own(n, other)]
