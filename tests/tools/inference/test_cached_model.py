"""Logits with a cache of keys and values against those of the whole text, over the options of the
model, lengths, and tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.inference.cached_model import CachedModel
from megatron.parallel.context import ParallelContext
from tests.core.model.tiny import MODELS, VOCAB, tiny_model
from tests.forkrun import run_ranks

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
    "xielu": {**MODELS["llama"], "swiglu": False, "xielu": True},
    "parallel residual": {**ROPE, "rotary_percent": 0.5, "use_parallel_residual": True},
}
TEXT = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(3)).tolist()


def differences(flags: dict, dtype: torch.dtype, ctx: ParallelContext | None = None) -> float:
    """The largest difference of logits, in parts of their size: a prompt read in two parts next to
    a longer one, then token by token."""
    whole = tiny_model(dtype, scramble=True, ctx=ctx, **flags)
    with torch.no_grad():
        expected = whole(torch.tensor([TEXT]))[0]
        other = whole(torch.tensor([TEXT[::-1]]))[0]
    cached = CachedModel(tiny_model(dtype, scramble=True, ctx=ctx, **flags), 3, 16)
    worst = 0.0

    def compare(logits: torch.Tensor, right: torch.Tensor) -> None:
        nonlocal worst
        worst = max(worst, float((logits - right).abs().max() / expected.abs().max()))

    compare(cached.forward([TEXT[:3], TEXT[:2:-1]], [0, 0])[0], expected[2])
    cached.forward([TEXT[3:5]], [3])
    compare(cached.forward([TEXT[:8]], [0], 2)[0], expected[7])  # a row of its own
    compare(cached.forward([TEXT[5:8], TEXT[2:1:-1]], [5, 11])[0], expected[7])
    compare(cached.forward([[TEXT[8]], [TEXT[1]], [TEXT[8]]], [8, 12, 8])[2], expected[8])
    for i in range(9, 14):
        logits = cached.forward([[TEXT[i]], [TEXT[0]], [TEXT[i]]], [i, 13, i])
        compare(logits[0], expected[i])
        compare(logits[1], other[13])
        compare(logits[2], expected[i])
    cached.move(2, 1, 14)
    logits = cached.forward([[5], [5]], [14, 14])
    compare(logits[0], logits[1])
    return worst


@pytest.mark.parametrize("flags", OPTIONS.values(), ids=OPTIONS)
def test_logits_are_those_of_the_whole_text(flags):
    assert differences(flags, torch.float64) < 1e-13


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_logits_in_fp32(flags):
    assert differences(flags, torch.float32) < 1e-6


def _on_two_ranks(rank: int, world: int) -> float:
    ctx = ParallelContext(ParallelConfig(tensor_model_parallel_size=world), world, rank)
    return max(differences(flags, torch.float64, ctx) for flags in (*MODELS.values(), MOE))


def test_logits_of_tensor_parallel_ranks():
    assert max(run_ranks(2, _on_two_ranks)) < 1e-13


def test_no_more_than_the_window_is_kept():
    flags = {"window_size": (3, 0), "window_attn_skip_freq": "[1,0,1]"}
    cached = CachedModel(tiny_model(**MODELS["llama"], **flags), 2, 16)
    cached.forward([TEXT, TEXT[:4]], [0, 0])
    layers = cached.model.decoder.layers.values()
    kept = [layer.self_attention.cache._tensors["keys"].shape[:2] for layer in layers]
    assert kept == [(2, 4), (2, 16), (2, 4)]


def test_logits_are_computed_of_the_last_position_only():
    cached = CachedModel(tiny_model(), 2, 16)
    shapes = []
    cached.model.output_layer.register_forward_hook(lambda *parts: shapes.append(parts[2].shape))
    assert cached.forward([TEXT, TEXT[:4]], [0, 0]).shape == (2, VOCAB)
    assert shapes == [(1, 2, 64)]


def test_memory_that_was_not_written_yet_is_not_seen():
    """A batch of unequal lengths masks positions that no token has filled."""
    cached = CachedModel(tiny_model(), 2, 16)
    cached.forward([TEXT, TEXT[:2]], [0, 0])
    expected = cached.forward([[1], [1]], [14, 2])
    for _ in range(20):
        garbage = [torch.full((3, 2, 16, 4, 8), float("nan")) for _ in range(4)]
        del garbage
        other = CachedModel(tiny_model(), 2, 16)
        other.forward([TEXT], [0])
        other.forward([TEXT[:2]], [0], 1)
        assert torch.allclose(other.forward([[1], [1]], [14, 2]), expected, atol=1e-5)
