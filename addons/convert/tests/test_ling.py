"""Ling 2 (bailing_moe_v2), whose code is not in transformers, against the formulas of its published code
in plain torch (float64)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, silu

from megatron.addons.convert.config_keys import Keys
from megatron.addons.convert.families import FAMILIES, read_config
from megatron.addons.convert.huggingface import hf_export, hf_import
from megatron.addons.convert.links import ConversionError, links_of
from megatron.addons.convert.tests.hf_models import IDS, POSITIONS, VOCAB, rewrite_on_ranks
from megatron.checkpoint.safetensors_file import Entry, write_file
from megatron.checkpoint.safetensors_reader import SafetensorsFile
from megatron.inference.load_model import open_trained_model

Weights = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {
    "model_type": "bailing_moe_v2",
    "architectures": ["BailingMoeV2ForCausalLM"],
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": POSITIONS,
    "max_window_layers": 4,
    "moe_intermediate_size": 40,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "vocab_size": VOCAB,
}
CORNERS: list[dict[str, Any]] = [
    {},
    {"model_type": "bailing_moe"},
    {"n_group": 1, "topk_group": 1},
    {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    {"num_experts_per_tok": 1, "routed_scaling_factor": 0.5},
    {"num_experts_per_tok": 8, "n_group": 2},
    {"num_shared_experts": 2, "moe_shared_expert_intermediate_size": 80},
    {"num_shared_experts": None, "moe_shared_expert_intermediate_size": None},
    {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
    {"first_k_dense_replace": 3, "use_qk_norm": False},
    {"use_qkv_bias": True, "use_bias": True},
    {"num_key_value_heads": 1, "head_dim": 16, "rope_theta": 500},
    {"num_key_value_heads": 4, "tie_word_embeddings": True},
]


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors."""
    hidden, d, heads = c["hidden_size"], c["head_dim"], c["num_attention_heads"]
    found: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (VOCAB, hidden)}

    def mlp(at: str, width: int) -> None:
        found[f"{at}.gate_proj.weight"] = found[f"{at}.up_proj.weight"] = (width, hidden)
        found[f"{at}.down_proj.weight"] = (hidden, width)

    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = (hidden,)
        rows = (heads + 2 * c["num_key_value_heads"]) * d
        found[at + "attention.query_key_value.weight"] = (rows, hidden)
        found[at + "attention.dense.weight"] = (hidden, heads * d)
        if c["use_qkv_bias"]:
            found[at + "attention.query_key_value.bias"] = (rows,)
        if c["use_bias"]:
            found[at + "attention.dense.bias"] = (hidden,)
        if c["use_qk_norm"]:
            found[at + "attention.query_layernorm.weight"] = (d,)
            found[at + "attention.key_layernorm.weight"] = (d,)
        if layer < c["first_k_dense_replace"]:
            mlp(at + "mlp", c["intermediate_size"])
            continue
        found[at + "mlp.gate.weight"] = (c["num_experts"], hidden)
        found[at + "mlp.gate.expert_bias"] = (c["num_experts"],)
        for expert in range(c["num_experts"]):
            mlp(f"{at}mlp.experts.{expert}", c["moe_intermediate_size"])
        if c["num_shared_experts"]:
            width = c["moe_intermediate_size"] * c["num_shared_experts"]
            mlp(at + "mlp.shared_experts", width)
    found["model.norm.weight"] = (hidden,)
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (VOCAB, hidden)
    return found


def rotate(x: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    """x [b, heads, s, d]: of its first channels i and i + half are a point of the plane."""
    rotated = int(c["head_dim"] * c["partial_rotary_factor"])
    half = rotated // 2
    speeds = c["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[2], dtype=torch.float64).outer(speeds)
    one, two = x[..., :half], x[..., half:rotated]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - two * sin, one * sin + two * cos, x[..., rotated:]), -1)


