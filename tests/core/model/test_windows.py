"""Sliding windows by layer, --window-size and --window-attn-skip-freq: what a model sees, and what the
plan says of it."""

import pytest
import torch

from megatron.arguments import config_from
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from megatron.kernels.select import kernel_table
from megatron.parallel.context import Axis
from megatron.training.logging.flops import count_flops
from tests.core.config.checks.checked_flags import BASE, checked
from tests.core.model.tiny import tiny_model, tokens
from tests.problems import assert_problem

SIX = dict(num_layers=6, hidden_size=8, num_attention_heads=2, seq_length=64)


def seen(**flags) -> list[int]:
    """The positions whose logits depend on token 4."""
    model = tiny_model(torch.float64, **flags)
    ids, _ = tokens()
    other = ids.clone()
    other[:, 4] = (ids[:, 4] + 1) % 50
    with torch.no_grad():
        changed = (model(ids) != model(other)).flatten(2).any(-1).any(0)
    return changed.nonzero().flatten().tolist()


@pytest.mark.parametrize("back", [0, 1, 3])
def test_a_token_sees_itself_and_so_many_before_it(back):
    """Megatron's (W, 0) is W + 1 tokens, in each of two layers."""
    assert seen(num_layers=2, window_size=(back, 0)) == list(range(4, 4 + 2 * back + 1))
    assert seen(num_layers=2, window_size=(back, 0), window_attn_skip_freq="2") == [
        *range(4, len(tokens()[0][0]))
    ]


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, [5] * 6),
        ("3", [5, 5, None] * 2),
        ("1", [None] * 6),
        ("7", [5] * 6),
        ("([1,1,1,0]*1+[0,1])", [5, 5, 5, None, None, 5]),
    ],
)
def test_which_layers_have_the_window(pattern, windows):
    """As Megatron: every Nth layer is full, and 1 of a list is a layer with the window."""
    model = ModelConfig(**SIX, window_size=(4, 0), window_attn_skip_freq=pattern)
    assert [model.window_of(layer) for layer in range(6)] == windows
    assert [model.layer(layer).mixer.window for layer in range(6)] == windows
    assert model.window == next((w for w in windows if w), None)


def test_flops_count_the_window_of_its_layers():
    full = count_flops(ModelConfig(**SIX), 64)
    windows = count_flops(ModelConfig(**SIX, window_size=(15, 0), window_attn_skip_freq="3"), 64)
    assert windows.linear == full.linear
    assert windows.core * 6 == full.core * 2 + full.core * 4 * 16 // 64


def test_the_attention_of_each_window_is_in_the_table_of_kernels():
    windows = dict(window_size=(15, 0), window_attn_skip_freq="3", attention_dropout=0.0)
    config = config_from(Config, SIX | windows)
    rows = [row for row in kernel_table(torch.device("cpu"), torch.float32, config) if row.on]
    operations = [row.operation for row in rows if row.operation.startswith("attention")]
    assert operations == ["attention, window of 16", "attention"]


@pytest.mark.parametrize(
    ("flags", "codes"),
    [
        ("--window-size 127 0", []),
        ("--window-size 127,0", []),
        ("--window-size (127,0) --window-attn-skip-freq 2", []),
        ("--window-size 127,0 --window-attn-skip-freq ([1,0])", []),
        ("--window-size 127,0 --attention-backend unfused", []),
        ("--window-size 127,0 --context-parallel-size 2", []),
        ("--window-size -1,0", ["value-out-of-range"]),
        ("--window-size 127,1", ["value-out-of-range"]),
    ],
)
def test_the_flag(flags, codes):
    problems, _ = checked(flags, 2, base=f"{BASE} --min-lr 0 --attention-dropout 0")
    assert len(problems) == len(codes), problems
    for problem, code in zip(problems, codes, strict=True):
        assert_problem(problem, code, "--window-size")


@pytest.mark.parametrize("pattern", ["0", "[1,0,1]", "x"])
def test_a_pattern_that_does_not_fit_the_layers(pattern):
    flags = f"--window-size 127,0 --window-attn-skip-freq {pattern}"
    (problem,), _ = checked(flags, 1, base=BASE)
    assert_problem(problem, "value-out-of-range", "--window-attn-skip-freq")


def test_a_window_as_long_as_the_sequence_is_none():
    """Plain kernels compute it; with context parallelism the whole sequence counts."""
    model = tiny_model(torch.float32, window_size=(6, 0))
    attention = model.decoder.layers["0"].self_attention
    x = torch.zeros(7, 1, 32)
    assert attention.spec(x).window is None
    assert attention.spec(torch.zeros(8, 1, 32)).window == 7
    attention.ring = Axis("cp", 2, 0)
    assert attention.spec(x).window == 7
