"""Where the time of our training step goes, by kinds of work, compared with the ceiling."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

STEP = "whole step"
OPTIMIZER = "optimizer and clipping"
KERNELS = 25  # on another device than a CPU: as many are shown
GEMMS = "GEMMs"
ATTENTION = "attention"
# Kinds by a word in the name of an operation or of an autograd function; the first that fits an
# event's chain counts.
KINDS = (
    (OPTIMIZER, (OPTIMIZER,)),
    ("loss", ("_CrossEntropy", "_ParallelCrossEntropy")),
    (
        ATTENTION,
        (
            "_ChunkedAttention",
            "_TileAttention",
            "_VectorAttention",
            "scaled_dot_product",
            "ScaledDotProduct",
        ),
    ),
    ("norms", ("_RmsNorm", "layer_norm", "LayerNorm", "rms_norm", "RmsNorm")),
    ("activation", ("TanhGelu", "_SwiGlu", "gelu", "Gelu", "silu", "Silu")),
    ("rotary", ("_Rotary",)),
    ("embedding", ("_Embedding", "aten::embedding")),
    ("linear layers without GEMMs", ("_Linear",)),
)
OTHER = "residual sums, copies and the rest"
BETWEEN = "between operations (Python, page faults of the caller)"
_MATMULS = (
    "mkldnn::_linear_pointwise",
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::bmm",
    "aten::_scaled_mm",
)


def kind_of(chain: list[str]) -> str:
    """The kind of work of an event, from its name and those of the events around it, the innermost
    first."""
    for kind, words in KINDS:
        if any(word in name for name in chain for word in words):
            return GEMMS if kind.startswith("linear") and chain[0] in _MATMULS else kind
    return OTHER


def profiled(step: Callable[[], Any], optimizer: Any, steps: int = 3) -> dict[str, float]:
    """Seconds of each kind of work in a step on the CPU, the median of `steps`; STEP is the step
    itself.

    Self times of all events, so that nothing counts twice. `optimizer.step` is what the optimizer's
    time is taken of.
    """
    # the parent of the benchmark's processes has no torch
    torch_profiler = importlib.import_module("torch.profiler")
    record_function = torch_profiler.record_function
    activities = [torch_profiler.ProfilerActivity.CPU]
    real = optimizer.step
    found = []

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(OPTIMIZER):
            return real(*args, **kwargs)

    optimizer.step = marked
    try:
        for _ in range(steps):
            with torch_profiler.profile(activities=activities) as run, record_function(STEP):
                step()
            found.append(_by_kind(run.events()))
    finally:
        del optimizer.step
    kinds = dict.fromkeys(kind for one in found for kind in one)
    return {kind: statistics.median(one.get(kind, 0.0) for one in found) for kind in kinds}


def kernels(step: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """(name, how often, seconds) of each kernel of one step on a device, or of each operation on a
    CPU, the longest first: torch's table by key."""
    torch = importlib.import_module("torch")
    activities = torch.profiler.supported_activities()
    if not torch.accelerator.is_available():
        activities = {torch.profiler.ProfilerActivity.CPU}
    with torch.profiler.profile(activities=activities) as run:
        step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    return longest(run.key_averages())


def longest(rows: Any) -> list[tuple[str, int, float]]:
    """The rows of the device without ranges of names, which hold kernels; those of the CPU where
    it did all."""
    device = [row for row in rows if not str(row.device_type).endswith("CPU")]
    found = [
        (row.key, row.count, row.self_device_time_total / 1e6)
        for row in device
        if not getattr(row, "is_user_annotation", False)
    ] or [(row.key, row.count, row.self_cpu_time_total / 1e6) for row in rows]
    return sorted((row for row in found if row[2] > 0), key=lambda row: -row[2])


def by_kernel(found: list[tuple[str, int, float]], seconds: float) -> dict[str, float]:
    """As `profiled` of a step of so many seconds: the longest kernels."""
    return {STEP: seconds} | {
        f"{count} x {name[:90]}": each for name, count, each in found[:KERNELS]
    }


def _by_kind(events: Any) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for event in events:
        chain = []
        at = event
        while at is not None:
            chain.append(at.name)
            at = at.cpu_parent
        if STEP not in chain:
            continue
        if event.name == STEP:
            seconds[STEP] = event.cpu_time_total / 1e6
        kind = BETWEEN if event.name == STEP else kind_of(chain[:-1])
        seconds[kind] = seconds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    return seconds


def lines(seconds: dict[str, float], ceiling: tuple[float, float] | None) -> list[str]:
    """A row for each kind, the largest first, with the ceiling's time of GEMMs and attention."""
    whole = seconds[STEP]
    best = {} if ceiling is None else dict(zip((GEMMS, ATTENTION), ceiling, strict=True))
    rows = [("where a step's time goes", "ms", "of step", "ceiling ms")]
    for kind, value in sorted(seconds.items(), key=lambda pair: -pair[1]):
        top = f"{1e3 * best[kind]:.1f}" if kind in best else ""
        rows.append((kind, f"{1e3 * value:.1f}", f"{100 * value / whole:.1f}%", top))
    width = max(len(row[0]) for row in rows)
    return [
        f"  {name.ljust(width)}  {ms:>9}  {share:>8}  {top:>10}".rstrip()
        for name, ms, share, top in rows
    ]
