"""The lines that all formats of one line for each interval share, against the text that the seed
printed."""

import math
import re

import pytest

from megatron.training.logging.iteration import Interval
from megatron.training.logging.line_format import progress_line, timers_block, validation_block

SEED_345M = """---------------------------------------------------------------------------------------------
 validation loss at iteration 1 | lm loss value: 1.103246E+01 | lm loss PPL: 6.184932E+04 | 
---------------------------------------------------------------------------------------------"""  # noqa: W291


def test_validation_block_is_the_seeds():
    loss = 11.032460
    assert math.exp(loss) == pytest.approx(6.184932e4, rel=1e-5)
    block = validation_block("iteration 1", {"lm loss": loss})
    assert re.sub(r"PPL: \S+", "PPL: X", block) == re.sub(r"PPL: \S+", "PPL: X", SEED_345M)
    assert block.count("-" * 93) == 2 and "-" * 94 not in block


def test_perplexity_is_capped_as_megatrons():
    assert f"PPL: {math.exp(20):.6E}" in validation_block("iteration 1", {"lm loss": 400.0})


def test_timers_block():
    ranks = [{"evaluate": 2.10126, "never": 0.0}, {"evaluate": 2.5}]
    assert timers_block(["evaluate", "never"], ranks[:1], "minmax") == (
        "(min, max) time across ranks (ms):\n    evaluate "
        ".......................................: (2101.26, 2101.26)"
    )
    assert timers_block(["evaluate"], ranks, "minmax").endswith(": (2101.26, 2500.00)")
    assert timers_block(["evaluate"], ranks, "max").endswith(": 2500.00")
    assert timers_block(["evaluate"], ranks, "all") == (
        "times across ranks (ms):\n  evaluate:\n     rank  0: 2101.26\n     rank  1: 2500.00"
    )
    assert timers_block(["never"], ranks, "minmax") == ""


def test_rates_leave_skipped_work_out():
    interval = Interval(trained=2, seconds=4.0, samples=16, user_skips=8)
    assert interval.milliseconds == 2000.0


def test_progress_counts_from_where_this_process_began():
    assert progress_line(60, 100, 50, 20.0, 1234.5) == (
        "   60.0 % | 0:00:20 elapsed, ETA 0:01:20 | 1,234 tokens/s"
    )
