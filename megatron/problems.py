"""The error of a command line that cannot be run."""

from __future__ import annotations

from collections.abc import Iterable


class Problems(ValueError):
    """Everything that is wrong with a command line, one line each."""

    def __init__(self, lines: Iterable[str]):
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))
