"""Log lines against the text that the two seeds printed."""

import math
import re
from datetime import datetime

import pytest

from megatron.training.logging.aurora_format import aurora_line
from megatron.training.logging.iteration import Interval, IterationRow
from megatron.training.logging.megatron_format import (
    megatron_line,
    progress_line,
    timers_block,
    validation_block,
)

SEED_345M = """---------------------------------------------------------------------------------------------
 validation loss at iteration 1 | lm loss value: 1.103246E+01 | lm loss PPL: 6.184932E+04 | 
---------------------------------------------------------------------------------------------"""  # noqa: W291
SEED_AURORA = (
    "iteration= 1/ 635782 | consumed_samples= 768 | consumed_tokens= 3145728 | "
    "elapsed_time_per_iteration_ms=29570.0 | learning_rate=9.4372e-09 | global_batch_size= 768 | "
    "lm loss=11.167250 | loss_scale=1.0 | grad_norm=6.363 | actual_seqlen= 4096 | "
    "number_of_skipped_iterations= 0 | number_of_nan_iterations= 0 | samples_per_second=25.972 | "
    "tokens_per_gpu_per_second_tgs=4432.597 | [LM]TFLOPs=20.30 | [DS]TFLOPs=26.18 |"
)
SEED_SKIPPED = (
    "iteration= 2/ 635782 | consumed_samples= 1536 | consumed_tokens= 6291456 | "
    "learning_rate=1.88744e-08 | global_batch_size= 768 | loss_scale=1.0 | actual_seqlen= 4096 | "
    "number_of_skipped_iterations= 1 | number_of_nan_iterations= 0"
)


def row(interval: Interval, **changes) -> IterationRow:
    fields = dict(
        iteration=10,
        train_iters=1000,
        consumed_samples=80,
        seq_length=1024,
        learning_rate=4.6875e-07,
        global_batch_size=8,
        loss_scale=4294967296.0,
        grad_norm=None,
        interval=interval,
        world_size=1,
    )
    return IterationRow(**fields | changes)


def test_validation_block_is_the_seeds():
    loss = 11.032460
    assert math.exp(loss) == pytest.approx(6.184932e4, rel=1e-5)
    block = validation_block("iteration 1", {"lm loss": loss})
    assert re.sub(r"PPL: \S+", "PPL: X", block) == re.sub(r"PPL: \S+", "PPL: X", SEED_345M)
    assert block.count("-" * 93) == 2 and "-" * 94 not in block


def test_perplexity_is_capped_as_megatrons():
    assert f"PPL: {math.exp(20):.6E}" in validation_block("iteration 1", {"lm loss": 400.0})


def test_iteration_line_to_the_character():
    interval = Interval(
        losses=[11.0, 10.0],
        trained=10,
        seconds=12.3456,
        samples=80,
        overflow_skips=8,
        nan_iterations=1,
    )
    assert megatron_line(
        row(interval, grad_norm=1.23456, teraflops=7.06, num_zeros=5, params_norm=2.5), True
    ) == (
        " iteration       10/    1000 | consumed samples:           80 | elapsed time per "
        "iteration (ms): 1234.6 | throughput per GPU (TFLOP/s/GPU): 7.1 | learning rate: "
        "4.688E-07 | global batch size:     8 | lm loss: 1.050000E+01 | loss scale: 4294967296.0 "
        "| grad norm: 1.235 | num zeros: 5.0 | params norm: 2.500 | number of skipped "
        "iterations:   8 | number of nan iterations:   1 |"
    )


def test_all_skipped_has_no_loss_and_no_norm():
    line = megatron_line(
        row(Interval(trained=10, seconds=1.0, samples=80, overflow_skips=10)), False
    )
    assert "lm loss" not in line and "grad norm" not in line and "throughput" not in line
    assert "skipped iterations:  10 |" in line


def aurora(interval: Interval, **changes) -> str:
    fields = dict(
        iteration=1,
        train_iters=635782,
        consumed_samples=768,
        seq_length=4096,
        learning_rate=9.4372e-09,
        global_batch_size=768,
        loss_scale=1.0,
        world_size=24,
        lm_teraflops=20.302,
        ds_teraflops=26.18,
    )
    text = aurora_line(row(interval, **fields | changes), datetime(2024, 9, 16))
    return re.sub(r" +", " ", text.split(" - ", 1)[1])


def test_aurora_line_is_the_seeds():
    """Spaces apart: the page folded runs of blanks."""
    interval = Interval(
        losses=[11.16725], trained=1, seconds=768 * 4096 / (24 * 4432.597), samples=768
    )
    got = aurora(interval, grad_norm=6.363)
    assert got == SEED_AURORA


def test_aurora_skipped_line_has_nothing_stale():
    """The seed reprinted the old norm and rated the skipped work; everything else is its line."""
    got = aurora(
        Interval(user_skips=1), iteration=2, consumed_samples=1536, learning_rate=1.88744e-08
    )
    assert (
        got.replace(" elapsed_time_per_iteration_ms=0.0 |", "").removesuffix(" |") == SEED_SKIPPED
    )


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
