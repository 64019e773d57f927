#!/usr/bin/env python
"""Seconds of a training step with experts, next to transformers' Qwen3-MoE in a bare loop:
tools/benchmarks/moe.py [--small].

64 experts of which a token selects 8, about 30 million parameters that compute a token, on the CPU
in fp32, with as many threads as OMP_NUM_THREADS gives. Our side is the whole iteration of
pretrain_gpt.py, the other one forward, backward, clipping and torch's fused AdamW, with each of
transformers' ways to compute experts. The sides take turns, one step each; the medians and their
ratios are printed, and the share that the step's GEMMs, run by themselves, have of ours. Needs
transformers, except with --no-transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/benchmarks/step")]

import torch
from bare_loop import BareLoop
from contestants import Ours
from sizes import Size

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
IMPLEMENTATIONS = ("eager", "grouped_mm")
SIZE = Size("moe", 8, 384, 6, 256, 4, 8192, "llama", 192)
SMALL = Size("small", 2, 64, 2, 32, 2, 256, "llama", 32)


def flags(size: Size, experts: int, topk: int) -> list[str]:
    """The flags that make a Llama of this size one with experts and normed queries and keys."""
    return (
        f"--num-experts {experts} --moe-router-topk {topk} --moe-ffn-hidden-size {size.ffn_size} "
        "--qk-layernorm --moe-aux-loss-coeff 0.001"
    ).split()


def qwen3(size: Size, experts: int, topk: int, implementation: str) -> torch.nn.Module:
    """transformers' model of the same shapes."""
    import transformers

    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.ffn_size,
            moe_intermediate_size=size.ffn_size,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            head_dim=size.hidden // size.heads,
            max_position_embeddings=size.seq,
            rope_parameters=ROPE,
            num_experts=experts,
            num_experts_per_tok=topk,
            norm_topk_prob=True,
            output_router_logits=True,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            experts_implementation=implementation,
        )
    )


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Language-model loss plus the balancing loss with its coefficient."""
    return model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss


def samples(size: Size) -> list[torch.Tensor]:
    """Four micro-batches of random tokens."""
    shape = (4, size.micro_batch, size.seq + 1)
    return list(torch.randint(size.vocab, shape, generator=torch.Generator().manual_seed(2)))


def gemm_seconds(size: Size, experts: int, topk: int) -> float:
    """Seconds of the GEMMs of a step by themselves, forward and both gradients, with equal loads of
    the experts."""
    rows = size.seq * size.micro_batch
    h = size.hidden
    each = rows * topk // experts
    shapes = [
        (size.layers, rows, h, 3 * h),
        (size.layers, rows, h, h),
        (size.layers, rows, h, experts),
        (size.layers * experts, each, h, 2 * size.ffn_size),
        (size.layers * experts, each, size.ffn_size, h),
        (1, rows, h, size.vocab),
    ]
    total = 0.0
    for number, n, inputs, outputs in shapes:
        x, grad = torch.randn(n, inputs), torch.randn(n, outputs)
        weights = torch.randn(min(number, 64), outputs, inputs)  # not all in the cache
        for _ in range(2):
            start = time.perf_counter()
            for weight in weights:
                torch.mm(x, weight.t())
                torch.mm(grad, weight)
                torch.mm(grad.t(), x)
            seconds = time.perf_counter() - start
        total += seconds * number / len(weights)
    return total


def race(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each side, after two to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        for name, step in sides.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each side")
    parser.add_argument("--small", action="store_true", help="a tiny model, to test this program")
    parser.add_argument("--no-transformers", action="store_true", help="our side alone")
    args = parser.parse_args()
    size, experts, topk = (SMALL, 8, 2) if args.small else (SIZE, 64, 8)
    ours = Ours(size, "fp32", "cpu", flags(size, experts, topk))
    sides = {"ours": ours.step}
    for name in () if args.no_transformers else IMPLEMENTATIONS:
        torch.manual_seed(1)
        model = qwen3(size, experts, topk, name)
        loop = BareLoop(model, loss_of, size, "fp32", torch.device("cpu"), samples(size))
        sides[f"transformers, {name}"] = loop.step
    whole = sum(p.numel() for p in ours.parameters())
    idle = (experts - topk) * 3 * size.hidden * size.ffn_size * size.layers
    print(
        f"{whole / 1e6:.1f} million parameters, {(whole - idle) / 1e6:.1f} active; {experts} "
        f"experts, top {topk}; {size.seq * size.micro_batch} tokens per step; "
        f"{torch.get_num_threads()} threads"
    )
    found = race(sides, args.rounds)
    for name, seconds in found.items():
        ratio = "" if name == "ours" else f"  {seconds / found['ours']:.2f} x ours"
        print(f"{name:26} {1000 * seconds:9.1f} ms{ratio}")
    gemms = gemm_seconds(size, experts, topk)
    share = gemms / found["ours"]
    print(f"{'GEMMs by themselves':26} {1000 * gemms:9.1f} ms  {share:.0%} of our step")


if __name__ == "__main__":
    main()
