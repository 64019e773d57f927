#!/usr/bin/env python
"""Predicts the model FLOP utilisation (MFU) of a training step on one H100 from a trace of it.

    python tools/benchmarks/step/mfu_model.py [NAME ...]

Operations, their bytes and the shapes of GEMMs are those of a trace of the suite's own step on the
meta device (megatron/features/trace). Rates are assumptions about the device, the constants below,
to be replaced by what first_light.sh measures. Eager: each launch moves all tensors that it takes
and returns. Compiled: what stands between two GEMMs or attention calls is one launch, which reads
what it did not make and writes what is still needed.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from rates import PEAKS  # noqa: E402
from sizes import Size, command_line  # noqa: E402

from megatron.config import command_line as megatron_command_line  # noqa: E402
from megatron.config.plan.plan import make_plan  # noqa: E402
from megatron.features.registry import RunConfig  # noqa: E402
from megatron.features.trace import recorder, traced_rank  # noqa: E402
from megatron.training.logging.flops import flops_per_iteration, model_shape  # noqa: E402
from megatron.training.preflight import build_tokenizer  # noqa: E402
from pretrain_gpt import forward_step  # noqa: E402

PEAK = 1e12 * PEAKS["H100"]
GEMM_RATE = 720e12  # of a large GEMM within a step; 798 by itself on the card of November 2026
TILE = (128, 256)  # rows and columns of one multiprocessor's part of a product
MULTIPROCESSORS = 132
SHORT_K = 350  # a product of this many terms runs at half of the rate
BANDWIDTH = 2.7e12  # bytes a second; a large copy reaches 3.0e12
LAUNCH = 3e-6  # seconds, at least, of a kernel
HOST = {"eager": 11e-6, "compiled": 6e-6}  # of Python for each launch
# Of attention, FLOPs a second of the causal half by the width of a head: forward, backward.
ATTENTION = {64: (330e12, 240e12), 128: (480e12, 360e12)}
SHORT_ATTENTION = 0.8  # of these up to 1,024 positions
KINDS = ("GEMM", "attention", "elementwise", "cross entropy", "optimizer")


def _llama(layers: int, hidden: int, heads: int, ffn: int, **more: int) -> Size:
    return Size("", layers, hidden, heads, family="llama", ffn=ffn, **more)


GROUPS = ("--group-query-attention", "--num-query-groups", "8")
MODELS: dict[str, tuple[Size, Sequence[str]]] = {
    "GPT-2 124M": (Size("", 12, 768, 12, 1024, 16, 50304, micro_batches=32), ()),
    "GPT-2 345M": (Size("", 24, 1024, 16, 1024, 16, 50304, micro_batches=32), ()),
    "GPT-2 1.5B": (Size("", 48, 1600, 25, 1024, 8, 50304, micro_batches=32), ()),
    "Llama 1B": (
        _llama(16, 2048, 16, 5632, seq=2048, micro_batch=8, vocab=32000, micro_batches=16),
        (),
    ),
    "Llama 1B, vocabulary 128k": (
        _llama(16, 2048, 32, 8192, seq=4096, micro_batch=2, vocab=128256, micro_batches=32),
        GROUPS,
    ),
    "Llama 3B": (
        _llama(28, 3072, 24, 8192, seq=4096, micro_batch=1, vocab=32000, micro_batches=32),
        GROUPS,
    ),
    "Llama 7B": (
        _llama(32, 4096, 32, 11008, seq=4096, micro_batch=1, vocab=32000, micro_batches=32),
        (),
    ),
    "GPT-2 124M, small micro-batches": (
        Size("", 12, 768, 12, 1024, 1, 50304, micro_batches=32),
        (),
    ),
}


@dataclass
class Run:
    """Launches of one kind that follow each other: bytes of each; what one launch would move."""

    kind: str
    launches: list[int] = field(default_factory=list)
    read: dict[int, int] = field(default_factory=dict)  # by storage
    written: dict[int, int] = field(default_factory=dict)
    fused: int = 0


def traffic(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors; one that is expanded counts once."""
    return sum(
        t.element_size()
        * math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step or n == 1)
        for t in tensors
    )


class Launches(recorder.StepRecorder):
    """Also keeps the launches of the step in order."""

    last: Launches

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.runs: list[Run] = []
        self.compute: dict[str, float] = defaultdict(float)  # seconds of GEMMs and attention
        Launches.last = self

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        launched = self.launches.total()
        flops = self.flops.total()
        super()._count(func, name, args, kwargs, out)
        if not self.in_step or self.launches.total() == launched or name.startswith("new_empty"):
            return
        inputs = list(recorder._tensors((*args, *kwargs.values())))
        outputs = list(recorder._tensors((out,)))
        flops = self.flops.total() - flops
        kind = self._kind_of(name, flops)
        if not self.runs or self.runs[-1].kind != kind or kind in ("GEMM", "attention"):
            self.close()
            self.runs.append(Run(kind))
        run = self.runs[-1]
        run.launches.append(traffic((*inputs, *outputs)))
        if kind == "GEMM":
            self.compute[kind] += gemm_seconds(flops, *inputs[-2:])
        elif kind == "attention":
            self.compute[kind] += attention_seconds(flops, "backward" in name, inputs[0])
        for tensor in inputs:
            key = tensor.untyped_storage()._cdata
            if key not in run.written:
                run.read[key] = max(run.read.get(key, 0), traffic([tensor]))
        for tensor in outputs:
            run.written[tensor.untyped_storage()._cdata] = traffic([tensor])

    def _kind_of(self, name: str, flops: int) -> str:
        if flops:
            return "attention" if "attention" in name else "GEMM"
        if self._spans[-1] not in ("forward-compute", "backward-compute"):
            return "optimizer"
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.endswith("cross_entropy.py"):
                return "cross entropy"
            frame = frame.f_back
        return "elementwise"

    def close(self) -> None:
        """The last run is over: of what it wrote only what is alive is in memory."""
        if self.runs:
            run = self.runs[-1]
            alive = (size for key, size in run.written.items() if key in self._pieces)
            run.fused = sum(run.read.values()) + sum(alive)


