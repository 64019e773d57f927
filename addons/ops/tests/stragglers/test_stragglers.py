"""--log-straggler: a rank that computes 0.5 s longer is named, with its time and share."""

from __future__ import annotations

import re
import time

from torch import nn

from megatron import launcher
from megatron.addons.ops.stragglers.hook import straggler_line
from megatron.model.gpt import GPTModel
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

LINE = re.compile(
    r"stragglers at iteration (\d+) \| slowest rank (\d+): ([\d.]+) ms \((\d+)%\) \| "
    r"median ([\d.]+) ms \| fastest ([\d.]+) ms"
)


def test_times_are_per_iteration():
    found = LINE.fullmatch(straggler_line(20, 10, 2.0, [0.5, 1.0, 0.25]))
    assert found and found.groups() == ("20", "1", "100", "50", "50.0", "25.0")
    assert len(straggler_line(1_000_000, 1, 9.9, [9.0] * 4096)) <= 100


def _slow_rank_1() -> None:
    """A hook: each forward pass of rank 1 takes 0.25 s longer."""
    real = GPTModel.forward

    def forward(self, *args, **more):
        if launcher.rank() == 1:
            time.sleep(0.25)
        return real(self, *args, **more)

    GPTModel.forward = forward
    assert issubclass(GPTModel, nn.Module)


def test_a_slow_rank_is_named(tmp_path):
    words = [*with_flags(SMALL, "--log-interval", "2"), *NO_DROPOUT]
    words += ["--train-iters", "4", "--mock-data", "--log-straggler"]
    done = train(tmp_path, words, world=2, hook=_slow_rank_1)
    found = LINE.findall(done.log)
    assert [line[0] for line in found] == ["2", "4"]
    for _, rank, slowest, share, *_ in found:
        assert rank == "1"
        assert float(slowest) >= 500.0  # two micro-batches of one iteration
        assert 50 <= int(share) <= 100
