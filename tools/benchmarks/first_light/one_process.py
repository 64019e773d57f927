"""Contestants of the step benchmark one after the other in this process, on one device, its memory
freed between them. Step 4 of first_light.sh.

    python one_process.py DEVICE FOLDER STEPS CONTESTANT@SIZE ...

Each appends a line of JSON to FOLDER/cells.jsonl: its figures, or its error. Where it leaves the
device unusable (an error of CUDA) or memory behind, this process ends with NEXT_PROCESS, and
steps.py starts another one for the next contestants.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import resource
import statistics
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rates import peak_of
from sizes import parse_size
from steps import NEXT_PROCESS
from training import Training

from megatron import device as devices

WARM_UP = 3  # the first steps make cuDNN's plans and compile kernels
LEFT_BYTES = 1 << 30  # of device memory that may stay allocated after a contestant


def measure(cell: str, device: str, folder: Path, steps: int) -> tuple[dict[str, Any], Any]:
    """(the figures of CONTESTANT@SIZE, a weak reference to its first parameter)."""
    name, _, text = cell.partition("@")
    size = parse_size(text)
    start = folder / f"{size.name}.pt"
    kind, _, compiled = name.partition("-")
    began = time.perf_counter()
    training = Training(
        kind,
        asdict(size),
        "bf16",
        device,
        start=str(start),
        compiled=bool(compiled),
        warmup=WARM_UP,
    )
    built = time.perf_counter() - began
    alive = weakref.ref(next(iter(training.runner.parameters())))
    if name == "ours":
        training.save_start(str(start), WARM_UP + steps)
        (folder / f"{size.name}.flops").write_text(str(training.flops))
    _reset_peak(device)
    losses = training.warm_up()
    timed = [training.turn() for _ in range(steps)]
    facts = training.facts()
    row: dict[str, Any] = {
        "build s": built,
        "compile s": facts.get("compile s"),
        "losses": losses,
        "ms": 1e3 * statistics.median(timed),
        "spread ms": 1e3 * (max(timed) - min(timed)),
        "tokens/s": size.tokens / statistics.median(timed),
        "peak GiB": facts.get("peak GB", peak_gb()) * 1e9 / 2**30,
    }
    flops = int((folder / f"{size.name}.flops").read_text())
    rate = flops / statistics.median(timed) / 1e12
    row["TFLOP/s"] = rate
    peak = peak_of(devices.name(training.device))
    if peak:
        row["MFU %"] = 100 * rate / peak
    try:
        row["kernels"] = kernels(training.runner.step)
    except Exception as error:  # a container may forbid it; the times are there
        row["kernels"] = [[f"no profile: {error}"[:200], 0, 0.0]]
    return row, alive


def kernels(step: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """(name, how often, seconds) of each kernel of one step on a device, or of each operation on a
    CPU, the longest first."""
    activities = torch.profiler.supported_activities()
    if not torch.accelerator.is_available():
        activities = {torch.profiler.ProfilerActivity.CPU}
    with torch.profiler.profile(activities=activities) as run:
        step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    rows = run.key_averages()
    names = [  # of the device, without ranges of names, which hold kernels
        (row.key, row.count, row.self_device_time_total / 1e6)
        for row in rows
        if not str(row.device_type).endswith("CPU")
        and not getattr(row, "is_user_annotation", False)
    ] or [(row.key, row.count, row.self_cpu_time_total / 1e6) for row in rows]
    return sorted((row for row in names if row[2] > 0), key=lambda row: -row[2])


def peak_gb() -> float:
    """The most memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9


def _reset_peak(device: str) -> None:
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def free(device: str) -> int:
    """Free what nothing refers to; bytes of device memory that are still allocated."""
    gc.unfreeze()  # our contestant freezes what it built, as pretrain_gpt.py does
    gc.collect()
    torch._dynamo.reset()
    if device == "cpu":
        return 0
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_allocated()


def run_cell(cell: str, device: str, folder: Path, steps: int) -> bool:
    """Measure one and write its line; whether this process may go on."""
    alive = None
    usable = True
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            row, alive = measure(cell, device, folder, steps)
    except (Exception, SystemExit) as error:  # an error is a result, and others follow
        message = output.getvalue().strip() if isinstance(error, SystemExit) else str(error)
        row = {"error": f"{type(error).__name__}: {message}"[:600]}
        usable = "CUDA error" not in message
        traceback.print_exc()
    print(output.getvalue(), file=sys.stderr)
    if usable:
        free_after = free(device)
        row["left GiB"] = free_after / 2**30
        usable = free_after < LEFT_BYTES and (alive is None or alive() is None)
    with open(folder / "cells.jsonl", "a", encoding="utf-8") as file:
        print(json.dumps({"cell": cell, **row}), file=file)
    print(cell, {name: value for name, value in row.items() if name != "kernels"}, flush=True)
    return usable


def main(argv: list[str]) -> int:
    """Measure them in turn."""
    device, folder, steps, *cells = argv
    for cell in cells:
        if not run_cell(cell, device, Path(folder), int(steps)) and cell != cells[-1]:
            print(f"{cell} left this process unusable or memory behind", flush=True)
            return NEXT_PROCESS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
