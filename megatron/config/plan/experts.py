"""Activation memory of an MLP of experts, by formula: router, experts and shared expert."""

from __future__ import annotations

from typing import Protocol

from megatron.config.tree import Config

NUMBER = 8  # bytes of the number of a copy


class Sizes(Protocol):
    """Of `costs.Sizes`, what experts need."""

    config: Config
    tp: int
    etp: int
    tokens: int
    rows: int
    expert_tokens: int
    hidden: int
    itemsize: int
    wide: int
    native: bool

    @property
    def fuses_swiglu(self) -> bool: ...

    def width(self, ffn: int) -> int: ...

    def linear_backward(self, outputs: int, inputs: int) -> int: ...


def _copies(sizes: Sizes) -> int:
    """Tokens times their experts; with a capacity at most its share."""
    m = sizes.config.model
    share = min(1.0, m.moe_expert_capacity_factor or 1.0)
    # of all experts, as many tokens go to each rank
    return int(sizes.expert_tokens * m.moe_router_topk * share)


def _activation(sizes: Sizes) -> int:
    """Bytes of a copy of a token: the results of activation function and probability."""
    m = sizes.config.model
    width = m.expert_ffn // sizes.etp
    if "moe_act" in sizes.config.training.recomputed_modules:
        return sizes.itemsize * width * (2 if m.gated else 1)
    fused = m.activation == "swiglu" and sizes.native and sizes.fuses_swiglu
    return sizes.width(width) + sizes.itemsize * width * (not fused)


def saved_for_backward(sizes: Sizes) -> int:
    """Bytes kept for backward.

    Of experts: the copies of tokens that they compute (not where the C++ multiplies, in fp32 on
    a CPU), the activation function's and the probability's results, and the order of the copies; of
    the router: its logits and scores.
    """
    m = sizes.config.model
    copied = 0 if sizes.native and sizes.itemsize == 4 else sizes.hidden * sizes.itemsize
    nbytes = _copies(sizes) * (copied + _activation(sizes) + 3 * NUMBER)
    nbytes += sizes.rows * m.experts * 3 * sizes.wide
    modules = sizes.config.training.recomputed_modules
    if m.moe_shared_expert_intermediate_size and "shared_experts" not in modules:
        nbytes += sizes.tokens * sizes.width(m.moe_shared_expert_intermediate_size // sizes.tp)
    return nbytes


def backward(sizes: Sizes) -> int:
    """The most that backward holds in addition: gradients of the activation function, which the
    probabilities widen, or of the first matrix of an expert and of all its inputs."""
    m = sizes.config.model
    copies = _copies(sizes)
    width = m.expert_ffn // sizes.etp
    inner = width * (2 if m.gated else 1)
    matrix = sizes.linear_backward(inner, sizes.hidden) - sizes.linear_backward(0, sizes.hidden)
    gradients = copies * sizes.itemsize * (sizes.hidden + inner)
    return max(copies * width * 3 * sizes.wide, matrix + gradients - copies * _activation(sizes))
