"""Directories that pass for other checkouts of this repository, for the tests of --compare-with."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def make_checkout(tree: Path, file: str = "", text: str = "", other: str = "") -> Path:
    """This tree's modules at `tree`, and a copy of its benchmarks, in one of which `other` stands
    for `text`."""
    benchmarks = tree / "tools" / "benchmarks"
    shutil.copytree(
        ROOT / "tools" / "benchmarks", benchmarks, ignore=shutil.ignore_patterns("__pycache__")
    )
    for shared in ("megatron", "pretrain_gpt.py", "tools/shared"):
        (tree / shared).symlink_to(ROOT / shared)
    if file:
        before = (benchmarks / file).read_text(encoding="utf-8")
        assert text in before
        (benchmarks / file).write_text(before.replace(text, other), encoding="utf-8")
    return tree
