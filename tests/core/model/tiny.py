"""Small models for the tests, built from flags as the command line would name them."""

from typing import Any

import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.plan.parameters import Chunk, parameter_table
from megatron.config.precision import PrecisionConfig
from megatron.kernels.kernels import Kernels
from megatron.model.blocks.module import Recompute
from megatron.model.gpt import GPTModel
from megatron.parallel.context import ParallelContext
from megatron.parallel.random import DropoutSeeds
from megatron.parallel.sharding import init_parameters

VOCAB = 61
PADDED = 64
DEFAULTS = dict(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    max_position_embeddings=16,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
SEEDS = DropoutSeeds(1234, 1, 0)
MODELS = {
    "gpt": {},
    "llama": {
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 2,
    },
    "gated with biases": {"geglu": True, "apply_layernorm_1p": True, "qk_layernorm": True},
}
MOE = {
    **MODELS["llama"],
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 16,
}
ROPE = {"position_embedding_type": "rope"}
OPTIONS = {
    **MODELS,
    "half rotary, interleaved": {**ROPE, "rotary_percent": 0.5, "rotary_interleaved": True},
    "interpolated rotary": {**ROPE, "rotary_seq_len_interpolation_factor": 2},
    "one key head, wide heads": {
        **ROPE,
        "group_query_attention": True,
        "num_query_groups": 1,
        "kv_channels": 16,
    },
    "no positions": {"position_embedding_type": "none"},
    "query and key norms": {**ROPE, "qk_layernorm": True, "normalization": "RMSNorm"},
    "norms of rotated queries and keys": {
        **MODELS["llama"],
        "qk_layernorm": True,
        "qk_layernorm_after_rope": True,
        "rotary_ntk_alpha": 5.0,
    },
    "untied, residual after norm": {
        "untie_embeddings_and_output_weights": True,
        "apply_residual_connection_post_layernorm": True,
    },
    "squared relu": {"squared_relu": True},
    "experts": MOE,
    "post-norms, factors, layers without rotary": {
        **MODELS["llama"],
        "no_rope_freq": "2",
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "softmax_scale": 0.4,
        "logits_scaling": 2.0,
    },
    "norms of OLMo 2": {
        **MODELS["llama"],
        "no_pre_layernorm": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
    },
    "windows in two of three layers": {
        **MODELS["llama"],
        "num_layers": 3,
        "window_size": (3, 0),
        "window_attn_skip_freq": "[1,0,1]",
        "window_rotary_base": 500,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "windows of one token": {**MODELS["llama"], "window_size": (0, 0)},
    "a window of all but one token": {**MODELS["llama"], "window_size": (12, 0)},
    "sinks and caps, windows in two of three layers": {
        **MODELS["llama"],
        "window_size": (3, 0),
        "window_attn_skip_freq": "[1,0,1]",
        "softmax_type": "learnable",
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.5,
    },
    "a score of 0 in each denominator": {"softmax_type": "off-by-one"},
    "capped scores": {**MODELS["llama"], "attn_logit_softcapping": 0.2},
    "output gates, a pattern of blocks": {
        **MODELS["llama"],
        "attention_output_gate": True,
        "hybrid_layer_pattern": "*-*",
    },
    "xielu": {**MODELS["llama"], "swiglu": False, "xielu": True},
    "parallel residual": {**ROPE, "rotary_percent": 0.5, "use_parallel_residual": True},
}


def tiny_config(**flags: Any) -> ModelConfig:
    """A 3-layer model of width 32; `flags` are fields of ModelConfig."""
    return ModelConfig(**{**DEFAULTS, **flags})


def tiny_model(
    dtype: torch.dtype = torch.float32,
    *,
    recompute: Recompute | None = None,
    seed: int = 1234,
    ctx: ParallelContext | None = None,
    vocab: int = VOCAB,
    padded: int = PADDED,
    precision: PrecisionConfig | None = None,
    kernels: Kernels | None = None,
    scramble: bool = False,
    layers: range | None = None,
    **flags: Any,
) -> GPTModel:
    """The model (its part with `layers`), filled; `scramble` moves norms and biases off their first
    values 1 and 0."""
    ctx = ctx or ParallelContext(ParallelConfig())
    config = tiny_config(**flags)
    layers = layers or range(config.num_layers)
    model = GPTModel(
        config,
        precision or PrecisionConfig(),
        ctx,
        parameter_table(config, padded, vocab),
        vocab,
        dtype,
        chunk=Chunk(layers, layers.start == 0, *[layers.stop == config.num_layers] * 2),
        recompute=recompute or Recompute(),
        kernels=kernels or Kernels(),
    )
    init_parameters(model.parameters(), ctx, seed)
    if scramble:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape, generator=generator).to(dtype)
    return model


def tokens(
    batch: int = 2, length: int = 16, vocab: int = VOCAB
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (tokens, labels), each [batch, length]."""
    ids = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:]


def loss_and_grads(model: GPTModel, **forward: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Per-token losses and the gradients of their mean by parameter name."""
    ids, labels = tokens()
    model.zero_grad()
    losses = model(ids, labels=labels, **forward)
    losses.mean().backward()
    return losses.detach(), {p.sharding.name: p.grad.clone() for p in model.parameters()}
