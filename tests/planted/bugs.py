"""A bug planted into a copy of the tree, and whether a test sees it."""
from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.forkrun import ROOT


class Bug(NamedTuple):
    """`old` in `file` is replaced by `new`, and `test` has to fail then."""

    file: str
    old: str
    new: str
    test: str


def run(copy: Path, test: str) -> subprocess.CompletedProcess:
    """One test in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not sweep", test]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)


def caught(bug: Bug, tmp_path: Path) -> None:
    """Assert that the bug's test fails on a copy that has the bug."""
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for part in ("megatron", "tests"):
        shutil.copytree(ROOT / part, copy / part, ignore=ignore)
    for part in ("pretrain_gpt.py", ".pytest.ini"):
        shutil.copy(ROOT / part, copy / part)
    path = copy / bug.file
    text = path.read_text()
    assert text.count(bug.old) == 1, f"{bug.file} no longer holds the line that this bug replaces"
    path.write_text(text.replace(bug.old, bug.new))
    result = run(copy, bug.test)
    assert result.returncode == 1 and " failed" in result.stdout, result.stdout[-2000:] + result.stderr[-2000:]


def applies(bug: Bug) -> bool:
    """Does the bug still change exactly one place of the tree?"""
    return (ROOT / bug.file).read_text().count(bug.old) == 1
