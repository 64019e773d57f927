"""Each flag of choice changes what is computed with; a wish that cannot be met is one error, and
auto says one line."""

import os

import pytest
import torch

from megatron.arguments import config_from
from megatron.config.tree import Config
from megatron.kernels import flash_attention, rows, select, transformer_engine
from megatron.kernels import libraries as loading
from megatron.kernels.attention import IMPLEMENTATIONS
from megatron.kernels.cuda import apex
from megatron.kernels.gated_activations import GATED
from megatron.kernels.kernels import Kernels
from megatron.kernels.linear import low_precision_is_native
from megatron.kernels.rotary import ROTARY
from megatron.kernels.select import choose_kernels, kernel_table
from megatron.training.logging import preamble
from tests.core.model.tiny import loss_and_grads, tiny_config, tiny_model, tokens
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SHAPE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "swiglu": True,
    "position_embedding_type": "rope",
}
TE = {"transformer_impl": "transformer_engine"}
RING = {"context_parallel_size": 2}
BY_HEADS = RING | {"cp_comm_type": ("a2a",)}
TITLES = {each.name: each.title for each in IMPLEMENTATIONS}


def on(dtype: torch.dtype = torch.float32, **flags) -> dict[str, str]:
    """{operation: implementation} of the rows that are on."""
    table = kernel_table(CPU, dtype, config_from(Config, SHAPE | flags))
    return {row.operation: row.implementation for row in table if row.on}


@pytest.fixture
def everything(libraries, monkeypatch):  # noqa: F811
    """All libraries are there, and a CPU counts as a device they run on."""
    for name, module in (
        ("cuda_only", loading),
        ("transformer_engine_unavailable_reason", loading),
        ("unavailable_reason", flash_attention),
        ("unavailable_reason", apex),
        ("gradient_unavailable_reason", apex),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    for name in select.TRANSFORMER_ENGINE_ATTENTION.values():
        monkeypatch.setenv(name, "before")


@pytest.mark.parametrize(
    ("flags", "operation", "before", "after"),
    [
        (
            {"attention_backend": "local"},
            "attention",
            TITLES["sdpa"],
            "chunked attention",
        ),
        (
            {"attention_backend": "unfused"},
            "attention",
            TITLES["sdpa"],
            "unfused attention",
        ),
        (
            {"masked_softmax_fusion": False},
            "attention",
            TITLES["sdpa"],
            "unfused attention",
        ),
        ({"bias_swiglu_fusion": False}, "swiglu", rows.NATIVE, "torch"),
        ({"apply_rope_fusion": False}, "rotary", rows.NATIVE, "torch"),
        ({"bias_gelu_fusion": False, "swiglu": False}, "gelu (erf)", None, "torch"),
        (
            {"gradient_accumulation_fusion": False},
            "weight gradients",
            "accumulated in backward",
            "autograd, then added",
        ),
    ],
)
def test_a_flag_switches_an_implementation(
    no_vector_attention, request, flags, operation, before, after
):
    if before == rows.NATIVE:
        request.getfixturevalue("cpp")
    assert on().get(operation) == before and on(**flags)[operation] == after


def test_layers_with_a_ring_and_layers_without():
    found = on(seq_length=512, **RING | {"cp_comm_type": ("p2p", "a2a")})
    assert found["attention"] == "ring attention, chunked"
    assert found["attention, whole sequences"] in (TITLES["cpp_fp32"], TITLES["chunked"])


def test_fused_attention_by_name_is_torchs_own_where_auto_takes_another(no_vector_attention):
    assert on(seq_length=512)["attention"] == "chunked attention"
    assert on(seq_length=512, attention_backend="fused")["attention"] == TITLES["sdpa"]


@pytest.mark.parametrize(
    ("flags", "operation", "after"),
    [
        ({"attention_backend": "flash"}, "attention", "flash-attn"),
        ({"use_flash_attn": True}, "attention", "flash-attn"),
        ({"reset_attention_mask": True}, "attention", "flash-attn"),
        ({}, "RMSNorm", "apex"),
        ({}, "weight gradients", "apex"),
        (TE, "linear of transformer layers", "Transformer Engine"),
        (TE, "RMSNorm", "Transformer Engine"),
        (TE, "attention", "Transformer Engine"),
        (TE | RING, "attention", "ring attention, chunked"),
        (TE | BY_HEADS, "attention", "Transformer Engine"),
        (BY_HEADS | {"attention_backend": "flash"}, "attention", "flash-attn"),
        (TE | {"attention_backend": "local"}, "attention", "chunked attention"),
        (TE | {"attention_dropout": 0.1}, "attention (training)", "chunked attention"),
        (
            TE,
            "output layer",
            "bfloat16 GEMM"
            if low_precision_is_native("cpu", torch.bfloat16)
            else "fp32 GEMM, rounded once",
        ),
        (TE, "weight gradients", "accumulated in backward"),
        (
            TE | {"fp8": "hybrid"},
            "linear of transformer layers",
            "Transformer Engine",
        ),
    ],
)
def test_libraries_that_are_there_are_on(everything, flags, operation, after):
    assert on(torch.bfloat16, normalization="RMSNorm", **flags)[operation] == after


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        ("auto", ["before", "before", "before"]),
        ("flash", ["1", "0", "0"]),
        ("fused", ["0", "1", "0"]),
        ("unfused", ["0", "0", "1"]),
    ],
)
def test_transformer_engine_is_told_which_attention(everything, backend, found):
    config = config_from(Config, SHAPE | TE | {"attention_backend": backend})
    assert choose_kernels(CPU, torch.bfloat16, config).attention == "transformer_engine"
    assert [os.environ[name] for name in select.TRANSFORMER_ENGINE_ATTENTION.values()] == found