def gemm_seconds(flops: int, a: torch.Tensor, b: torch.Tensor) -> float:
    """Of a product a [m, k] b [k, n]: the last wave of tiles is not full, and short sums have their
    start and end."""
    (m, k), n = a.shape, b.shape[1]
    assert flops == 2 * m * n * k, (flops, a.shape, b.shape)
    tiles = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
    wave = tiles / (math.ceil(tiles / MULTIPROCESSORS) * MULTIPROCESSORS)
    return flops / (GEMM_RATE * wave**0.5 * k / (k + SHORT_K))


def attention_seconds(flops: int, backward: bool, q: torch.Tensor) -> float:
    """Of a causal call; `flops` are those of the whole square, q is [b, n, s, d]."""
    rate = ATTENTION[64 if q.shape[-1] <= 64 else 128][backward]
    return flops / 2 / (rate * (SHORT_ATTENTION if q.shape[2] <= 1024 else 1.0))


@dataclass(frozen=True)
class Prediction:
    """Of one step: seconds by kind, launches of a micro-batch, and what limits it."""

    seconds: dict[str, float]
    launches: int
    host: float  # seconds of Python
    flops: int
    tokens: int

    @property
    def step(self) -> float:
        """Seconds: of the device, or of Python that launches."""
        return max(sum(self.seconds.values()), self.host)

    @property
    def mfu(self) -> float:
        """In percent, by this suite's convention."""
        return 100 * self.flops / self.step / PEAK


def predict(size: Size, extra: Sequence[str] = ()) -> dict[str, Prediction]:
    """The step of a size in bf16 without dropout, `eager` and `compiled`."""
    words = command_line(size, "bf16", "cuda", extra)
    words += ["--train-iters", "2", "--dry-run", "--world-size", "1", "--trace"]
    one = ["--global-batch-size", str(size.micro_batch)]
    line = megatron_command_line.read([*words, *one], {}, tree=RunConfig)
    config = traced_rank.traced_config(line.config)
    tokenizer = build_tokenizer(config)
    plan = make_plan(config, 1, tokenizer.vocab_size)
    with mock.patch.object(traced_rank, "StepRecorder", Launches):
        traced_rank.trace_rank(config, plan, 0, tokenizer, forward_step)
    traced = Launches.last
    traced.close()
    samples = size.micro_batch * size.micro_batches
    flops = flops_per_iteration(model_shape(config, plan), samples)
    found = {}
    for mode, host in HOST.items():
        seconds = dict.fromkeys(KINDS, 0.0)
        count = 0
        for run in traced.runs:
            fused = mode == "compiled" and run.kind in ("elementwise", "cross entropy")
            moved = [run.fused] if fused else run.launches
            count += len(moved) * (run.kind != "optimizer")
            if run.kind not in traced.compute:
                seconds[run.kind] += sum(max(LAUNCH, size_ / BANDWIDTH) for size_ in moved)
        for kind in KINDS[:-1]:
            seconds[kind] = size.micro_batches * (seconds[kind] + traced.compute.get(kind, 0.0))
        host_seconds = host * count * size.micro_batches
        found[mode] = Prediction(seconds, count, host_seconds, flops, size.tokens)
    return found


def row(name: str, size: Size, found: dict[str, Prediction]) -> list[str]:
    """The cells of a model."""
    eager, compiled = found["eager"], found["compiled"]
    shares = (f"{100 * eager.seconds[kind] / eager.step:.0f}" for kind in KINDS)
    return [
        name,
        f"{size.seq * size.micro_batch:,}",
        f"{1e6 * eager.step / eager.tokens:.2f}",
        f"{eager.mfu:.0f} %",
        f"{compiled.mfu:.0f} %",
        " / ".join(shares),
        f"{eager.launches:,} / {compiled.launches:,}",
    ]


TITLES = (
    "model",
    "tokens a micro-batch",
    "us a token",
    "MFU eager",
    "MFU compiled",
    f"{' / '.join(KINDS)}, % (eager)",
    "launches",
)


def main(argv: Sequence[str]) -> int:
    """Print the table as Markdown; `argv`: names of models (default: all)."""
    unknown = [name for name in argv if name not in MODELS]
    if unknown:
        print(f"error: {unknown[0]!r} is none of {', '.join(MODELS)}", file=sys.stderr)
        return 2
    for cells in (TITLES, ["---"] * len(TITLES)):
        print(f"| {' | '.join(cells)} |")
    for name in argv or MODELS:
        size, extra = MODELS[name]
        print(f"| {' | '.join(row(name, size, predict(size, extra)))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
