"""The table of kernels says what really runs."""

import pytest
import torch

from megatron.arguments import config_from
from megatron.config.tree import Config
from megatron.kernels import gelu, linear, linear_implementations, rows, select
from megatron.kernels.attention import IMPLEMENTATIONS
from megatron.kernels.cpu import bf16_attention, blocking, native
from megatron.kernels.select import KernelRow, kernel_table
from megatron.training.logging import preamble
from tests import problems
from tests.core.kernels import functional

CPU = torch.device("cpu")
TITLES = {each.name: each.title for each in IMPLEMENTATIONS}


def table(dtype: torch.dtype = torch.float32, **values) -> dict[str, KernelRow]:
    """The rows that are on, by operation."""
    shape = {"seq_length": 512, "hidden_size": 64, "num_attention_heads": 4}
    rows = kernel_table(CPU, dtype, config_from(Config, shape | values))
    chosen = [row for row in rows if row.on]
    assert len({row.operation for row in chosen}) == len(chosen)
    assert all(row.reason for row in rows)
    return {row.operation: row for row in chosen}


def test_dropout_puts_training_and_evaluation_on_rows_of_their_own():
    assert (
        table(attention_dropout=0.1)["attention (training)"].implementation == "chunked attention"
    )
    assert "attention dropout" in table(attention_dropout=0.1)["attention (training)"].reason
    assert "attention (evaluation)" in table(attention_dropout=0.1)
    assert "attention" in table(attention_dropout=0.0)


def test_document_masks_and_short_sequences_change_the_attention(no_vector_attention):
    assert (
        "document masks"
        in table(attention_dropout=0.0, reset_attention_mask=True)["attention"].reason
    )
    assert table(attention_dropout=0.0, seq_length=32)["attention"].implementation == TITLES["sdpa"]


@pytest.mark.parametrize("built", [True, False])
def test_bf16_attention_in_cpp_takes_dropout_and_documents(monkeypatch, built):
    monkeypatch.setattr(
        bf16_attention, "unavailable_reason", lambda *_: None if built else "not built"
    )
    monkeypatch.setattr(bf16_attention, "instructions", lambda: "AVX512_BF16")
    values = {"attention_dropout": 0.1, "reset_attention_mask": True, "hidden_size": 128}
    on = table(torch.bfloat16, **values)["attention (training)"]
    assert on.implementation == TITLES["cpp_bf16" if built else "chunked"]
    assert ("AVX512_BF16" if built else "dropout") in on.reason
    rows = kernel_table(
        CPU,
        torch.bfloat16,
        config_from(Config, {"seq_length": 512, "num_attention_heads": 4} | values),
    )
    reasons = {
        row.implementation: row.reason for row in rows if row.operation == "attention (training)"
    }
    assert "document masks" in reasons[TITLES["sdpa"]] or not built
    assert built or reasons[TITLES["cpp_bf16"]] == "not built"


@pytest.mark.parametrize("native", [True, False])
def test_linear_follows_the_capability(monkeypatch, native):
    monkeypatch.setattr(linear, "low_precision_is_native", lambda *_: native)
    row = table(torch.bfloat16)["linear"]
    assert row.implementation == ("bfloat16 GEMM" if native else "fp32 GEMM, rounded once")
    assert table(torch.float32)["linear"].implementation == "float32 GEMM"


@pytest.mark.parametrize("cpu_pays_off, built", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "values, operation, call",
    [
        ({"swiglu": True}, "swiglu", lambda x: functional.swiglu(x)),
        ({"geglu": True}, "geglu", lambda x: functional.geglu(x)),
        ({"squared_relu": True}, "squared_relu", lambda x: functional.squared_relu(x)),
        ({}, "gelu (tanh)", lambda x: functional.gelu(x, True)),
        ({"bias_gelu_fusion": False}, "gelu (erf)", lambda x: functional.gelu(x, False)),
        (
            {"normalization": "RMSNorm"},
            "RMSNorm",
            lambda x: functional.rms_norm(x, torch.ones(4), 1e-5),
        ),
        ({}, "LayerNorm", lambda x: functional.layer_norm(x, torch.ones(4), None, 1e-5)),
    ],
)
def test_the_row_that_is_on_is_what_autograd_sees(
    monkeypatch, cpu_pays_off, built, values, operation, call
):
    monkeypatch.setattr(rows, "pays_off", lambda _: cpu_pays_off)
    monkeypatch.setattr(gelu, "FEW", 0)
    called = []
    real = native._call
    monkeypatch.setattr(native, "_call", lambda *arguments: called.append(real(*arguments)))
    if not built:
        monkeypatch.setattr(native, "load", lambda capability: "not built")
        monkeypatch.setattr(native, "_is_built", lambda capability: False)
    implementation = table(**values)[operation].implementation
    node = call(torch.ones(3, 2, 4, requires_grad=True)).grad_fn
    ours = (
        isinstance(node, torch.autograd.function.BackwardCFunction)
        or operation == "geglu"
        and cpu_pays_off
    )
    assert implementation == (rows.NATIVE if called else rows.ROW_BLOCKED if ours else "torch")
    assert built or not called


@pytest.mark.parametrize("capable", [True, False])
def test_fp8_is_native_emulated_or_refused(monkeypatch, capable):
    operation = select.LAYERS
    config = config_from(Config, {"seq_length": 512, "fp8": "hybrid"})
    assert operation not in table()
    assert "EMULATED" in table(fp8="hybrid")[operation].reason
    assert table(fp8="e4m3")[operation].implementation == "FP8 casts (e4m3), fp32 GEMM"
    assert "hybrid" in preamble.kernels_text(select.fp8_rows(CPU, config))
    assert not preamble.kernels_text([table()["linear"]])
    for module in (linear_implementations, select):
        monkeypatch.setattr(module, "has_fp8", lambda device: capable)
    if capable:
        row = next(row for row in select.fp8_rows(torch.device("cuda"), config) if row.on)
        assert "SLOWER" in row.reason and "--torch-compile" in row.reason
        compiled = config_from(
            Config,
            {"seq_length": 512, "fp8": "hybrid", "fp8_recipe": "tensorwise", "torch_compile": True},
        )
        row = next(row for row in select.fp8_rows(torch.device("cuda"), compiled) if row.on)
        assert "SLOWER" not in row.reason
        assert row.implementation == "FP8 GEMM (hybrid)"
    else:
        with problems.raises(ValueError, "fp8-not-supported", "--fp8-format hybrid"):
            select.fp8_rows(torch.device("cuda"), config)


def test_libraries_are_off_and_say_why():
    config = config_from(Config, {"hidden_size": 64, "num_attention_heads": 4})
    rows = {row.implementation: row for row in kernel_table(CPU, torch.float32, config)}
    for name in ("Transformer Engine", "apex", "flash-attn"):
        assert not rows[name].on and "CUDA device" in rows[name].reason


def test_runs_of_rows_pay_off_on_a_cpu_only():
    assert blocking.pays_off(CPU)
    assert not blocking.pays_off(torch.device("meta"))


def test_compiled_layers_have_no_calls_into_cpp(cpp):
    config = config_from(
        Config,
        {"seq_length": 64, "hidden_size": 128, "num_attention_heads": 2, "torch_compile": True},
    )
    table = {
        (row.operation, row.implementation): row
        for row in kernel_table(CPU, torch.bfloat16, config)
    }
    for key in (("gelu (tanh)", rows.NATIVE), ("attention", TITLES["cpp_bf16"])):
        found = table.get(key) or table[f"{key[0]} (training)", key[1]]
        assert not found.on and found.reason
    assert table["cross entropy", rows.NATIVE].on
