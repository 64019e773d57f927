"""Training steps and decoding, one after the other in this process, on one device, its memory
freed between them. Step 3 of first_light.sh.

    python one_process.py DEVICE FOLDER FIRST

measures CELLS[FIRST:] (cells.py) and appends a line of JSON for each to FOLDER/cells.jsonl: its
figures, or its error. Where one leaves the device unusable (an error of CUDA) or memory behind,
this process ends with NEXT_PROCESS, and steps.py starts another one for the next cells.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import statistics
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cases import generate
from cells import CELLS, Cell, flags_on, size_of
from sizes import Size
from steps import NEXT_PROCESS
from subject import Subject
from training import Training, peak_of

from megatron import device as devices

WARM_UP = 3  # the first steps make cuDNN's plans and compile kernels
TURNS = 3
NEW_TOKENS = 64  # of each text that is decoded
LEFT_BYTES = 1 << 30  # of device memory that may stay allocated after a cell


def measure(cell: Cell, device: str, folder: Path) -> dict[str, Any]:
    """The figures of a cell."""
    chip = devices.choose_device(device, 0)
    small = chip.type == "cpu"
    size = size_of(cell.size, small)
    flops = folder / f"{cell.size}.flops"  # of ours, for its peers
    tokens, parts = size.tokens, 1  # of a turn; "ms" is of one part
    if cell.kind.startswith("decode"):
        parts = 4 if small else NEW_TOKENS
        tokens = size.micro_batch * parts
        subject: Any = decoder(cell.kind, size, parts, device, folder)
    else:
        subject = training(cell, size, device, folder)
        if cell.kind.startswith("ours"):
            flops.write_text(str(subject.flops))
    if not small:
        torch.accelerator.reset_peak_memory_stats()
    losses = subject.warm_up()
    seconds = statistics.median(subject.turn() for _ in range(1 if small else TURNS))
    peak = peak_of(chip)
    rate = int(flops.read_text()) / seconds / 1e12 if flops.exists() else None
    row: dict[str, Any] = {
        "losses": losses if isinstance(losses, list) else None,
        "ms": 1e3 * seconds / parts,
        "tokens/s": tokens / seconds,
        "TFLOP/s": rate,
        "MFU %": 100 * rate / peak if rate and peak else None,
        "peak GiB": devices.memory_report(chip).get("max allocated", 0) / 2**30,
        "compile s": subject.facts().get("compile s"),
    }
    try:
        row["kernels"] = kernels(subject)
        row["busy %"] = 100 * sum(taken for _, _, taken in row["kernels"]) / seconds
    except Exception as error:  # a container may forbid it; the times are there
        row["kernels"] = [[f"no profile: {error}"[:200], 0, 0.0]]
    return row


def training(cell: Cell, size: Size, device: str, folder: Path) -> Training:
    """The subject of a training step. The first one of ours leaves its weights and samples to peers
    of its size."""
    kind, _, compiled = cell.kind.partition("-")
    peers = {peer.kind.partition("-")[0] for peer in CELLS if peer.size == cell.size}
    has_peers = bool(peers - {"ours", "olmoe"})
    return Training(
        kind,
        asdict(size),
        "bf16",
        device,
        start=str(folder / f"{cell.size}.pt") if has_peers else "",
        compiled=bool(compiled),
        flags=flags_on(device, cell.flags).split(),
        warmup=WARM_UP,
    )


def decoder(kind: str, size: Size, new: int, device: str, folder: Path) -> generate.Ours:
    """The subject that decodes `new` tokens of each text."""
    run = generate.make_run(folder, size, "bf16", device)
    if kind == "decode":
        return generate.Ours(run, size.micro_batch, new, device, "bf16")
    hf = generate.export(folder, run)
    compiled = kind.endswith("-compiled")
    return generate.Transformers(hf, size.micro_batch, new, device, compiled=compiled)


def kernels(subject: Subject) -> list[tuple[str, int, float]]:
    """(name, how often, seconds) of each kernel of its work on a device, or of each operation on a
    CPU, the longest first."""
    activities = torch.profiler.supported_activities()
    if not torch.accelerator.is_available():
        activities = {torch.profiler.ProfilerActivity.CPU}
    with torch.profiler.profile(activities=activities) as run:
        subject.work()
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


def free(device: str) -> int:
    """Free what nothing refers to; bytes of device memory that are still allocated."""
    gc.unfreeze()  # our contestant freezes what it built, as pretrain_gpt.py does
    gc.collect()
    torch._dynamo.reset()
    if device == "cpu":
        return 0
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_allocated()


def run_cell(cell: Cell, device: str, folder: Path) -> bool:
    """Measure one and write its line; whether this process may go on."""
    usable = True
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            row = measure(cell, device, folder)
    except ModuleNotFoundError as error:  # of a peer
        row = {"absent": f"{error.name} is not installed"}
    except (Exception, SystemExit) as error:  # an error is a result, and others follow
        message = output.getvalue().strip() if isinstance(error, SystemExit) else str(error)
        row = {"error": f"{type(error).__name__}: {message}"[:600]}
        usable = "CUDA error" not in message
        traceback.print_exc()
    print(output.getvalue(), file=sys.stderr)
    with open(folder / "cells.jsonl", "a", encoding="utf-8") as file:
        print(json.dumps(row), file=file)
    figures = {name: value for name, value in row.items() if name != "kernels"}
    print(cell.name, cell.kind, figures, flush=True)
    return usable and free(device) < LEFT_BYTES


def main(argv: list[str]) -> int:
    """Measure them in turn."""
    device, folder, first = argv
    for cell in CELLS[int(first) :]:
        if not run_cell(cell, device, Path(folder)) and cell is not CELLS[-1]:
            print("that left this process unusable or memory behind", flush=True)
            return NEXT_PROCESS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
