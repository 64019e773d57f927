"""Our weights in transformers' GPT2LMHeadModel and LlamaForCausalLM, for tests that compare
logits."""

from __future__ import annotations

import torch

from megatron.config.model import ModelConfig


def split_qkv(
    rows: torch.Tensor, model: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows by query group (the group's queries, its key, its value) -> all queries, all keys, all
    values."""
    per_group = model.num_attention_heads // model.query_groups
    grouped = rows.unflatten(0, (model.query_groups, per_group + 2, model.head_dim))
    parts = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
    return tuple(part.reshape(-1, *rows.shape[1:]) for part in parts)


def gpt2_state(
    params: dict[str, torch.Tensor], model: ModelConfig, vocab: int
) -> dict[str, torch.Tensor]:
    """State dict of GPT2LMHeadModel, whose matrices are [in, out]."""
    words = params["embedding.word_embeddings.weight"][:vocab]
    state = {
        "transformer.wte.weight": words,
        "lm_head.weight": words,
        "transformer.wpe.weight": params["embedding.position_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = params[f"decoder.final_layernorm.{kind}"]
        for i in range(model.num_layers):
            ours = f"decoder.layers.{i}."
            theirs = f"transformer.h.{i}."
            state[f"{theirs}ln_1.{kind}"] = params[f"{ours}input_layernorm.{kind}"]
            state[f"{theirs}ln_2.{kind}"] = params[f"{ours}pre_mlp_layernorm.{kind}"]
            qkv = torch.cat(split_qkv(params[f"{ours}self_attention.linear_qkv.{kind}"], model))
            for name, value in (
                ("attn.c_attn", qkv),
                ("attn.c_proj", params[f"{ours}self_attention.linear_proj.{kind}"]),
                ("mlp.c_fc", params[f"{ours}mlp.linear_fc1.{kind}"]),
                ("mlp.c_proj", params[f"{ours}mlp.linear_fc2.{kind}"]),
            ):
                state[f"{theirs}{name}.{kind}"] = value.t() if kind == "weight" else value
    return state


def llama_state(
    params: dict[str, torch.Tensor], model: ModelConfig, vocab: int
) -> dict[str, torch.Tensor]:
    """State dict of LlamaForCausalLM; with attention or MLP biases where the model has them."""
    output = params.get("output_layer.weight", params["embedding.word_embeddings.weight"])
    state = {
        "model.embed_tokens.weight": params["embedding.word_embeddings.weight"][:vocab],
        "lm_head.weight": output[:vocab],
        "model.norm.weight": params["decoder.final_layernorm.weight"],
    }
    for name, value in params.items():
        if not name.startswith("decoder.layers."):
            continue
        _, _, i, *middle, kind = name.split(".")
        theirs = f"model.layers.{i}."
        match middle:
            case ["input_layernorm"]:
                state[f"{theirs}input_layernorm.{kind}"] = value
            case ["pre_mlp_layernorm"]:
                state[f"{theirs}post_attention_layernorm.{kind}"] = value
            case ["self_attention", "linear_qkv"]:
                for letter, part in zip("qkv", split_qkv(value, model), strict=True):
                    state[f"{theirs}self_attn.{letter}_proj.{kind}"] = part
            case ["self_attention", "linear_proj"]:
                state[f"{theirs}self_attn.o_proj.{kind}"] = value
            case ["mlp", "linear_fc1"]:
                state[f"{theirs}mlp.gate_proj.{kind}"], state[f"{theirs}mlp.up_proj.{kind}"] = value
            case ["mlp", "linear_fc2"]:
                state[f"{theirs}mlp.down_proj.{kind}"] = value
            case _:
                raise AssertionError(f"no place for {name}")
    return state
