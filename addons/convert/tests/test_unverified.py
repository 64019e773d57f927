"""hf-export where nothing can be compared: what the table of verified exports has is written, all
else only with --unverified."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron import host
from megatron.addons.convert.families import FAMILIES, config_for, unverified
from megatron.addons.convert.links import ConversionError
from megatron.addons.convert.native import write_checkpoint
from megatron.checkpoint.safetensors_file import Entry
from megatron.config.model import ModelConfig
from tests.core.model.tiny import VOCAB, tiny_config, tiny_model
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_problem

LLAMA = dict(
    swiglu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
)
LINEAR = {"rotary_seq_len_interpolation_factor": 2}
PARTIAL = {"rotary_percent": 0.5}
HELIUM = {"rotary_interleaved": True, "kv_channels": 12}  # which transformers' Helium ignores
EXPERTS = LLAMA | {"qk_layernorm": True, "num_experts": 4, "moe_ffn_hidden_size": 16}
SINKHORN = EXPERTS | {"moe_router_load_balancing_type": ("sinkhorn",)}


def model_of(**flags: Any) -> ModelConfig:
    return tiny_config(**LLAMA | flags)


@pytest.mark.parametrize(
    ("family", "flags", "gaps"),
    [
        ("llama", {}, 0),
        ("llama", LINEAR | {"group_query_attention": True, "num_query_groups": 2}, 0),
        ("gpt_neox", PARTIAL | LINEAR, 3),  # norm, activation and biases are others
        ("phi3", PARTIAL, 0),
        ("phi3", LINEAR, 1),
        ("granite", {"embedding_multiplier": 12.0}, 0),
        ("helium", HELIUM, 1),
        ("llama", LINEAR | {"use_rope_scaling": True}, 1),  # each alone is verified
        ("qwen3_moe", SINKHORN, 0),
        ("qwen3_moe", SINKHORN | {"moe_shared_expert_intermediate_size": 16}, 1),
        ("another", {}, 1),
    ],
)
def test_what_the_table_lacks(family, flags, gaps):
    assert len(unverified(family, model_of(**flags))) == gaps


def missing(patch):
    patch.setitem(sys.modules, "transformers", None)


def useless(patch):
    """One that knows the families and loads nothing."""
    quiet = SimpleNamespace(logging=SimpleNamespace(disable_progress_bar=lambda: None))
    known = SimpleNamespace(CONFIG_MAPPING=("llama", "helium"), utils=quiet)
    patch.setitem(sys.modules, "transformers", known)


def no_memory(patch):
    useless(patch)
    patch.setattr(host, "available_memory", lambda: 0)


LACKS = {"missing": missing, "useless": useless, "no memory": no_memory}


@pytest.fixture
def export(tmp_path, capfd):
    """hf-export of a model with these flags: (exit code, output, errors, the target)."""

    def call(family: str, *words: str, **flags: Any) -> tuple[int, str, str, Path]:
        config = model_of(**flags)
        model = tiny_model(vocab=VOCAB, padded=VOCAB, **LLAMA | flags)
        weights = [
            Entry(p.sharding.name, p.dtype, tuple(p.shape), p.detach) for p in model.parameters()
        ]
        tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB - 1}
        write_checkpoint(tmp_path / "ours", config, weights, VOCAB, "", [], flags=tokenizer)
        capfd.readouterr()
        words = ("hf-export", tmp_path / "ours", tmp_path / "hf", "--family", family, *words)
        code = exit_code(load_tool("convert_checkpoint").main, *words)
        return code, *capfd.readouterr(), tmp_path / "hf"

    return call


@pytest.mark.parametrize("lack", LACKS)
def test_an_export_of_the_table_is_written(lack, export, monkeypatch):
    LACKS[lack](monkeypatch)
    code, _, _, target = export("llama", **LINEAR)
    assert code == 0 and (target / "config.json").is_file()


@pytest.mark.parametrize("lack", LACKS)
def test_another_one_is_refused(lack, export, monkeypatch):
    LACKS[lack](monkeypatch)
    code, _, errors, target = export("helium", **HELIUM)
    assert code == 1 and not target.exists()
    line = errors.splitlines()[-1]
    assert_problem(line, "export-not-verified", "--unverified", "helium", "kv_channels")


@pytest.mark.parametrize("flag", ["--unverified", "--no-verify"])
def test_or_written_unverified(flag, export, monkeypatch):
    missing(monkeypatch)
    code, _, _, target = export("helium", flag, **HELIUM)
    assert code == 0 and (target / "config.json").is_file()


def test_phi3_has_no_scaled_positions():
    with pytest.raises(ConversionError, match="rotary_seq_len_interpolation_factor is 2"):
        config_for(FAMILIES["phi3"], model_of(**LINEAR), VOCAB, {})


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("mixtral", SINKHORN | {"qk_layernorm": False}),
        ("qwen3_moe", SINKHORN | {"moe_router_topk": 1}),
    ],
)
def test_sinkhorn_that_a_family_cannot_express(family, flags):
    with pytest.raises(ConversionError, match="router_function is s"):
        config_for(FAMILIES[family], model_of(**flags), VOCAB, {})


def test_sinkhorn_is_not_normalized():
    config = config_for(FAMILIES["qwen3_moe"], model_of(**SINKHORN), VOCAB, {})
    assert config["norm_topk_prob"] is False
