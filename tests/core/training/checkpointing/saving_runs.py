"""Runs of seven iterations that save every second."""

from pathlib import Path
from typing import Any

from tests.runs import SMALL, Finished, train

BASE = [
    *SMALL,
    *"--train-iters 7 --split 100,0,0 --eval-iters 0 --save-interval 2".split(),
]


def run(folder: Path, data: str, world: int, *extra: str, **more: Any) -> Finished:
    """One that saves in `folder`/save; `more` as `tests.runs.train` takes it."""
    argv = [*BASE, "--data-path", data, "--save", str(folder / "save"), *extra]
    return train(folder, argv, world, **more)
