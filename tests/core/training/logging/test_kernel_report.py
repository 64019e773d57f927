"""The table of kernels as --dry-run prints it."""

from __future__ import annotations

import re

import pytest

from megatron.arguments import config_from
from megatron.config.tree import Config
from megatron.kernels.select import KernelRow
from megatron.training.logging import kernel_report


def test_a_line_for_what_is_on_and_one_for_all_that_is_off():
    rows = [
        KernelRow("linear", "fp32 GEMM", True, "bf16 is emulated"),
        KernelRow("linear", "bf16 GEMM", False, "no instructions"),
        KernelRow("norm", "torch", True, "fast"),
        KernelRow("norm", "loop", False, "slow"),
        KernelRow("gelu", "loop", False, "slow"),
        KernelRow("fused", "apex", False, "not installed"),
    ]
    lines = kernel_report.describe(rows)
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
        lines = kernel_report.kernel_lines(config_from(Config, plain | flags))
        assert lines[0].split()[-1] == "cpu"
        used = lines[1 : lines.index("  not used:")]
        return {line.strip().partition(":")[0] for line in used}

    assert operation in operations(values) and operation not in operations({})


def test_the_precision_is_that_of_the_weights():
    flags = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "device": "cpu"}
    lines = {
        name: kernel_report.kernel_lines(
            config_from(Config, flags | ({name: True} if name else {}))
        )[1]
        for name in ("", "fp64")
    }
    assert "float32 GEMM" in lines[""] and "float64 GEMM" in lines["fp64"]


def test_a_device_that_is_not_here(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda"):
        kernel_report.kernel_lines(config_from(Config, {"device": "cuda"}))
