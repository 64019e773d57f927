"""Other checkouts of this repository that take part in a benchmark (--compare-with)."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXTENSIONS = "megatron/kernels/**/*.so"


def parse_checkout(text: str) -> Path:
    """The checkout in that directory. Raises ValueError where it is none, or its C++ is not built
    and ours is."""
    tree = Path(text).resolve()
    if not (modules_of(tree) / "contestants.py").is_file():
        raise ValueError(
            f"{text}: not a checkout of this repository (it has no contestants.py in "
            "tools/benchmarks/step or tools/benchmarks)"
        )
    if any(ROOT.glob(EXTENSIONS)) and not any(tree.glob(EXTENSIONS)):
        raise ValueError(
            f"{text}: its C++ extensions are not built; "
            f"run `python setup.py build_ext --inplace` there first"
        )
    return tree


def modules_of(tree: Path) -> Path:
    """The folder of the step benchmark's modules in a checkout; before November 2026 they were in
    tools/benchmarks itself."""
    folder = tree / "tools" / "benchmarks"
    return folder / "step" if (folder / "step").is_dir() else folder


def checkout_name(tree: Path) -> str:
    """What the tables call it."""
    return f"ours in {tree.name}"


def check_names(trees: list[Path]) -> None:
    """Raise ValueError where two checkouts have one name."""
    names = [tree.name for tree in trees]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two of the directories are called {name}; rename one, the table names them by it"
            )


def commit_of(tree: Path) -> str:
    """Its commit as git describes it, or `unknown`."""
    words = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
