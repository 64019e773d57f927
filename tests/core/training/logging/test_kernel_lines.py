"""The table of kernels as --dry-run prints it."""

import re

import pytest

from megatron.arguments import config_from
from megatron.config.tree import Config
from megatron.kernels.select import KernelRow
from megatron.training.logging import preamble


def test_a_line_for_what_is_on_and_one_for_all_that_is_off():
    rows = [
        KernelRow("linear", "fp32 GEMM", True, "bf16 is emulated"),
        KernelRow("linear", "bf16 GEMM", False, "no instructions"),
        KernelRow("norm", "torch", True, "fast"),
        KernelRow("norm", "loop", False, "slow"),
        KernelRow("gelu", "loop", False, "slow"),
        KernelRow("fused", "apex", False, "not installed"),
    ]
    lines = preamble.describe_kernels(rows, verbose=True)
    named = [
        ("linear", "fp32 GEMM", rows[0].reason),
        ("norm", "torch", rows[2].reason),
        (),
        ("linear", "bf16 GEMM", rows[1].reason),
        ("norm", "loop", "gelu", "loop", "slow"),
        ("fused", "apex", rows[5].reason),
    ]
    for line, words in zip(lines, named, strict=True):
        assert re.search(r"\b.*\b".join(map(re.escape, words)), line), line
    assert [line.startswith("  ") for line in lines] == [False] * 3 + [True] * 3
    assert preamble.describe_kernels(rows, verbose=False) == lines[:2]


@pytest.mark.parametrize(
    ("values", "operation"),
    [
        ({"swiglu": True}, "swiglu"),
        ({"normalization": "RMSNorm"}, "RMSNorm"),
        ({"hidden_dropout": 0.1}, "dropout"),
    ],
)
def test_the_flags_choose_the_operations(values, operation):
    plain = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "device": "cpu",
    }

    def operations(flags: dict) -> set[str]:
        lines = preamble.kernel_lines(config_from(Config, plain | flags))
        assert lines[0].split()[-1] == "cpu"
        return {line.strip().partition(":")[0] for line in lines[1:]}

    assert operation in operations(values) and operation not in operations({})
