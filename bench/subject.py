"""What a side of a benchmark runs: the base of all subjects, and a command line as one."""

from __future__ import annotations

import hashlib
import resource
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Subject:
    """A subject that agrees on nothing and whose turn is its work, done once."""

    def work(self) -> Any:
        """What is timed."""
        raise NotImplementedError

    def warm_up(self) -> Any:
        """Get ready; what all sides must agree on (numbers or a text), or None."""
        self.turn()

    def turn(self) -> float:
        """Do the work of the case; its seconds."""
        start = time.perf_counter()
        self.work()
        return time.perf_counter() - start

    def facts(self) -> dict[str, Any]:
        """Further figures by name, after the turns: the most memory that this process has had."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {"peak GB": 1024 * usage.ru_maxrss / 1e9}


class Command(Subject):
    """A command line, run once a turn as a whole process.

    `writes` is removed before each turn (a folder, or files that begin so); the bytes of files with
    the endings `digest` are what sides agree on.
    """

    def __init__(self, words: Sequence[object], writes: str = "", digest: Sequence[str] = ()):
        self._words = [str(word) for word in words]
        self._writes = Path(writes) if writes else None
        self._digest = digest

    def _written(self) -> list[Path]:
        return sorted(self._writes.parent.glob(f"{self._writes.name}*")) if self._writes else []

    def work(self) -> None:
        """One run. Raises RuntimeError with what it printed where it fails."""
        done = subprocess.run(self._words, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")

    def turn(self) -> float:
        for path in self._written():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return super().turn()

    def warm_up(self) -> str | None:
        """One run, so that files are in the page cache; a hash of what it wrote."""
        self.turn()
        total = hashlib.sha256()
        for path in self._written():
            if path.suffix in self._digest:
                with open(path, "rb") as file:
                    total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest() if self._digest else None

    def facts(self) -> dict[str, float]:
        """Processor time of all runs, and the peak of the largest process."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {"cpu s": usage.ru_utime + usage.ru_stime, "peak GB": 1024 * usage.ru_maxrss / 1e9}
