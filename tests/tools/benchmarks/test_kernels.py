"""tools/benchmarks/kernels.py on few tokens: its table, what it refuses, and that no clock runs for
a wrong kernel."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from megatron.kernels import functional
from megatron.kernels.cpu import bf16_attention, fp32_attention
from tests.load_tool import load_tool

SMALL = ["--tokens", "32", "--sequences", "16", "512", "--rounds", "2"]


@pytest.mark.parametrize("built", [False, True])
def test_a_row_for_each_race(monkeypatch, capsys, built):
    if not built:
        monkeypatch.setattr(fp32_attention, "load", lambda capability: "not built")
    elif isinstance(found := fp32_attention.load(torch.backends.cpu.get_cpu_capability()), str):
        pytest.skip(found)
    assert load_tool("benchmarks/kernels").main(SMALL) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert re.match(
        r"date .*, torch .*, \d+ threads, load average .*; fp32 .*, forward \+ backward$", head
    )
    assert titles.split() == ["ours", "ms", "torch", "ms", "x", "torch", "here", "runs"]
    names = [
        re.match(r"(.+?) +[\d.]+ +[\d.]+ +[\d.]+  (ours|torch)$", row).groups() for row in rows
    ]
    short = "ours" if built else "torch"
    lacks_bf16 = bf16_attention.unavailable_reason(torch.device("cpu"), torch.bfloat16, 64, 512)
    bf16 = [f"bf16 attention, sequence {s}" for s in (16, 512)] if lacks_bf16 is None else []
    assert names == [
        ("attention, sequence 16", short),
        ("attention, sequence 512", "ours"),
        *[(name, "ours") for name in bf16],
        ("tanh GELU", "ours"),
        ("RMSNorm", "ours"),
        ("swiglu", "ours"),
        ("rotary", "ours"),
    ]


@pytest.mark.parametrize("kernel", ["gelu", "rms_norm", "swiglu", "apply_rotary", "attention"])
def test_a_wrong_kernel_does_not_race(monkeypatch, capsys, kernel):
    right = getattr(functional, kernel)

    def wrong(*args, **options):
        return right(*args, **options) * (1.0 if options.get("implementation") == "sdpa" else 1.01)

    monkeypatch.setattr(functional, kernel, wrong)
    with pytest.raises(AssertionError, match="not close"):
        load_tool("benchmarks/kernels").main(SMALL)
    word = {"rms_norm": "RMSNorm", "apply_rotary": "rotary", "gelu": "tanh GELU"}.get(
        kernel, kernel
    )
    assert not any(line.startswith(word) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_with_dropout_and_documents(monkeypatch, capsys, dtype):
    tool = load_tool("benchmarks/kernels")
    monkeypatch.setattr(tool, "STEP", replace(tool.STEP, layers=1, hidden=64, heads=2, seq=32))
    assert tool.main(["--step", dtype, "--rounds", "2", "--tokens", "64"]) == 0
    _, shape, titles, *rows = capsys.readouterr().out.splitlines()
    assert shape == f"training step, {dtype}: 1 layers of 64, 2 heads, 2 x 32 tokens"
    assert titles.split() == ["ms", "x", "first"]
    found = [re.match(r"(.+?) +[\d.]+ +([\d.]+)$", row).groups() for row in rows]
    assert [name for name, _ in found] == list(tool.STEPS) and found[0][1] == "1.00"


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--tokens", "0"], ["--sequences", "0"]])
def test_nothing_to_time(capsys, flags):
    with pytest.raises(SystemExit) as leave:
        load_tool("benchmarks/kernels").main(flags)
    assert leave.value.code == 2 and "must be at least 1" in capsys.readouterr().err
