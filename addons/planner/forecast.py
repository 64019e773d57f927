"""What a step's time means for a run: tokens a second, utilization, days, energy, price, and what
failures cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from .machines import Machine
from .step_time import Runs, flops

RESTART = 600.0  # seconds from a failure to the first step after it
SAVE = 30.0  # seconds that training waits for a checkpoint


def lines(
    run: Runs,
    seconds: Mapping[str, float],
    machine: Machine,
    gpus: int,
    *,
    tokens: float | None = None,
    mtbf_hours: float | None = None,
    price: float | None = None,
    save_seconds: float = SAVE,
    restart_seconds: float = RESTART,
) -> Iterator[str]:
    """One line each. `mtbf_hours`: between two failures of the whole job; `price`: of an hour of a
    GPU."""
    step = float(sum(seconds.values()))
    yield f"step: {step:.4g} s on {gpus} x {machine.name}"
    for kind, time in sorted(seconds.items(), key=lambda item: -item[1]):
        if time > 0.001 * step:
            yield f"  {kind:18} {time:10.4g} s {time / step:7.1%}"
    rate = run.batch * run.seq / step
    yield f"tokens/s: {rate:,.0f}, {rate / gpus:,.0f} a GPU"
    peak = machine.constants["tflops"] * 1e12
    for name, causal in (("causal half", True), ("full square", False)):
        work = float(flops(run, causal)) / step
        again = work * (1 + float(run.again) / 3)
        yield (
            f"attention counted as the {name}: {work / 1e12:.0f} TFLOP/s a GPU, MFU "
            f"{work / peak:.1%}, with what is computed twice HFU {again / peak:.1%} "
            f"(of {peak / 1e12:.0f} in bf16)"
        )
    lost = 0.0
    if mtbf_hours is not None:
        mtbf = mtbf_hours * 3600
        interval = math.sqrt(2 * save_seconds * mtbf)
        lost = save_seconds / interval + (interval / 2 + restart_seconds) / mtbf
        yield (
            f"failures every {mtbf_hours:g} h: save every {interval:.0f} s (--save-interval "
            f"{max(1, round(interval / step))}, Young and Daly; a save stops training for "
            f"{save_seconds:g} s, a restart takes {restart_seconds:g} s); {lost:.1%} of the time "
            "is lost"
        )
    if tokens is not None:
        if lost >= 1:
            yield "the run never ends: more than all of its time is lost"
            return
        hours = tokens / rate / 3600 / (1 - lost)
        energy = hours * gpus * machine.facts["watts"] / 1e6
        text = f"{tokens:.3g} tokens: {hours / 24:.2f} days, {hours * gpus:,.0f} GPU-hours, "
        text += f"{energy:,.1f} MWh of the GPUs alone"
        yield text + (f", price {hours * gpus * price:,.0f}" if price is not None else "")
