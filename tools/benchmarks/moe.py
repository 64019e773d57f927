#!/usr/bin/env python
"""Seconds of a training step with experts, next to transformers' Qwen3-MoE in a bare loop:
tools/benchmarks/moe.py [--dtype bf16] [--small].

64 experts of which a token selects 8, about 30 million parameters that compute a token, on the CPU
in fp32 or bf16, with as many threads as OMP_NUM_THREADS gives. Our side is the whole iteration of
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

# of the losses of the first step, relative
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
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

    def __init__(
        self,
        name: str,
        kind: str,
        size: Size,
        args: argparse.Namespace,
        options: list[str],
        start: Path,
    ):
        self.name = name
        job = make_job(
            kind, size, dtype=args.dtype, clock=args.clock, flags=options, start=str(start)
        )
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


def seconds_of(run: Callable[[], object], clock: str) -> float:
    """Of one call, the best of three after one to warm up."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    taken = []
    for _ in range(4):
        start = now()
        run()
        taken.append(now() - start)
    return min(taken[1:])


def fastest(rows: int, inputs: int, outputs: int, number: int, dtype: str, clock: str) -> float:
    """Seconds of so many linear layers, forward and both gradients, each of the three in the
    fastest of the ways that torch has on this machine, and of the C++ for experts."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x = torch.randn(number * rows, inputs).to(kind)
    grad = torch.randn(number * rows, outputs).to(kind)
    weights = torch.randn(number, outputs, inputs).to(kind)
    total = torch.zeros(weights.shape)
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
        [
            each(lambda x, g, w, t: t.addmm_(g.t(), x))
            if kind == total.dtype
            else each(lambda x, g, w, t: t.add_(torch.mm(g.t(), x)))
        ],
    ]
    if cpp.multiplies(x, weights, total):
        ways[0].append(lambda: cpp.product(x, None, weights, counts, True))
        ways[1].append(lambda: cpp.product(grad, None, weights, counts, False))
        ways[2].append(lambda: cpp.weight_grad(grad, None, x, None, counts, total))
    return sum(min(seconds_of(way, clock) for way in kinds) for kinds in ways)


def gemm_seconds(size: Size, experts: int, topk: int, dtype: str, clock: str) -> float:
    """Seconds of the GEMMs of a step by themselves, forward and both gradients."""
    total = 0.0
    for count, rows, inputs, outputs in gemms(size, experts, topk):
        number = min(count, experts)  # more than fit in the cache, where there are as many
        total += fastest(rows, inputs, outputs, number, dtype, clock) * count / number
    return total


def check_losses(sides: list[Side], tolerance: float) -> None:
    """Exit where two sides do not train the same model."""
    for side in sides:
        if abs(side.loss - sides[0].loss) > tolerance * sides[0].loss:
            sys.exit(f"first losses differ: {side.name} {side.loss}, ours {sides[0].loss}")


def report(sides: list[Side], size: Size, experts: int, topk: int, gemms_take: float) -> None:
    """Print the table; the GEMMs by themselves took `gemms_take` seconds."""
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
    share = gemms_take / statistics.median(sides[0].seconds)
    print(
        f"{'GEMMs by themselves':34} {1000 * gemms_take:9.1f} ms  "
        f"{flops / gemms_take / 1e9:.0f} GFLOP/s, {share:.0%} of our step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each side")
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time, which other programs change less; for one thread",
    )
    parser.add_argument("--small", action="store_true", help="a tiny model, to test this program")
    parser.add_argument(
        "--no-eager", action="store_true", help="without transformers' eager experts, the slowest"
    )
    parser.add_argument("--no-transformers", action="store_true", help="our side alone")
    args = parser.parse_args()
    size, experts, topk = (SMALL, 8, 2) if args.small else (SIZE, 64, 8)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.pt"
        sides = [Side("ours", "ours", size, args, flags(size, experts, topk), start)]
        try:
            sides[0].worker.ask("save_run", str(start), 4)
            sides[0].warm_up()
            others = OTHERS[:-1] if args.no_eager else OTHERS
            for way, adamw in () if args.no_transformers else others:
                name = f"transformers, {way}, {adamw} AdamW"
                sides.append(Side(name, "qwen3-moe", size, args, [way, adamw, str(topk)], start))
                sides[-1].warm_up()
            check_losses(sides, TOLERANCE[args.dtype])
            for _ in range(args.rounds):
                for side in sides:
                    side.turn()
        finally:
            for side in sides:
                side.worker.end()
    report(sides, size, experts, topk, gemm_seconds(size, experts, topk, args.dtype, args.clock))


if __name__ == "__main__":
    main()