def test_what_was_asked_for_reaches_the_layers(everything):
    chosen = choose_kernels(
        CPU,
        torch.bfloat16,
        config_from(
            Config,
            SHAPE
            | TE
            | {
                "bias_swiglu_fusion": False,
                "apply_rope_fusion": False,
                "gradient_accumulation_fusion": False,
                "fp8": "e4m3",
                "fp8_recipe": "tensorwise",
            },
        ),
    )
    assert not (chosen.fused_swiglu or chosen.fused_rotary or chosen.accumulation)
    assert chosen.transformer_engine == transformer_engine.TransformerEngine(
        False, transformer_engine.Fp8("e4m3", "tensorwise")
    )
    layer = tiny_model(kernels=chosen, swiglu=True, position_embedding_type="rope").decoder.layers[
        "0"
    ]
    assert layer.mlp.activation is GATED["swiglu"][-1].forward
    assert layer.self_attention.rotate.func is ROTARY[-1].forward
    assert isinstance(layer.mlp.linear_fc1.engine, transformer_engine.Linear)


@pytest.mark.parametrize(
    ("flags", "flag", "remedy"),
    [
        (TE, "--transformer-impl transformer_engine: ", "pip install --no-build-isolation "),
        ({"attention_backend": "flash"}, "--attention-backend flash: ", "pip install flash-attn"),
        ({"use_flash_attn": True}, "--use-flash-attn: ", "pip install flash-attn"),
    ],
)
def test_a_missing_library_is_one_error_with_what_to_install(monkeypatch, flags, flag, remedy):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    loading.load_problem.cache_clear()
    with pytest.raises(ValueError) as error:
        select.check_requested(CUDA, torch.bfloat16, config_from(Config, SHAPE | flags))
    assert str(error.value).startswith(flag) and remedy in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags", ["--transformer-impl transformer_engine", "--use-flash-attn --bf16"]
)
def test_a_run_ends_before_anything_is_built(tmp_path, flags):
    with pytest.raises(AssertionError, match=f"{flags.split()[0]}.* CUDA device"):
        train(
            tmp_path,
            with_flags(
                [*SMALL, *NO_DROPOUT, "--mock-data"],
                "--device",
                "auto",
                "--train-iters",
                "9",
                *flags.split(),
            ),
        )
    assert "building" not in (tmp_path / "log.0").read_text()


@pytest.mark.parametrize("flags", [{"torch_compile": True}, {"apply_layernorm_1p": True}])
def test_apex_norms_stay_off_where_they_would_cost(everything, cpp, flags):
    norm = on(torch.bfloat16, normalization="RMSNorm", **flags)["RMSNorm"]
    assert norm == (rows.ROW_BLOCKED if "torch_compile" in flags else rows.NATIVE)


@pytest.mark.parametrize("accumulation", [True, False])
def test_weight_gradients_are_added_by_the_layer_or_by_autograd(accumulation):
    model = tiny_model(kernels=Kernels(accumulation=accumulation))
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    ids, labels = tokens()
    model(ids, labels=labels).mean().backward()
    layer = model.decoder.layers["0"]
    for linear in (
        layer.self_attention.linear_qkv,
        layer.self_attention.linear_proj,
        layer.mlp.linear_fc2,
    ):
        assert (linear.weight.grad is None) == accumulation == bool(linear.weight.main_grad.any())


def test_auto_says_one_line_of_attention(no_vector_attention):
    lines = preamble.kernel_lines(config_from(Config, SHAPE | {"device": "cpu"}))
    (line,) = [line for line in lines if line.startswith("  attention")]
    assert line.startswith(f"  attention: {TITLES['sdpa']} (")
    for library in ("flash-attn", "Transformer Engine"):
        assert not any(library in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ({"gradient_accumulation_fusion": False}, False),
        ({"bias_swiglu_fusion": False}, True),
        ({"apply_rope_fusion": False}, True),
        ({"attention_backend": "local"}, True),
        ({"attention_backend": "unfused"}, True),
    ],
)
def test_the_model_stays_the_same(flags, same):
    shape = {name: value for name, value in SHAPE.items() if hasattr(tiny_config(), name)} | {
        "seq_length": 16
    }
    chosen = choose_kernels(CPU, torch.float64, config_from(Config, SHAPE | flags | {"fp64": True}))
    ours, theirs = (
        loss_and_grads(tiny_model(torch.float64, kernels=one, **shape)) for one in (None, chosen)
    )
    torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-12)
