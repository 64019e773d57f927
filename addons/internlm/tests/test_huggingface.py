"""InternLM and InternLM2, whose code is not in transformers, against Llama models of the same
weights."""

from __future__ import annotations

import json

import pytest
import torch

from megatron.addons.convert.tests.hf_models import (
    IDS,
    VOCAB,
    config_of,
    make,
    rewrite_on_ranks,
    same_model,
)
from megatron.inference.load_model import open_trained_model

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.peers


def logits_of(folder) -> torch.Tensor:
    with torch.no_grad():
        return open_trained_model(str(folder), device="cpu").model(IDS)


def test_internlm_is_a_llama_with_attention_biases(tmp_path, convert):
    config = config_of("llama biases")
    config.mlp_bias = False
    config.num_key_value_heads = 4
    model = transformers.LlamaForCausalLM(config).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    model.save_pretrained(tmp_path / "llama")
    (tmp_path / "internlm").mkdir()
    (tmp_path / "internlm" / "config.json").write_text(
        json.dumps(
            {
                "model_type": "internlm",
                "architectures": ["InternLMForCausalLM"],
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "max_position_embeddings": 32,
                "bias": True,
                "vocab_size": VOCAB,
                "rms_norm_eps": config.rms_norm_eps,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                "rotary": {"base": 10000, "type": "dynamic"},
                "torch_dtype": "float32",
            }
        )
    )
    state = safetensors.load_file(tmp_path / "llama" / "model.safetensors")
    safetensors.save_file(state, tmp_path / "internlm" / "model.safetensors")
    convert("hf-import", tmp_path / "internlm", tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(tmp_path / "ours"), model(IDS).logits, rtol=0, atol=1e-5
        )
    convert("hf-export", tmp_path / "ours", tmp_path / "as_llama", "--family", "llama")
    same_model(transformers, model, tmp_path / "as_llama")
    convert("hf-export", tmp_path / "ours", tmp_path / "back")
    back = safetensors.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys() and all(
        torch.equal(back[name], state[name]) for name in state
    )
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["model_type"], written["bias"], written["rotary"]["type"]) == (
        "internlm",
        True,
        "dynamic",
    )


def internlm2_state(
    state: dict[str, torch.Tensor], heads: int, groups: int
) -> dict[str, torch.Tensor]:
    """Llama's weights under InternLM2's names: rows of wqkv are, for each group, its queries'
    heads, its key, its value."""
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    found = {}
    for name, value in state.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if "q_proj" in name:
            k, v = (state[name.replace("q_proj", f"{x}_proj")] for x in "kv")
            d = value.shape[0] // heads
            each = heads // groups
            rows = []
            for g in range(groups):
                rows += [value[(g * each + i) * d : (g * each + i + 1) * d] for i in range(each)]
                rows += [k[g * d : (g + 1) * d], v[g * d : (g + 1) * d]]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(rows)
        elif "k_proj" not in name and "v_proj" not in name:
            found[name] = value.clone()
    return found


def test_internlm2_is_a_llama_with_one_matrix_for_queries_keys_and_values(tmp_path, convert):
    model = make(transformers, "llama", tmp_path / "llama")
    (tmp_path / "i2").mkdir()
    (tmp_path / "i2" / "config.json").write_text(
        json.dumps(
            {
                "model_type": "internlm2",
                "architectures": ["InternLM2ForCausalLM"],
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 32,
                "bias": False,
                "vocab_size": VOCAB,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000,
                "attn_implementation": "eager",
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
                "torch_dtype": "float32",
            }
        )
    )
    state = internlm2_state(
        safetensors.load_file(tmp_path / "llama" / "model.safetensors"), heads=4, groups=2
    )
    safetensors.save_file(state, tmp_path / "i2" / "model.safetensors")
    convert("hf-import", tmp_path / "i2", tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(tmp_path / "ours"), model(IDS).logits, rtol=0, atol=1e-5
        )
    convert("hf-export", tmp_path / "ours", tmp_path / "back")
    back = safetensors.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys() and all(
        torch.equal(back[name], state[name]) for name in state
    )


@pytest.mark.parametrize("family", ["internlm", "internlm2"])
def test_a_model_that_rotates_in_part_is_no_model_of_the_family(family, tmp_path, convert):
    make(transformers, "llama", tmp_path / "hf")
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--no-verify")
    rewrite_on_ranks(tmp_path / "ours", tmp_path / "part", tp=1, pp=1, rotary_percent=0.5)
    words = ("hf-export", tmp_path / "part", tmp_path / "back", "--family", family)
    assert "rotary_percent" in convert(*words, fails=True)
    assert not (tmp_path / "back").exists()
