#!/usr/bin/env python
"""Seconds of a training step with experts, next to transformers' Qwen3-MoE in a bare loop:
tools/benchmarks/moe.py [--small].

64 experts of which a token selects 8, about 30 million parameters that compute a token, on the CPU
in fp32, with as many threads as OMP_NUM_THREADS gives. Our side is the whole iteration of
pretrain_gpt.py. The other ones are forward, backward, clipping and torch's AdamW around
transformers' model, with the same weights and samples: with each of its ways to compute experts on
a CPU (its batched_mm copies a matrix for every token and does not fit), and fused and foreach
AdamW. Each side has a process of its own, stopped while another one has its turn of one step; the
losses of the first step must agree. Printed are medians, the ratios of each side's step to ours in
the same round, the peak memory of each process, and the share that the step's GEMMs, each run by
itself in its fastest way, have of our step. Needs transformers, except with --no-transformers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/benchmarks/step")]

import torch
from processes import Worker, make_job
from sizes import AUX_COEFF, Size

from megatron.kernels.cpu import experts as cpp

TOLERANCE = 1e-5  # of the losses of the first step, relative
# how transformers computes experts (the first is its default), and torch's AdamW
OTHERS = (("grouped_mm", "fused"), ("grouped_mm", "foreach"), ("eager", "fused"))
SIZE = Size("moe", 8, 384, 6, 256, 4, 8192, "llama", 192)
SMALL = Size("small", 2, 64, 2, 32, 2, 256, "llama", 32)


def flags(size: Size, experts: int, topk: int) -> list[str]:
    """The flags that make a Llama of this size one with experts and normed queries and keys."""
    return (
        f"--num-experts {experts} --moe-router-topk {topk} --moe-ffn-hidden-size {size.ffn_size} "
        f"--qk-layernorm --moe-aux-loss-coeff {AUX_COEFF}"
    ).split()


class Side:
    """One process, and what its turns gave."""

    def __init__(self, name: str, kind: str, size: Size, options: list[str], start: Path):
        self.name = name
        job = make_job(kind, size, flags=options, start=str(start))
        self.worker = Worker(name, job, os.environ)
        self.parameters = self.worker.receive()["parameters"]
        self.seconds: list[float] = []
        self.peak_bytes = 0
        self.loss = 0.0

    def warm_up(self) -> None:
        """Two steps; then the process stands still until its next turn."""
        self.loss = self.worker.ask("warm_up", 2)["losses"][0]
        self.worker.pause()

    def turn(self) -> None:
        """One step."""
        self.worker.resume()
        answer = self.worker.ask("turn", 0, 1)
        self.worker.pause()
        self.seconds.append(answer["seconds"])
        self.peak_bytes = answer["peak_bytes"]

    def line(self, ours: Side) -> str:
        """Its row of the table."""
        text = (
            f"{self.name:34} {1000 * statistics.median(self.seconds):9.1f} ms "
            f"{self.peak_bytes / 2**20:7.0f} MiB"
        )
        if self is ours:
            return text
        ratios = sorted(a / b for a, b in zip(self.seconds, ours.seconds, strict=True))
        return (
            f"{text}  {statistics.median(ratios):.2f} x ours ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def gemms(size: Size, experts: int, topk: int) -> list[tuple[int, int, int, int]]:
    """(how many, rows, inputs, outputs) of each kind of GEMM of a forward pass, with equal loads of
    the experts."""
    rows = size.seq * size.micro_batch
    h = size.hidden
    each = rows * topk // experts
    return [
        (size.layers, rows, h, 3 * h),
        (size.layers, rows, h, h),
        (size.layers, rows, h, experts),
        (size.layers * experts, each, h, 2 * size.ffn_size),
        (size.layers * experts, each, size.ffn_size, h),
        (1, rows, h, size.vocab),
    ]


def seconds_of(run: Callable[[], object]) -> float:
    """Of one call, the best of three after one to warm up."""
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def fastest(rows: int, inputs: int, outputs: int, number: int) -> float:
    """Seconds of so many linear layers, forward and both gradients, each of the three in the
    fastest of the ways that torch has on this machine, and of the C++ for experts."""
    x, grad = torch.randn(number * rows, inputs), torch.randn(number * rows, outputs)
    weights = torch.randn(number, outputs, inputs)
    total = torch.zeros_like(weights)
    xs, grads = x.split(rows), grad.split(rows)
    counts = [rows] * number
    onednn = torch.ops.mkldnn._linear_pointwise

    def each(gemm: Callable) -> Callable[[], None]:
        return lambda: [gemm(*parts) for parts in zip(xs, grads, weights, total, strict=True)]

    def by_onednn(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return onednn(rows, weight, None, "none", [], "")

    ways = [
        [
            each(lambda x, g, w, t: torch.mm(x, w.t())),
            each(lambda x, g, w, t: by_onednn(x, w)),
        ],
        [
            each(lambda x, g, w, t: torch.mm(g, w)),
            each(lambda x, g, w, t: by_onednn(g, w.t())),
        ],
        [each(lambda x, g, w, t: t.addmm_(g.t(), x))],
    ]
    if cpp.multiplies(x):
        ways[0].append(lambda: cpp.product(x, None, weights, counts, True))
        ways[1].append(lambda: cpp.product(grad, None, weights, counts, False))
        ways[2].append(lambda: cpp.weight_grad(grad, None, x, None, counts, total))
    return sum(min(map(seconds_of, kinds)) for kinds in ways)


def gemm_seconds(size: Size, experts: int, topk: int) -> float:
    """Seconds of the GEMMs of a step by themselves, forward and both gradients."""
    total = 0.0
    for count, rows, inputs, outputs in gemms(size, experts, topk):
        number = min(count, experts)  # more than fit in the cache, where there are as many
        total += fastest(rows, inputs, outputs, number) * count / number
    return total


def check_losses(sides: list[Side]) -> None:
    """Exit where two sides do not train the same model."""
    for side in sides:
        if abs(side.loss - sides[0].loss) > TOLERANCE * sides[0].loss:
            sys.exit(f"first losses differ: {side.name} {side.loss}, ours {sides[0].loss}")


def report(sides: list[Side], size: Size, experts: int, topk: int) -> None:
    """Print the table."""
    whole = sides[0].parameters
    idle = (experts - topk) * 3 * size.hidden * size.ffn_size * size.layers
    print(
        f"{whole / 1e6:.1f} million parameters, {(whole - idle) / 1e6:.1f} active; {experts} "
        f"experts, top {topk}; {size.tokens} tokens per step; {torch.get_num_threads()} threads; "
        f"first loss {sides[0].loss:.6f} of each side"
    )
    for side in sides:
        print(side.line(sides[0]))
    flops = sum(6 * n * rows * i * o for n, rows, i, o in gemms(size, experts, topk))
    seconds = gemm_seconds(size, experts, topk)
    share = seconds / statistics.median(sides[0].seconds)
    print(
        f"{'GEMMs by themselves':34} {1000 * seconds:9.1f} ms  {flops / seconds / 1e9:.0f} GFLOP/s,"
        f" {share:.0%} of our step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each side")
    parser.add_argument("--small", action="store_true", help="a tiny model, to test this program")
    parser.add_argument("--no-transformers", action="store_true", help="our side alone")
    args = parser.parse_args()
    size, experts, topk = (SMALL, 8, 2) if args.small else (SIZE, 64, 8)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.pt"
        sides = [Side("ours", "ours", size, flags(size, experts, topk), start)]
        try:
            sides[0].worker.ask("save_run", str(start), 4)
            sides[0].warm_up()
            for way, adamw in () if args.no_transformers else OTHERS:
                name = f"transformers, {way}, {adamw} AdamW"
                sides.append(Side(name, "qwen3-moe", size, [way, adamw, str(topk)], start))
                sides[-1].warm_up()
            check_losses(sides)
            for _ in range(args.rounds):
                for side in sides:
                    side.turn()
        finally:
            for side in sides:
                side.worker.end()
    report(sides, size, experts, topk)


if __name__ == "__main__":
    main()
