"""What a side runs: the base of all subjects, and a command line as one."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Subject:
    """A subject that agrees on nothing and has no further figures."""

    def warm_up(self) -> Any:
        """Get ready; what all sides must agree on."""
        return None

    def facts(self) -> dict[str, Any]:
        """Further figures by name."""
        return {}


class Command(Subject):
    """A command line, run once a turn as a whole process.

    `writes` is removed before each turn (a folder, or files that begin so); the bytes of files with
    the endings `digest` are what sides agree on.
    """

    def __init__(
        self,
        words: Sequence[str],
        writes: str = "",
        digest: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self._words = words
        self._writes = Path(writes) if writes else None
        self._digest = digest
        self._environment = {**os.environ, **(environment or {})}

    def _written(self) -> list[Path]:
        return sorted(self._writes.parent.glob(f"{self._writes.name}*")) if self._writes else []

    def warm_up(self) -> str | None:
        """One run, so that files are in the page cache; a hash of what it wrote."""
        self.turn()
        if not self._digest:
            return None
        total = hashlib.sha256()
        for path in self._written():
            if path.suffix not in self._digest:
                continue
            with open(path, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def turn(self) -> float:
        """Seconds of one run. Raises RuntimeError with what it printed where it fails."""
        for path in self._written():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        start = time.perf_counter()
        done = subprocess.run(
            self._words, capture_output=True, text=True, env=self._environment, check=False
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
        return seconds

    def facts(self) -> dict[str, float]:
        """Processor time of all runs, and the peak of the largest process."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {"cpu s": usage.ru_utime + usage.ru_stime, "peak GB": 1024 * usage.ru_maxrss / 1e9}
