"""Which checkpoints are of one history: `state.json` names the branches that led to each of them.

A branch begins where a run starts or rolls back. A checkpoint of an earlier program names none, and
counts as one of the history of its directory.
"""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.small_files import path_inside, read_bytes, read_json

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


def read(folder: Path) -> History | None:
    """The history of a checkpoint, None where it cannot be read."""
    try:
        return History.parse(read_json(folder / "state.json").get("history", {}))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def read_all(root: str | Path, iterations: Iterable[int]) -> dict[int, History | None]:
    """The histories of checkpoints of a run directory."""
    return {n: read(iteration_directory(root, n)) for n in iterations}


def identified(folder: Path) -> History | None:
    """As `read`; also of a checkpoint that names none."""
    history = read(folder)
    try:
        table = read_json(folder / "manifest.json") if history == History() else {}
        return without_branches(table["crc32"], table["iteration"]) if table else history
    except (OSError, ValueError, KeyError, TypeError):
        return None


def iteration_directory(root: str | Path, iteration: int) -> Path:
    """`root/iter_0000020` for iteration 20."""
    return Path(root) / f"iter_{iteration:07d}"


def newest(root: str | Path, histories: Mapping[int, History | None]) -> int | None:
    """The checkpoint that was saved last, whatever the tracker says: the newest of the branch that
    began last, unless its state is damaged."""

    def place(n: int) -> tuple[int, int]:
        history = histories[n]
        return history.number if history else 0, n

    order = sorted(histories, key=place, reverse=True)
    good = (
        n for n in order if vouched_file(iteration_directory(root, n), "state.json") is not None
    )
    return next(good, order[0] if order else None)


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


def foreign(
    own: History, others: Mapping[int, History | None], root: str | Path | None = None
) -> list[int]:
    """Which of the `others`, of one directory, are of another history than a run that begins at
    `own`: they neither led to it nor continue it. `root`: the directory, where it can be read."""
    branch, last = own.branches[0]
    begins = {other.branches[0][0] for other in others.values() if other and other.branches}
    if root is not None and last in others and others[last] == History():
        first = identified(iteration_directory(root, last))
        begins |= {first.branches[0][0]} if first else set()

    def is_own(n: int, other: History | None) -> bool:
        if other is None or not other.branches:
            return branch in begins and n <= last
        return other.leads_to(own) or own.leads_to(other)

    return [n for n, other in others.items() if not is_own(n, other)]


def vouched_file(folder: Path, name: str) -> bytes | None:
    """The bytes of a file of a checkpoint; None where the manifest does not vouch for them."""
    # nor a pipe, to wait for
    if not (folder / "manifest.json").is_file() or not (folder / name).is_file():
        return None
    try:
        crc32 = read_json(path_inside(folder, "manifest.json"))["files"][name]["crc32"]
        content = read_bytes(path_inside(folder, name))
        return content if f"{zlib.crc32(content):08x}" == crc32 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
