"""Prints kernel launches, and bytes that they read and write: per token of one layer of each path, the
difference between traces of 3 and 2 layers; and per logit of cross entropy.

    python -m megatron.addons.lab.tests.trace.layer_costs
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from megatron.addons.lab.tests.trace.tracing import Traced
from megatron.addons.lab.trace import recorder
from megatron.kernels.cross_entropy import cross_entropy
from megatron.parallel.cross_entropy import parallel_cross_entropy

SEQ = 2048
MICRO_BATCH = 4
COMMON = (
    f"--mock-data --tokenizer-type NullTokenizer --vocab-size 50000 --seq-length {SEQ} "
    f"--max-position-embeddings {SEQ} --hidden-size 2048 --num-attention-heads 16 --bf16 "
    f"--micro-batch-size {MICRO_BATCH} --global-batch-size {2 * MICRO_BATCH} --train-iters 2 "
    "--lr 1e-4 --device cuda"
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
PATHS = {
    "GPT, no dropout": NO_DROPOUT,
    "Llama, no dropout": f"{NO_DROPOUT} {LLAMA}",
    "GPT, hidden dropout": "--attention-dropout 0",
    "GPT, both dropouts (the defaults)": "",
    "GPT, document masks, no dropout": f"{NO_DROPOUT} --reset-attention-mask",
    "GPT, own FP8, no dropout": f"{NO_DROPOUT} --fp8-format hybrid --fp8-recipe tensorwise",
}
EXPERTS = "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024"
PATHS["Experts (OLMoE), no dropout"] = f"{NO_DROPOUT} {LLAMA} {EXPERTS}"
PHASES = ("forward-compute", "backward-compute")


class Traffic(recorder.StepRecorder):
    """Counts also the bytes of all inputs and outputs of each launch."""

    last: Traffic

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bytes: Counter[str] = Counter()
        Traffic.last = self

    def begin_step(self) -> None:
        super().begin_step()
        self.bytes.clear()

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        before = self.launches.total()
        super()._count(func, name, args, kwargs, out)
        if self.launches.total() > before and not name.startswith(("empty", "new_empty")):
            tensors = recorder._tensors((*args, *kwargs.values(), out))
            self.bytes[self._spans[-1]] += traffic(tensors)


def traffic(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors; one that is expanded is read once."""
    return sum(
        one.element_size()
        * math.prod(
            size for size, step in zip(one.shape, one.stride(), strict=True) if step or size == 1
        )
        for one in tensors
    )


def of_layers(flags: str, layers: int) -> tuple[list[int], list[int]]:
    """(launches, bytes) of the phases of a micro-batch."""
    Traced(f"{COMMON} {flags} --num-layers {layers}".split(), 1).rank(0)
    found = Traffic.last
    return tuple(
        [counts[phase] // 2 for phase in PHASES] for counts in (found.launches, found.bytes)
    )


def of_cross_entropy(dtype: torch.dtype, tp: int = 1, smoothing: float = 0.0) -> list[list[float]]:
    """(launches, bytes per logit) of forward and backward, of one of `tp` ranks."""
    shape = (SEQ * MICRO_BATCH, 50304 // tp)
    logits = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    labels = torch.empty(shape[0], dtype=torch.int64, device="meta")
    given = torch.empty(shape[0], device="meta")
    options = {"vocab_size": 50257, "smoothing": smoothing}
    if tp > 1:
        options |= {"tp": SimpleNamespace(size=tp, rank=0), "reduce": lambda x, *_: x}
    with Traffic(0) as traffic:
        with traffic(PHASES[0]):
            loss = (parallel_cross_entropy if tp > 1 else cross_entropy)(logits, labels, **options)
        with traffic(PHASES[1]):
            torch.autograd.grad(loss, logits, given)
    size = logits.numel()
    return [[traffic.launches[phase], traffic.bytes[phase] / size] for phase in PHASES]


def main() -> None:
    """Print a row for each path."""
    from megatron.addons.lab.trace import traced_rank

    traced_rank.StepRecorder = Traffic
    tokens = SEQ * MICRO_BATCH
    for name, flags in PATHS.items():
        three, two = (of_layers(flags, layers) for layers in (3, 2))
        launches, moved = (
            [a - b for a, b in zip(x, y, strict=True)] for x, y in zip(three, two, strict=True)
        )
        kilobytes = " + ".join(f"{n / tokens / 1000:.0f}" for n in moved)
        print(f"{name}: {launches[0]} + {launches[1]} launches, {kilobytes} kB a token")
    for dtype in (torch.bfloat16, torch.float32):
        for tp in (1, 2):
            (a, x), (b, y) = of_cross_entropy(dtype, tp)
            print(
                f"cross entropy, {dtype}, TP {tp}: {a} + {b} launches, {x:.1f} + {y:.1f} B a logit"
            )


if __name__ == "__main__":
    main()
