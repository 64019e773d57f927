"""A directory in memory for the tests that save hundreds of times; knows nothing else."""
from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Like tmp_path, but in memory where the system has such a place: a killed process loses nothing there either."""
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    path = Path(tempfile.mkdtemp(dir=home, prefix="checkpoint-test-"))
    yield path
    shutil.rmtree(path)
