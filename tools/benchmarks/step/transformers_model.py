"""transformers' GPT2LMHeadModel and LlamaForCausalLM for the bare loop, with the weights of a
BareModel."""

from __future__ import annotations

import torch
import transformers
from bare_loop import LossOf
from bare_model import megatron_to_bare
from sizes import Size
from torch import Tensor, nn

GPT_NAMES = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "qkv": "attn.c_attn",
    "proj": "attn.c_proj",
    "fc1": "mlp.c_fc",
    "fc2": "mlp.c_proj",
}
LLAMA_NAMES = {
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "proj": ("self_attn.o_proj",),
    "fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "fc2": ("mlp.down_proj",),
}


def build(size: Size, weights: dict[str, Tensor]) -> tuple[nn.Module, LossOf]:
    """transformers' model of this size with our weights (by Megatron's names), as fast as its
    options make it; and its loss."""
    model = _gpt(size) if size.family == "gpt" else _llama(size)
    model.load_state_dict(bare_to_transformers(megatron_to_bare(weights, size.heads), size))
    return model, _loss_of


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


def _gpt(size: Size) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=size.vocab,
            n_positions=size.seq,
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            n_inner=size.ffn_size,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
        )
    )


def _llama(size: Size) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.ffn_size,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=size.seq,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
        )
    )


def bare_to_transformers(state: dict[str, Tensor], size: Size) -> dict[str, Tensor]:
    """State of transformers' model from that of a BareModel."""
    gpt = size.family == "gpt"
    tops = {
        "words.weight": "transformer.wte.weight" if gpt else "model.embed_tokens.weight",
        "positions.weight": "transformer.wpe.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "transformer.ln_f.weight" if gpt else "model.norm.weight",
        "norm.bias": "transformer.ln_f.bias",
    }
    converted = {}
    for name, value in state.items():
        if name in tops:
            converted[tops[name]] = value
            continue
        _, layer, module, kind = name.split(".")
        if gpt:
            # transformers' GPT-2 keeps the matrices of its linear layers transposed
            matrix = value.dim() == 2
            converted[f"transformer.h.{layer}.{GPT_NAMES[module]}.{kind}"] = (
                value.t() if matrix else value
            )
        else:
            chunks = value.chunk(len(LLAMA_NAMES[module]))
            for target, chunk in zip(LLAMA_NAMES[module], chunks, strict=True):
                converted[f"model.layers.{layer}.{target}.{kind}"] = chunk
    return converted
