"""InternLM3, whose code is not in transformers, against its formulas in plain torch (float64)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, silu

from megatron.addons.convert.families import FAMILIES
from megatron.addons.convert.huggingface import hf_export, hf_import
from megatron.addons.convert.links import links_of
from megatron.addons.convert.tests.hf_models import IDS, POSITIONS, VOCAB, rewrite_on_ranks
from megatron.checkpoint.safetensors_file import Entry, write_file
from megatron.checkpoint.safetensors_reader import SafetensorsFile
from megatron.inference.load_model import open_trained_model

HIDDEN = 64
FFN = 96
LAYERS = 4
HEADS = 4
GROUPS = 2
WIDTH = 24
EPSILON = 1e-5
BASE = 50000
Weights = dict[str, torch.Tensor]


def shapes(qkv_bias: bool, bias: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = (HIDDEN,)
        for name, rows, columns, biased in (
            ("self_attn.q_proj", HEADS * WIDTH, HIDDEN, qkv_bias),
            ("self_attn.k_proj", GROUPS * WIDTH, HIDDEN, qkv_bias),
            ("self_attn.v_proj", GROUPS * WIDTH, HIDDEN, qkv_bias),
            ("self_attn.o_proj", HIDDEN, HEADS * WIDTH, bias),
            ("mlp.gate_proj", FFN, HIDDEN, bias),
            ("mlp.up_proj", FFN, HIDDEN, bias),
            ("mlp.down_proj", HIDDEN, FFN, bias),
        ):
            found[f"{at}{name}.weight"] = (rows, columns)
            if biased:
                found[f"{at}{name}.bias"] = (rows,)
    found["model.norm.weight"] = (HIDDEN,)
    found["lm_head.weight"] = (VOCAB, HIDDEN)
    return found


def config(qkv_bias: bool, bias: bool) -> dict:
    return {
        "model_type": "internlm3",
        "architectures": ["InternLM3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"},
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": WIDTH,
        "max_position_embeddings": POSITIONS,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPSILON,
        "hidden_act": "silu",
        "rope_theta": BASE,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
        "qkv_bias": qkv_bias,
        "bias": bias,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [b, heads, s, width]: channel i and channel i + width / 2 are a point of the plane, turned
    by the position times base^(-2 i / width)."""
    half = WIDTH // 2
    speeds = BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[2], dtype=torch.float64).outer(speeds)
    one, two = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - two * sin, one * sin + two * cos), -1)


def logits(w: Weights) -> torch.Tensor:
    """Of IDS."""

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    x = w["model.embed_tokens.weight"][IDS]
    s = IDS.shape[1]
    future = torch.ones(s, s, dtype=torch.bool).triu(1)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        y = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (
            project(y, f"{at}self_attn.{one}_proj").unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for one in "qkv"
        )
        k, v = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (rotate(k), v))
        scores = rotate(q) @ k.transpose(2, 3) / WIDTH**0.5
        y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + project(y.transpose(1, 2).flatten(2), at + "self_attn.o_proj")
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        y = silu(project(y, at + "mlp.gate_proj")) * project(y, at + "mlp.up_proj")
        x = x + project(y, at + "mlp.down_proj")
    return linear(norm(x, w["model.norm.weight"]), w["lm_head.weight"])


def write(folder: Path, weights: Weights, table: dict) -> None:
    folder.mkdir()
    entries = [
        Entry(name, torch.float32, tuple(value.shape), lambda value=value: value)
        for name, value in weights.items()
    ]
    write_file(folder / "model.safetensors", entries)
    (folder / "config.json").write_text(json.dumps(table))


def same_tensors(folder: Path, weights: Weights) -> None:
    with SafetensorsFile(folder / "model.safetensors") as file:
        assert file.locations.keys() == weights.keys()
        assert all(torch.equal(file.read(name), value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("qkv_bias", "bias"), [(False, False), (True, True), (True, False), (False, True)]
)
def test_internlm3_is_its_formulas(qkv_bias, bias, tmp_path):
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: 0.1 * torch.randn(shape, generator=generator) + float("norm" in name)
        for name, shape in shapes(qkv_bias, bias).items()
    }
    table = config(qkv_bias, bias)
    write(tmp_path / "hf", weights, table)
    hf_import(tmp_path / "hf", tmp_path / "ours", tokenizer=False)
    trained = open_trained_model(str(tmp_path / "ours"), device="cpu")
    model = trained.model.requires_grad_(True)

    exact = {name: value.double().requires_grad_() for name, value in weights.items()}
    expected = logits(exact)
    torch.testing.assert_close(model(IDS).double(), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.3

    labels = IDS.roll(1, 1)
    model(IDS, labels=labels).mean().backward()
    cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    for link in links_of(trained.config.model, VOCAB, FAMILIES["internlm3"].names):
        parts = link.split(ours.pop(link.native_name)[: link.shape[0]])
        for name, part in zip(link.foreign_names, parts, strict=True):
            wanted = exact.pop(name).grad
            assert (part - wanted).abs().max() < 1e-4 * wanted.abs().max().clamp(min=1e-6)
    assert not ours and not exact

    hf_export(tmp_path / "ours", tmp_path / "back", shard_bytes=1 << 30)
    same_tensors(tmp_path / "back", weights)
    assert json.loads((tmp_path / "back/config.json").read_text()) == table
    rewrite_on_ranks(tmp_path / "ours", tmp_path / "ranks", tp=2, pp=2)
    with torch.no_grad():
        torch.testing.assert_close(
            open_trained_model(str(tmp_path / "ranks"), device="cpu").model(IDS).double(),
            expected.detach(),
            rtol=0,
            atol=1e-5,
        )
    hf_export(tmp_path / "ranks", tmp_path / "new", family="internlm3", shard_bytes=1 << 30)
    same_tensors(tmp_path / "new", weights)
    written = json.loads((tmp_path / "new/config.json").read_text())
    assert (written["qkv_bias"], written["bias"], written["head_dim"]) == (qkv_bias, bias, WIDTH)
