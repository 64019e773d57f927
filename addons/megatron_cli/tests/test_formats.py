"""The iteration lines of --log-format megatron and aurora, against the text that the two seeds
printed."""

import re
from dataclasses import replace
from datetime import datetime

import pytest

from megatron.addons.megatron_cli.aurora_format import (
    aurora_ds_flops_per_token,
    aurora_line,
    aurora_lm_flops_per_token,
)
from megatron.addons.megatron_cli.megatron_format import megatron_line
from megatron.config.model import ModelConfig
from megatron.training.logging.flops import count_flops, teraflops_per_rank
from megatron.training.logging.iteration import Interval
from megatron.training.result import IterationResult


def model(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, seq_length: int
) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        group_query_attention=True,
        num_query_groups=groups,
        swiglu=True,
        seq_length=seq_length,
    )


AURORA = model(3, 4096, 11008, 32, 8, 4096), 32000  # with its vocabulary
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
# seed 004: (elapsed ms, samples per second, tokens per GPU per second, [LM]TFLOPs, [DS]TFLOPs), as
# printed
SEED_LINES = """
29570.0 25.972 4432.597 20.30 26.18
8457.2 90.810 15498.234 70.98 91.53
7136.5 107.615 18366.372 84.12 108.46
7147.0 107.458 18339.524 84.00 108.31
21224.4 36.185 6175.523 28.29 36.47
106.8 7190.781 1227226.651 5620.92 7247.49
84.7 9070.783 1548080.271 7090.49 9142.31
"""


RESULT = IterationResult(
    iteration=10,
    seconds=1.0,
    consumed_samples=80,
    learning_rate=4.6875e-07,
    global_batch_size=8,
    loss_scale=4294967296.0,
)


def test_iteration_line_to_the_character():
    interval = Interval(
        losses=[11.0, 10.0],
        trained=10,
        seconds=12.3456,
        samples=80,
        overflow_skips=8,
        nan_iterations=1,
    )
    result = replace(RESULT, grad_norm=1.23456, num_zeros=5, params_norm=2.5)
    assert megatron_line(result, interval, 1000, 7.06) == (
        " iteration       10/    1000 | consumed samples:           80 | elapsed time per "
        "iteration (ms): 1234.6 | throughput per GPU (TFLOP/s/GPU): 7.1 | learning rate: "
        "4.688E-07 | global batch size:     8 | lm loss: 1.050000E+01 | loss scale: 4294967296.0 "
        "| grad norm: 1.235 | num zeros: 5.0 | params norm: 2.500 | number of skipped "
        "iterations:   8 | number of nan iterations:   1 |"
    )


def test_all_skipped_has_no_loss_and_no_norm():
    """Also where the norm of the last one was finite."""
    result = replace(RESULT, grad_norm=1.0, skipped="judge")
    interval = Interval(trained=10, seconds=1.0, samples=80, overflow_skips=10)
    line = megatron_line(result, interval, 1000)
    assert "lm loss" not in line and "grad norm" not in line and "throughput" not in line
    assert "skipped iterations:  10 |" in line


def aurora(interval: Interval, **changes) -> str:
    first = IterationResult(
        iteration=1,
        seconds=1.0,
        consumed_samples=768,
        learning_rate=9.4372e-09,
        global_batch_size=768,
    )
    text = aurora_line(
        replace(first, **changes),
        interval,
        train_iters=635782,
        seq_length=4096,
        world_size=24,
        lm_teraflops=20.302,
        ds_teraflops=26.18,
        now=datetime(2024, 9, 16),
    )
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


def test_aurora_figures_per_token():
    assert aurora_lm_flops_per_token(*AURORA) == 4_580_179_968 == count_flops(*AURORA).model
    assert aurora_ds_flops_per_token(*AURORA, full_recompute=True) == 5_905_580_032
    assert aurora_ds_flops_per_token(*AURORA, full_recompute=False) == 5_905_580_032 * 3 // 4


@pytest.mark.parametrize("line", SEED_LINES.strip().splitlines())
def test_the_seeds_printed_teraflops(line):
    milliseconds, samples_per_second, tgs, lm, ds = map(float, re.split(r"\s+", line))
    tokens = 768 * 4096
    seconds = 768 / samples_per_second
    assert seconds * 1e3 == pytest.approx(milliseconds, abs=0.5)
    for per_token, printed in (
        (aurora_lm_flops_per_token(*AURORA), lm),
        (aurora_ds_flops_per_token(*AURORA, full_recompute=True), ds),
    ):
        assert per_token * tgs / 1e12 == pytest.approx(printed, abs=0.00501)
        assert teraflops_per_rank(per_token * tokens, seconds, 24) == pytest.approx(
            printed, rel=3e-5, abs=0.00501
        )


def test_the_quirk_of_the_ds_figure():
    keys = {}
    for groups in (8, 4, 2, 1):
        small = model(1, 64, 128, 8, groups, 0)
        keys[groups] = aurora_ds_flops_per_token(small, 0, False) // 6 - 2 * 64**2 - 3 * 128 * 64
    assert keys == {8: 2 * 64**2, 4: 64**2, 2: 0, 1: 0}
