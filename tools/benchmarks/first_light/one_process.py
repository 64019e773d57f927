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
import statistics
import sys
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import step_profile
import torch
from ceiling import peak_of
from processes import make_job
from sizes import parse_size
from steps import NEXT_PROCESS
from worker import TrainingSteps, device_of

from megatron import device as devices

WARM_UP = 3  # the first steps make cuDNN's plans and compile kernels
CONTESTANTS = {
    "ours": ("ours", []),
    "ours-compiled": ("ours", ["--torch-compile"]),
    "bare-compiled": ("bare", []),
}
LEFT_BYTES = 1 << 30  # of device memory that may stay allocated after a contestant


def measure(cell: str, device: str, folder: Path, steps: int) -> tuple[dict[str, Any], Any]:
    """(the figures of CONTESTANT@SIZE, a weak reference to its first parameter)."""
    name, _, text = cell.partition("@")
    size = parse_size(text)
    kind, flags = CONTESTANTS[name]
    start = folder / f"{size.name}.pt"
    compiled = name.endswith("compiled")
    job = make_job(
        kind, size, dtype="bf16", device=device, compiled=compiled, flags=flags, start=str(start)
    )
    began = time.perf_counter()
    steps_of = TrainingSteps(job)
    built = time.perf_counter() - began
    alive = weakref.ref(next(iter(steps_of._runner.parameters())))
    if name == "ours":
        steps_of.save_start(str(start), WARM_UP + steps)
        (folder / f"{size.name}.flops").write_text(str(steps_of.facts["flops_per_step"]))
    _reset_peak(device)
    warm = steps_of.warm_up(WARM_UP)
    timed = [steps_of.turn(0, 1)["seconds"] for _ in range(steps)]
    row = {
        "build s": built,
        "compile s": warm["compile_seconds"],
        "losses": warm["losses"],
        "ms": 1e3 * statistics.median(timed),
        "spread ms": 1e3 * (max(timed) - min(timed)),
        "tokens/s": size.tokens / statistics.median(timed),
        "peak GiB": steps_of.turn(0, 1)["peak_bytes"] / 2**30,
    }
    flops = int((folder / f"{size.name}.flops").read_text())
    row["TFLOP/s"] = flops / statistics.median(timed) / 1e12
    peak = peak_of(devices.name(device_of(job)))
    if peak:
        row["MFU %"] = 100 * row["TFLOP/s"] / peak
    try:
        row["kernels"] = step_profile.kernels(steps_of._runner.step)
    except Exception as error:  # a container may forbid it; the times are there
        row["kernels"] = [[f"no profile: {error}"[:200], 0, 0.0]]
    return row, alive


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
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            row, alive = measure(cell, device, folder, steps)
    except (Exception, SystemExit) as error:  # an error is a result, and others follow
        message = said.getvalue().strip() if isinstance(error, SystemExit) else str(error)
        row = {"error": f"{type(error).__name__}: {message}"[:600]}
        usable = "CUDA error" not in message
        traceback.print_exc()
    print(said.getvalue(), file=sys.stderr)
    if usable:
        left = free(device)
        row["left GiB"] = left / 2**30
        usable = left < LEFT_BYTES and (alive is None or alive() is None)
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
