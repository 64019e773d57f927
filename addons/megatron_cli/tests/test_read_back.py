"""Logs in Megatron's and AuroraGPT's lines, read back."""

from __future__ import annotations

from datetime import datetime
from functools import partial

import pytest

from megatron.addons.megatron_cli.aurora_format import aurora_line
from megatron.addons.megatron_cli.megatron_format import megatron_line
from megatron.analysis.log_reader import read_text
from megatron.analysis.run_reader import read_run
from megatron.training.logging.iteration import Interval
from megatron.training.logging.line_format import validation_block
from megatron.training.result import IterationResult

AURORA = {"seq_length": 1024, "world_size": 1, "lm_teraflops": 1.0, "ds_teraflops": 1.0}
LINES = [
    partial(megatron_line, train_iters=500, teraflops=None),
    partial(aurora_line, train_iters=500, now=datetime(2026, 1, 1), **AURORA),
]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(
    "noise", ["", "[2026-01-01 00:00:00,000] [INFO] [profiler.py:81:start] lr: 3 loss scale\n"]
)
def test_our_own_lines(line, noise):
    plain = {"global_batch_size": 8, "seconds": 0.5, "learning_rate": 1.5e-4}
    result = IterationResult(iteration=20, consumed_samples=160, grad_norm=2.345, **plain)
    trained = line(result, Interval([6.5, 6.7], 2, 1.0, 16))
    result = IterationResult(iteration=30, consumed_samples=240, skipped="user", **plain)
    skipped = line(result, Interval(user_skips=10))
    text = (
        f"training ...\n{noise}{trained}\n{noise} validation loss at iteration 20 | lm loss "
        f"value: 1.000000E+00 | lm loss PPL: 2.7E+00 | \n{skipped}\n"
    )
    first, second = read_text(text).records
    assert (first.iteration, first.loss, first.grad_norm, first.train_iters) == (
        20,
        pytest.approx(6.6),
        2.345,
        500,
    )
    assert (first.consumed_samples, first.global_batch_size, first.learning_rate) == (
        160,
        8,
        pytest.approx(1.5e-4),
    )
    assert first.numbers["milliseconds"] == 500.0
    assert (second.iteration, second.loss, second.grad_norm) == (30, None, None)
    assert second.user_skipped + second.skipped == 10


@pytest.mark.parametrize("line", LINES)
def test_the_curves_of_a_log(line, tmp_path):
    losses = [5.0, 4.0, 3.0, 2.5]
    text = "  seq_length ...................................... 1024\n"  # for tokens per second
    for n, loss in enumerate(losses, 1):
        result = IterationResult(
            iteration=n,
            consumed_samples=8 * n,
            global_batch_size=8,
            seconds=0.5,
            learning_rate=1e-3,
            grad_norm=1.5,
        )
        text += f"{line(result, Interval([loss], 1, 0.5, 8))}\n"
    text += validation_block("iteration 4", {"lm loss": 2.25})
    (tmp_path / "log").write_text(f"{text}\n")
    run = read_run(str(tmp_path / "log"))
    assert run.panels["loss"] == ([1, 2, 3, 4], losses)
    assert run.panels["grad_norm"] == ([1, 2, 3, 4], [1.5] * 4)
    assert run.panels["learning_rate"][1] == pytest.approx([1e-3] * 4)
    assert run.panels["tokens_per_second"][1] == pytest.approx([16384.0] * 4)
    assert run.evaluations == {"validation": ([4], [2.25])}