def logits(w: Weights, c: dict[str, Any]) -> torch.Tensor:
    """Of IDS."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt()
        return x / scale * w[name + ".weight"]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def mlp(x: torch.Tensor, at: str) -> torch.Tensor:
        gated = silu(project(x, at + ".gate_proj")) * project(x, at + ".up_proj")
        return project(gated, at + ".down_proj")

    def selected(scores: torch.Tensor) -> list[int]:
        """Of one token: the best experts of the groups whose two best scores have the largest
        sums."""
        size = len(scores) // c["n_group"]
        groups = scores.tolist()
        groups = [groups[i : i + size] for i in range(0, len(groups), size)]
        sums = [sum(sorted(group)[-2:]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -sums[g])[: c["topk_group"]]
        experts = [g * size + i for g in best for i in range(size)]
        return sorted(experts, key=lambda e: -scores[e].item())[: c["num_experts_per_tok"]]

    def experts(x: torch.Tensor, at: str) -> torch.Tensor:
        results = []
        for token in x.flatten(0, 1):
            scores = linear(token, w[at + "gate.weight"]).sigmoid()
            chosen = selected(scores + w[at + "gate.expert_bias"])
            total = sum(scores[e] for e in chosen) if len(chosen) > 1 else 1.0
            parts = (scores[e] / total * mlp(token, f"{at}experts.{e}") for e in chosen)
            results.append(c["routed_scaling_factor"] * sum(parts))
        y = torch.stack(results).view(x.shape)
        return y + mlp(x, at + "shared_experts") if c["num_shared_experts"] else y

    d, n, g = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    x = w["model.word_embeddings.weight"][IDS]
    future = torch.ones(IDS.shape[1], IDS.shape[1], dtype=torch.bool).triu(1)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        qkv = project(norm(x, at + "input_layernorm"), at + "attention.query_key_value")
        q, k, v = (
            part.unflatten(-1, (-1, d)).transpose(1, 2)
            for part in qkv.split([n * d, g * d, g * d], -1)
        )
        if c["use_qk_norm"]:
            q = norm(q, at + "attention.query_layernorm")
            k = norm(k, at + "attention.key_layernorm")
        k, v = (part.repeat_interleave(n // g, 1) for part in (rotate(k, c), v))
        scores = rotate(q, c) @ k.transpose(2, 3) / d**0.5
        y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + project(y.transpose(1, 2).flatten(2), at + "attention.dense")
        y = norm(x, at + "post_attention_layernorm")
        dense = layer < c["first_k_dense_replace"]
        x = x + (mlp(y, at + "mlp") if dense else experts(y, at + "mlp."))
    head = "model.word_embeddings" if c["tie_word_embeddings"] else "lm_head"
    return linear(norm(x, "model.norm"), w[head + ".weight"])


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n == 0 else pytest.mark.sweep) for n in range(len(CORNERS))],
)
def test_ling_2_is_its_formulas(number, tmp_path):
    c = CONFIG | CORNERS[number]
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: 0.1 * torch.randn(shape, generator=generator) + float("norm" in name)
        for name, shape in shapes(c).items()
    }
    (tmp_path / "hf").mkdir()
    entries = [
        Entry(name, torch.float32, tuple(value.shape), lambda value=value: value)
        for name, value in weights.items()
    ]
    write_file(tmp_path / "hf/model.safetensors", entries)
    (tmp_path / "hf/config.json").write_text(json.dumps(c))
    hf_import(tmp_path / "hf", tmp_path / "ours", tokenizer=False)
    trained = open_trained_model(str(tmp_path / "ours"), device="cpu")
    model = trained.model.requires_grad_(True)
    labels = IDS.roll(1, 1)

    exact = {name: value.double().requires_grad_(True) for name, value in weights.items()}
    expected = logits(exact, c)
    assert expected.std() > 0.3
    assert (model(IDS) - expected).abs().max() < 5e-6
    cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    model(IDS, labels=labels).mean().backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    worst = 0.0
    for link in links_of(trained.config.model, VOCAB, FAMILIES[c["model_type"]].names):
        grad = ours.pop(link.native_name)
        if grad is None:
            assert link.native_name.endswith("expert_bias")
            continue
        parts = link.split(grad[: link.shape[0]])
        for name, found in zip(link.foreign_names, parts, strict=True):
            own = exact[name].grad
            own = torch.zeros_like(exact[name]) if own is None else own
            worst = max(worst, ((found - own).abs().max() / own.abs().max().clamp(1e-6)).item())
    assert not ours and worst < 3e-5
    hf_export(tmp_path / "ours", tmp_path / "back", shard_bytes=10**9)
    same_tensors(tmp_path / "back", weights)
    if number == 0:
        rewrite_on_ranks(tmp_path / "ours", tmp_path / "ranks", tp=2, pp=2)
        ranks = open_trained_model(str(tmp_path / "ranks"), device="cpu").model
        assert (ranks(IDS) - expected).abs().max() < 5e-6
        folder = tmp_path / "from_ranks"
        hf_export(tmp_path / "ranks", folder, family="bailing_moe_v2", shard_bytes=10**9)
        same_tensors(folder, weights)


def same_tensors(folder, weights: Weights) -> None:
    with SafetensorsFile(folder / "model.safetensors") as file:
        assert file.locations.keys() == weights.keys()
        assert all(torch.equal(file.read(name), value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["BailingMoeForCausalLM"]),  # Ling 1
        ("score_function", "softmax"),
        ("norm_topk_prob", False),
        ("moe_router_enable_expert_bias", False),
        ("moe_shared_expert_intermediate_size", 48),
        ("use_sliding_window", True),
        ("n_group", 3),
        ("layer_group_size", 5),  # of Ling 2.5, whose other layers have linear attention
        ("kv_lora_rank", 512),
    ],
)
def test_what_is_another_model_is_refused_by_name(key, value):
    with pytest.raises(ConversionError, match=key):
        read_config(Keys(CONFIG | {key: value}, "config.json"))
