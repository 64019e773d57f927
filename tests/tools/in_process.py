"""The converter's unpickling without a process of its own, which takes seconds to start. Knows no
format."""

from __future__ import annotations

from pathlib import Path

from tools.convert import unpickle_worker
from tools.convert.links import ConversionError
from tools.convert.torch_files import Unpickler


class InProcess(Unpickler):
    """Does the jobs of the other process here, by the same functions."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._count = 0
        self._files = []

    def _send(self, *job: object) -> None:
        self._wrong = unpickle_worker.answer([str(word) for word in job])

    def _check(self, source: Path) -> None:
        if self._wrong is not None:
            raise ConversionError(f"{source}: {self._wrong}")

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def use_it(monkeypatch) -> None:
    """Until the end of the test, for every command."""
    for name in ("__init__", "_send", "_check", "close"):
        monkeypatch.setattr(Unpickler, name, getattr(InProcess, name))
