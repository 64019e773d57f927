"""--log-format short: its numbers, its width, and that every line is read back."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest

from megatron.analysis.log_reader import LoggedEvaluation, read_text
from megatron.training.logging.iteration import Interval
from megatron.training.logging.short_format import (
    WIDTH,
    clock,
    duration,
    evaluation_line,
    fold,
    iteration_line,
    last_line,
    metric,
    scientific,
    significant,
    status_line,
)
from megatron.training.result import IterationResult

RESULT = IterationResult(
    iteration=100, global_batch_size=8, seconds=2.0, grad_norm=0.8123, learning_rate=3e-3
)
# what an iteration line has on request, or where it is not constant
EXTRAS = {"teraflops": 1.5, "loss_scale": 65536.0, "batch_size": 8}


def line_of(interval: Interval, eta: float | None, of: int = 1300, extras=(), **changes) -> str:
    result = replace(RESULT, **changes)
    sizes = {"train_iters": of, "seq_length": 128}
    return iteration_line(result, interval, eta, **sizes, **dict(extras))


def test_an_ordinary_line_is_one_line_with_seven_numbers():
    line = line_of(Interval([4.0, 4.2468], 2, 0.236, 16), 141.0)
    assert (
        line == " iter  100/1300 | loss 4.1234 | grad norm 0.812 | lr 3.00e-3 |  118 ms | 8.68k "
        "tok/s | ETA 2m21s"
    )
    assert len(line) <= WIDTH


def test_an_ordinary_line_fits_for_large_runs():
    """Six digits of iterations: nothing folds, so that lines stay one per iteration."""
    cases = itertools.product(
        [0.00012, 3.14159, 11.98765],
        [0.0, 0.0123, 9.9996, 12.345, 999.96],
        [0.00123, 0.0999, 0.9996, 12.34, 99.99],
        [None, 7.0, 3599.0, 86399.0, 9e6],
    )
    for loss, norm, seconds, eta in cases:
        interval = Interval([loss], 1, seconds, 1024)
        line = line_of(interval, eta, 500000, iteration=123456, grad_norm=norm)
        assert "\n" not in line and len(line) <= WIDTH, line


@pytest.mark.parametrize(
    "skips",
    [
        {},
        {"overflow_skips": 3, "nan_iterations": 2},
        {"vetoes": {"judge": Counter({"nonfinite": 1, "other": 1})}},
        {"user_skips": 7, "reasons": {"user"}},
        {"user_skips": 7, "vetoes": {"judge": Counter({"other": 1})}, "reasons": {"user", "x"}},
    ],
)
@pytest.mark.parametrize("extras", [{}, EXTRAS])
def test_what_is_printed_is_read_back(skips, extras):
    norms = {"num_zeros": 12, "params_norm": 77.125} if extras else {}
    line = line_of(Interval([2.5], 1, 2.0, 8, **skips), 100.0, extras=extras, **norms)
    text = f"note\n{line}\n checkpoint of iteration 100 saved to x\n"
    assert max(map(len, text.splitlines())) <= WIDTH
    [found] = read_text(text).records
    assert (found.iteration, found.train_iters, found.loss, found.learning_rate) == (
        100,
        1300,
        2.5,
        3e-3,
    )
    assert found.grad_norm == 0.812
    assert found.skipped == skips.get("overflow_skips", 0) + sum(
        vetoes.total() for vetoes in skips.get("vetoes", {}).values()
    )
    assert found.user_skipped == skips.get("user_skips", 0)
    assert found.numbers["milliseconds"] == 2000 and found.numbers["tokens_per_second"] == 512
    assert found.global_batch_size == (8 if extras else None)
    assert found.numbers.get("loss_scale") == (65536 if extras else None)
    assert found.numbers.get("teraflops") == (1.5 if extras else None)


def test_a_line_without_training():
    line = line_of(Interval(user_skips=10, reasons={"user"}), None, skipped="user")
    assert line == " iter  100/1300 | lr 3.00e-3 | user-skipped 10 (user)"
    [found] = read_text(line + "\n").records
    assert not found.trained and found.user_skipped == 10 and found.grad_norm is None


def test_infinite_and_nan():
    interval = Interval([math.nan], 1, 2.0, 8, nan_iterations=1)
    line = line_of(interval, 1.0, grad_norm=math.inf)
    [found] = read_text(line + "\n").records
    assert math.isnan(found.loss) and found.grad_norm == math.inf and "nan 1" in line


def test_evaluations_are_read_back():
    lines = [
        evaluation_line("validation", 300, {"lm loss": 4.01}, 2.3145),
        evaluation_line("validation-1", 300, {"lm loss": 3.5}),
        evaluation_line("test", 400, {"lm loss": 11.5}),
        " validation loss at iteration 7 | lm loss value: 1.500000E+00 | lm loss PPL: 4.5E+00 | ",
        " validation loss at iteration 8 on test set | lm loss value: 1.250000E+00 | lm loss PPL: "
        "3.5E+00 | ",
    ]
    assert (
        lines[0]
        == " validation at iteration 300 | loss 4.0100 | perplexity 55.15 | bits per byte 2.3145"
    )
    assert read_text("\n".join(lines)).evaluations == [
        LoggedEvaluation(300, "validation", 4.01, 2.3145),
        LoggedEvaluation(300, "validation-1", 3.5),
        LoggedEvaluation(400, "test", 11.5),
        LoggedEvaluation(7, "validation", 1.5),
        LoggedEvaluation(8, "test", 1.25),
    ]
    assert read_text("\n".join(lines)).records == []


def test_status_and_summary():
    assert status_line(26, 1300, 0.118, 150.0) == " iter   26/1300 | 2.0 % | 118 ms | ETA 2m30s"
    text = last_line(
        "exiting program after 12.345678901234567 minutes",
        26,
        1300,
        754.3,
        26624,
        8680.0,
        "no checkpoint",
    )
    assert text.startswith(
        " stopped after 12.34 minutes | 26 of 1,300 iterations | elapsed 0:12:34 | 26.6k "
        "tokens | 8.68k tok/s"
    )
    assert "training finished" in last_line(None, 1, 1, 1.0, 1, 1.0, "")


def test_long_parts_fold_and_nothing_is_wider():
    text = fold([" a", *["x" * 30] * 7])
    assert max(map(len, text.splitlines())) <= WIDTH and text.count("x" * 30) == 7


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (metric, 0, "0"),
        (metric, 868, "868"),
        (metric, 8679.6, "8.68k"),
        (metric, 99960, "100k"),
        (metric, 999_960, "1.00M"),
        (metric, 1.234e10, "12.3B"),
        (metric, 0.5, "0.5"),
        (clock, 0.4, "0s"),
        (clock, 59.6, "1m00s"),
        (clock, 3600, "1h00m"),
        (clock, 86400 * 3 + 14400, "3d04h"),
        (clock, 86400 * 12.5, "12d"),
        (clock, 86399, "23h"),
        (clock, 3599, "59m"),
        (clock, 300, "5m00s"),
        (clock, math.inf, "unknown"),
        (duration, 0.00987, "9.87 ms"),
        (duration, 0.118, "118 ms"),
        (duration, 0.9996, "1.00 s"),
        (duration, 1234.5, "1234 s"),
        (scientific, 0.0, "0.00e0"),
        (scientific, 1.5e-10, "1.50e-10"),
        (significant, 0.81234, "0.812"),
        (significant, 12.3456, "12.35"),
        (significant, 4321.0, "4321"),
        (significant, math.nan, "nan"),
    ],
)
def test_numbers(function, value, text):
    assert function(value) == text


def test_a_damaged_evaluation_does_not_end_the_reading_of_a_log():
    text = " validation at iteration 4 | loss 2.25 | perplexity 9.4 | bits per byte 1.65.04\n"
    assert read_text(text).evaluations == [LoggedEvaluation(4, "validation", 2.25, 1.65)]
