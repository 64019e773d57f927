"""Logs read back: metrics files, restarts, and what is torn (the seed's: tests/features/spikes)."""

import json

import pytest

from megatron.analysis.log_reader import read_metrics, read_text
from megatron.analysis.run_reader import read_run


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
    with pytest.raises(ValueError, match=r"m.jsonl, line 2: .* --metrics-file"):
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
    assert history.joins == {3: 4, 2: 5}
