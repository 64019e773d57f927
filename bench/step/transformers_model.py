"""transformers' GPT2LMHeadModel, LlamaForCausalLM, MinistralForCausalLM (with windows) and
DeepseekV3ForCausalLM (without experts) for the bare loop, with our weights."""

from __future__ import annotations

import torch
import transformers
from bare import LossOf
from sizes import Size, command_line
from torch import Tensor, nn

from megatron.addons.convert.families import FAMILIES, config_for
from megatron.addons.convert.links import links_of
from megatron.config import command_line as megatron_command_line
from megatron.config.model import ModelConfig
from megatron.features.registry import RunConfig


def build(size: Size, weights: dict[str, Tensor]) -> tuple[nn.Module, LossOf]:
    """transformers' model of this size with our weights (by Megatron's names), as fast as its
    options make it; and its loss."""
    words = command_line(size, "fp32", "cpu")
    ours = megatron_command_line.read(words, {}, tree=RunConfig).config.model
    llama = "ministral" if size.window else "llama"
    names = {"gpt": "gpt2", "llama": llama, "deepseek": "deepseek_v3"}
    family = FAMILIES[names[size.family]]
    if size.family == "deepseek":
        config = _deepseek(size, ours)
    else:
        config = transformers.AutoConfig.for_model(**config_for(family, ours, size.vocab, {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    state: dict[str, Tensor] = {}
    for link in links_of(ours, size.vocab, family.names):
        state |= zip(link.foreign_names, link.split(weights[link.native_name]), strict=True)
    model.load_state_dict(state, strict=False)
    return model, _loss_of


def _deepseek(size: Size, ours: ModelConfig) -> transformers.DeepseekV3Config:
    """Without experts, which no export has."""
    return transformers.DeepseekV3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn_size,
        num_hidden_layers=size.layers,
        first_k_dense_replace=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        q_lora_rank=ours.q_lora_rank,
        kv_lora_rank=ours.kv_lora_rank,
        qk_nope_head_dim=ours.qk_head_dim,
        qk_rope_head_dim=ours.qk_pos_emb_head_dim,
        v_head_dim=ours.v_head_dim,
        max_position_embeddings=size.seq,
        rms_norm_eps=ours.norm_epsilon,
        pad_token_id=None,
    )


def _loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss


def build_olmoe(
    size: Size, device: torch.device, experts: int = 64, top_k: int = 8
) -> tuple[nn.Module, LossOf]:
    """Its mixture of experts of width `size.ffn_size` with random weights, all in bf16, by its
    grouped GEMMs; and its loss."""
    config = transformers.OlmoeConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_experts=experts,
        num_experts_per_tok=top_k,
        max_position_embeddings=size.seq,
        pad_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    with device:
        return transformers.OlmoeForCausalLM(config).to(torch.bfloat16), _loss_of
