"""The metrics of subsets cost no collective and no wait for the device of their own; the benchmark
of their time runs."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron.training import loop
from tests import recorder
from tests.runs import NO_DROPOUT, SMALL, train, with_flags, write_text

COUNTED = ("--log-subsets", "--log-accuracy")
# on a GPU
WAITS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")


def note_waits(file: str) -> None:
    """Write down how often a training step asks a tensor for its value."""
    counts = []
    step = loop.train_step

    def watched(name):
        function = getattr(torch.Tensor, name)

        @functools.wraps(function)
        def call(*args, **options):
            counts[-1][name] += bool(counts[-1]["inside"])
            return function(*args, **options)

        return call

    for name in WAITS:
        setattr(torch.Tensor, name, watched(name))
    counts.append(Counter())

    def train_step(*args, **options):
        counts.append(Counter(inside=1))
        try:
            return step(*args, **options)
        finally:
            counts.append(Counter())
            Path(file).write_text(repr(sorted(Counter(counts[-2]).items())))

    loop.train_step = train_step


def argv(folder: Path, *more: str) -> list[str]:
    blend = ["0.5", write_text(folder / "a", 200), "0.5", write_text(folder / "b", 200, seed=1)]
    return with_flags(
        [
            *SMALL,
            *NO_DROPOUT,
            "--data-path",
            *blend,
            "--split",
            "90,10,0",
            "--train-iters",
            "2",
            "--lr-warmup-iters",
            "0",
        ],
        *more,
    )


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout",
    [
        "--use-distributed-optimizer",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
    ],
)
def test_no_collective_of_their_own(layout, tmp_path):
    """As many of each kind with as without; numbers travel in those that are there."""
    seen = []
    for name, more in (("plain", ()), ("counted", COUNTED)):
        train(tmp_path / name, argv(tmp_path, *layout.split(), *more), 2, hook=recorder.watch)
        seen.append(
            [
                Counter(
                    (call.operation, call.ranks) for call in recorder.read(tmp_path / name, rank)[1]
                )
                for rank in range(2)
            ]
        )
    assert seen[0] == seen[1] and all(seen[0])


@pytest.mark.campaign
def test_no_wait_of_their_own(tmp_path):
    texts = []
    for name, more in (("plain", ()), ("counted", COUNTED)):
        (tmp_path / name).mkdir()
        train(
            tmp_path / name,
            argv(tmp_path, *more),
            hook=functools.partial(note_waits, str(tmp_path / name / "waits")),
        )
        texts.append((tmp_path / name / "waits").read_text())
    assert texts[0] == texts[1] and "tolist" in texts[0]
