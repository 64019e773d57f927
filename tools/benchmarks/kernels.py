#!/usr/bin/env python
"""Race our kernels for CPUs against torch's own operations: forward and backward, in turns, in one
process.

A row says how many times as fast as torch's is ours (the median over rounds), and which of the two
a run takes here. Before any clock runs the two must agree. `--step DTYPE` times whole training
steps instead: without dropout and document masks, and with each. docs/benchmarks.md has figures.
Needs torch and numpy only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2]),
    str(Path(__file__).resolve().parent / "step"),
]

from megatron import threads  # noqa: E402

threads.set_waiting()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from contestants import Ours  # noqa: E402
from sizes import Size  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron.kernels import functional as kernels  # noqa: E402
from megatron.kernels.attention import select_attention  # noqa: E402
from megatron.kernels.cpu import bf16_attention, fp32_attention  # noqa: E402

Kernel = Callable[..., Tensor]
TOKENS = 4096
HIDDEN = 512
FFN = 1376
HEAD = 64
# mock data then has documents of 256 tokens
STEP = Size("step", 2, 256, 4, seq=2048, micro_batch=1, vocab=256)
STEPS = {
    "no dropout, causal": [],
    "attention dropout 0.1": ["--attention-dropout", "0.1"],
    "attention and hidden dropout 0.1": ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"],
    "document masks": ["--reset-attention-mask"],
}


def torch_swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, operation by operation."""
    gate, up = gate_up.unbind(-2)
    return F.silu(gate) * up


def torch_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of the pairs (i, i + half), operation by operation."""
    first, second = x.chunk(2, -1)
    cos = cos[:, None, None]
    sin = sin[:, None, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def races(
    sequences: list[int], tokens: int
) -> list[tuple[str, Kernel, Kernel, tuple[Tensor, ...], str]]:
    """(name, ours, torch's, inputs, which one runs here) of every race, `tokens` tokens each."""
    rows: list[tuple[str, Kernel, Kernel, tuple[Tensor, ...], str]] = []
    theirs = partial(kernels.attention, scale=HEAD**-0.5, implementation="sdpa")
    for s in sequences:
        qkv = tuple(torch.randn(s, max(1, tokens // s), HIDDEN // HEAD, HEAD) for _ in range(3))
        chosen, *_ = select_attention(torch.device("cpu"), torch.float32, 0.0, False, seq_length=s)
        way = (
            "cpp_fp32"
            if fp32_attention.unavailable_reason(torch.device("cpu"), torch.float32, HEAD, s)
            is None
            else "chunked"
        )
        ours = partial(kernels.attention, scale=HEAD**-0.5, implementation=way)
        rows.append(
            (f"attention, sequence {s}", ours, theirs, qkv, "torch" if chosen == "sdpa" else "ours")
        )
    cpu = torch.device("cpu")
    for s in sequences:
        if bf16_attention.unavailable_reason(cpu, torch.bfloat16, HEAD, s) is None:
            shape = (s, max(1, tokens // s), HIDDEN // HEAD, HEAD)
            qkv = tuple(torch.randn(shape, dtype=torch.bfloat16) for _ in range(3))
            ours = partial(kernels.attention, scale=HEAD**-0.5, implementation="cpp_bf16")
            rows.append((f"bf16 attention, sequence {s}", ours, theirs, qkv, "ours"))
    x = torch.randn(tokens, 1, HIDDEN)
    s = tokens
    cos, sin = kernels.rotary_tables(s, HEAD)
    return [
        *rows,
        (
            "tanh GELU",
            lambda x: kernels.gelu(x, True),
            lambda x: F.gelu(x, approximate="tanh"),
            (torch.randn(tokens, 1, FFN),),
            "ours",
        ),
        (
            "RMSNorm",
            lambda x, w: kernels.rms_norm(x, w, 1e-5),
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
            (x, torch.rand(HIDDEN)),
            "ours",
        ),
        ("swiglu", kernels.swiglu, torch_swiglu, (torch.randn(tokens, 1, 2, FFN),), "ours"),
        (
            "rotary",
            lambda x: kernels.apply_rotary(x, cos, sin),
            lambda x: torch_rotary(x, cos, sin),
            (torch.randn(s, 1, HIDDEN // HEAD, HEAD),),
            "ours",
        ),
    ]


def both_ways(kernel: Kernel, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of all inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = kernel(*leaves)
    return out, *torch.autograd.grad(out, leaves, grad)


def race_steps(dtype: str, tokens: int, rounds: int) -> None:
    """Print the time of a training step without dropout and document masks and of one with each, in
    turns."""
    size = replace(STEP, micro_batch=max(1, tokens // STEP.seq))
    runs = {name: Ours(size, dtype, "cpu", flags) for name, flags in STEPS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):  # two to warm up
        for name, run in runs.items():
            start = time.perf_counter()
            run.step()
            if i >= 2:
                seconds[name].append(time.perf_counter() - start)
    print(
        f"training step, {dtype}: {size.layers} layers of {size.hidden}, {size.heads} heads, "
        f"{size.micro_batch} x {size.seq} tokens"
    )
    print(f"{'':34}{'ms':>8}{'x first':>9}")
    first, *_ = seconds.values()
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, first, strict=True))
        print(f"{name:34}{1e3 * statistics.median(times):8.1f}{ratio:9.2f}")


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each (default: 15)")
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=[128, 256, 512, 1024, 2048],
        metavar="S",
        help="lengths of the attention races",
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help=f"of every race (default: {TOKENS})"
    )
    parser.add_argument(
        "--step",
        choices=("fp32", "bf16"),
        help="time training steps of this dtype instead: 2 layers of "
        f"256, sequence {STEP.seq}, without and with dropout and document masks",
    )
    options = parser.parse_args(argv)
    if min(options.rounds, options.tokens, *options.sequences) < 1:
        parser.error("--rounds, --tokens and --sequences must be at least 1")
    torch.manual_seed(1)
    what = "training steps" if options.step else "fp32 unless it says bf16, forward + backward"
    print(
        f"date {time.strftime('%Y-%m-%d %H:%M')}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.2f}, "
        f"{threads.waiting()}; {what}"
    )
    if options.step:
        race_steps(options.step, options.tokens, options.rounds)
        return 0
    print(f"{'':30}{'ours ms':>9}{'torch ms':>10}{'x torch':>9}  here runs")
    for name, ours, theirs, inputs, chosen in races(options.sequences, options.tokens):
        grad = torch.randn_like(ours(*inputs))
        for a, b in zip(
            both_ways(ours, inputs, grad), both_ways(theirs, inputs, grad), strict=True
        ):
            near = 1e-3 if a.dtype == torch.float32 else 3e-2
            torch.testing.assert_close(a, b, rtol=near, atol=near)
        seconds: dict[Kernel, list[float]] = {ours: [], theirs: []}
        for _ in range(options.rounds):
            for kernel, times in seconds.items():
                start = time.perf_counter()
                both_ways(kernel, inputs, grad)
                times.append(time.perf_counter() - start)
        mine, other = (1e3 * statistics.median(times) for times in seconds.values())
        ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
        print(f"{name:30}{mine:9.1f}{other:10.1f}{ratio:9.2f}  {chosen}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
