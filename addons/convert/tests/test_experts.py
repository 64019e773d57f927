"""tools/convert_checkpoint.py with mixtures of experts of Hugging Face: damaged folders, and export
of an upcycled model."""

from __future__ import annotations

import pytest
import torch

from megatron.addons.convert.tests.hf_models import VOCAB, edit_config, make, rewrite_on_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers
IDS = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))


EXPERT = "experts.3.down_proj.weight"
DAMAGED = {
    "missing expert": lambda t, name: t.pop(name),
    "wrong shape": lambda t, name: t.update({name: torch.zeros(2, 3)}),
    "one expert more": lambda t, name: t.update({name.replace(".3.", ".6."): t[name].clone()}),
    "wrong dtype": lambda t, name: t.update({name: t[name].half()}),
    "quantized": lambda t, name: t.update({name: t[name].to(torch.int8)}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_experts(case, tmp_path, convert):
    safetensors = pytest.importorskip("safetensors.torch")
    make(transformers, "qwen2_moe", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = safetensors.load_file(path)
    name = next(name for name in tensors if name.endswith(EXPERT))
    DAMAGED[case](tensors, name)
    safetensors.save_file(tensors, path, {"format": "pt"})
    said = convert("hf-import", tmp_path / "hf", tmp_path / "ours", fails=True)
    assert ".mlp.experts." in said
    assert not (tmp_path / "ours").exists()


CONFIGS = {
    "more experts": dict(num_experts=7),
    "no experts": dict(num_experts=0),
    "other width": dict(moe_intermediate_size=41),
    "no layer": dict(decoder_sparse_step=9),
    "all dense": dict(mlp_only_layers=[0, 1, 2, 3]),
    "experts as words": dict(num_experts="six"),
    "shared expert of another width": dict(shared_expert_intermediate_size=47),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_are_not_the_models(case, tmp_path, convert):
    make(transformers, "qwen2_moe", tmp_path / "hf")
    edit_config(tmp_path / "hf", **CONFIGS[case])
    assert "error: " in convert("hf-import", tmp_path / "hf", tmp_path / "ours", fails=True)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("changes", [dict(clip_qkv=8.0), dict(sliding_window=8)], ids=str)
def test_configurations_of_olmoe_that_are_not_possible(changes, tmp_path, convert):
    make(transformers, "olmoe", tmp_path / "hf")
    edit_config(tmp_path / "hf", **changes)
    said = convert("hf-import", tmp_path / "hf", tmp_path / "ours", fails=True)
    assert next(iter(changes)) in said
    assert not (tmp_path / "ours").exists()


def test_upcycled_models_are_exported(tmp_path, convert):
    """A Llama that was imported, upcycled and exported as a Mixtral computes what it did; of a
    capacity, which acts in training alone, there is a note."""
    model = make(transformers, "llama", tmp_path / "hf")
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--no-verify")
    convert("upcycle", tmp_path / "ours", tmp_path / "moe", "--num-experts", 4)
    rewrite_on_ranks(
        tmp_path / "moe", tmp_path / "dropping", tp=1, pp=1, moe_expert_capacity_factor=0.5
    )
    said = convert("hf-export", tmp_path / "dropping", tmp_path / "back", "--family", "mixtral")
    assert "--moe-expert-capacity-factor 0.5" in said and "\nverified: " in said
    back = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        torch.testing.assert_close(back(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
