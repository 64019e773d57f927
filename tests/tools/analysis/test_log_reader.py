"""Logs read back: Megatron's lines, ours, metrics files, restarts, and what is torn (the seed's:
tests/features/spikes)."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial

import pytest

from megatron.analysis.log_reader import read_metrics, read_text
from megatron.analysis.run_reader import read_run
from megatron.features.megatron_cli.aurora_format import aurora_line
from megatron.features.megatron_cli.megatron_format import megatron_line
from megatron.training.logging.iteration import Interval
from megatron.training.result import IterationResult

DATE = datetime(2026, 1, 1)


@pytest.mark.parametrize(
    "line",
    [
        partial(megatron_line, train_iters=500, teraflops=1.0),
        partial(
            aurora_line,
            train_iters=500,
            seq_length=1024,
            world_size=1,
            lm_teraflops=1.0,
            ds_teraflops=1.0,
            now=DATE,
        ),
    ],
)
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


def test_a_loss_that_is_not_a_number():
    assert (
        str(read_text(" iteration 3/ 9 | lm loss: NAN | grad norm: inf |".lower()).records[0].loss)
        == "nan"
    )


def row(iteration: int, **changes) -> str:
    plain = {
        "iteration": iteration,
        "lm_loss": 6.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "consumed_samples": 8,
        "consumed_tokens": 8192,
        "elapsed_ms": 5.0,
        "global_batch_size": 8,
        "skipped": 0,
        "skip_reason": None,
    }
    return json.dumps(plain | changes) + "\n"


def test_metrics_files():
    rows = [
        row(1),
        row(2, lm_loss=None, grad_norm=None, skipped=1, skip_reason="user"),
        row(3, lm_loss="inf", skipped=1, skip_reason="overflow"),
        '{"iter',
    ]
    first, second, third = read_metrics(rows, "m.jsonl").records
    assert (first.loss, first.skipped, first.numbers["consumed_tokens"]) == (6.0, 0, 8192)
    assert (second.loss, second.user_skipped, second.skipped) == (None, 1, 0)
    assert (third.loss, third.skipped, third.user_skipped) == (float("inf"), 1, 0)
    with pytest.raises(ValueError, match=r"m.jsonl, line 2: .*not a line of --metrics-file"):
        read_metrics([row(1), '{"iter', row(3)], "m.jsonl")


def test_the_last_run_wins_where_runs_overlap(tmp_path):
    text = "".join(
        f" iteration {n}/ 9 | lm loss: {loss} |\n"
        for n, loss in [
            (1, 1.0),
            (2, 2.0),
            (3, 3.0),
            (4, 4.0),
            (3, 33.0),
            (4, 44.0),
            (5, 55.0),
            (2, 222.0),
        ]
    )
    (tmp_path / "log").write_text(text)
    history = read_run(str(tmp_path / "log"))
    assert [(r.iteration, r.loss) for r in history.records] == [(1, 1.0), (2, 222.0)]
    assert history.joins == [3, 2]
