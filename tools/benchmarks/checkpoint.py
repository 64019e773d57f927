#!/usr/bin/env python
"""Checkpoint writing and reading, compared with what the machine's disk and memory can do.

Everything runs in one process, in turns; the best of --rounds counts.

  save      store.save with checksums and fsync, and plain write and fsync of as many bytes with as
            many threads
  stall     how long --async-save holds up training, and one copy of the same tensors to memory that
            is already allocated
  writing   a loop of GEMMs while the other process writes, and the same loop alone
  load      reading everything into existing tensors with every byte verified, and plain reads of
            the same files; from the page cache, and after the files were dropped from it

The state is that of a GPT of --gb gigabytes: weights and both Adam moments in fp32. One process;
needs three times --gb of memory and twice --gb of disk in --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.checkpoint import store  # noqa: E402
from megatron.checkpoint.async_writer import Writer  # noqa: E402
from megatron.checkpoint.safetensors_file import SECTION_BYTES, bytes_of, thread_count  # noqa: E402
from megatron.checkpoint.sharded import TensorSlice  # noqa: E402
from megatron.checkpoint.state import RunState  # noqa: E402

HIDDEN = 1024
VOCAB = 50304
CPU = torch.device("cpu")
GOALS = {"save": 0.8, "stall": 1.3, "load, cached": 1.3, "load, cold": 1.3}


def make_state(size: float) -> dict[str, torch.Tensor]:
    """Tensors of about `size` bytes, names and shapes as a GPT has them, every page touched."""
    h = HIDDEN
    layer = {
        "qkv.weight": (3 * h, h),
        "qkv.bias": (3 * h,),
        "proj.weight": (h, h),
        "proj.bias": (h,),
        "norm.weight": (h,),
        "norm.bias": (h,),
        "fc1.weight": (4 * h, h),
        "fc1.bias": (4 * h,),
        "fc2.weight": (h, 4 * h),
        "fc2.bias": (h,),
    }
    shapes = {"embedding": (VOCAB, h)} if size > 1e9 else {}
    number = 0
    while 12 * sum(torch.Size(shape).numel() for shape in shapes.values()) < size:
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        number += 1
    kinds = ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    return {kind + name: torch.rand(shape) for kind in kinds for name, shape in shapes.items()}


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def sections(tensors: Sequence[torch.Tensor]) -> list[tuple[memoryview, int]]:
    """(bytes, place in a file that holds the tensors one behind the other) in pieces of
    SECTION_BYTES."""
    found = []
    at = 0
    for tensor in tensors:
        view = bytes_of(tensor)
        found += [
            (view[low : low + SECTION_BYTES], at + low)
            for low in range(0, len(view), SECTION_BYTES)
        ]
        at += len(view)
    return found


def raw_write(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    """Write and fsync a file of these bytes, nothing else, as fast as is known here: reserved, by
    several threads, the system is notified immediately that a piece may go to the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    pieces = sections(tensors)
    os.posix_fallocate(file, 0, pieces[-1][1] + len(pieces[-1][0]))

    def write(piece: tuple[memoryview, int]) -> None:
        os.pwrite(file, *piece)
        os.posix_fadvise(file, piece[1], len(piece[0]), os.POSIX_FADV_DONTNEED)

    with ThreadPoolExecutor(thread_count()) as pool:
        list(pool.map(write, pieces))
    os.fsync(file)
    os.close(file)


def raw_read(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    """Read a file into these tensors, by several threads."""
    file = os.open(path, os.O_RDONLY)
    with ThreadPoolExecutor(thread_count()) as pool:
        list(pool.map(lambda piece: os.preadv(file, [piece[0]], piece[1]), sections(tensors)))
    os.close(file)


def forget(folder: Path) -> None:
    """Put the files of a folder out of the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def products(count: int) -> None:
    """Some work of the kind that training does."""
    a = torch.ones(1024, 1024)
    for _ in range(count):
        a = torch.tanh(a @ a)


class Best:
    """The smallest time of each name."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def measure(self, name: str, action: Callable[[], object]) -> None:
        """Take the time of the action."""
        self.times[name] = min(self.times.get(name, float("inf")), seconds(action))


def measure(
    folder: Path, state: dict[str, torch.Tensor], writer: Writer, rounds: int
) -> dict[str, float]:
    """Seconds by name."""
    tensors = list(state.values())
    best = Best()
    slices = [TensorSlice.whole(name, tensor) for name, tensor in state.items()]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    writer.reserve(slices, CPU)
    work = max(
        1,
        round(
            2
            * sum(tensor.numel() for tensor in tensors)
            * 4e-9
            / max(1e-3, seconds(lambda: products(1)))
        ),
    )
    for number in range(1, rounds + 1):
        best.measure("write and fsync", lambda: raw_write(folder / "raw", tensors))
        (folder / "raw").unlink()
        best.measure(
            "save",
            lambda number=number: store.save(
                folder, number, slices, RunState(iteration=number), ""
            ),
        )
        shutil.rmtree(folder / f"iter_{number:07d}")
        best.measure(
            "copy",
            lambda: [copy.copy_(tensor) for copy, tensor in zip(copies, tensors, strict=True)],
        )
        best.measure("GEMMs alone", lambda: products(work))
        temporary = store.begin(folder, number)
        start = time.perf_counter()
        best.measure(
            "stall",
            lambda temporary=temporary, number=number: writer.start(
                slices, temporary, 0, number, CPU
            ),
        )
        best.measure("GEMMs in a save", lambda: products(work))
        store.commit(temporary, number, writer.result, RunState(iteration=number), "")
        whole = time.perf_counter() - start
        best.times["async save"] = min(best.times.get("async save", whole), whole)
        directory = store.iteration_directory(folder, number)
        for how in ("cached", "cold"):
            if how == "cold":
                forget(directory)
            best.measure(
                f"read, {how}",
                lambda file=directory / "weights_00000.safetensors": raw_read(file, copies),
            )
            if how == "cold":
                forget(directory)
            best.measure(
                f"load, {how}", lambda number=number: load(folder, number, state.keys(), copies)
            )
        for name, tensor, copy in zip(state, tensors, copies, strict=True):
            assert torch.equal(tensor, copy), name
        shutil.rmtree(directory)
        (folder / store.TRACKER).unlink()
    return best.times


def load(folder: Path, number: int, names: Sequence[str], into: Sequence[torch.Tensor]) -> None:
    """As training does it: metadata, then every tensor into its place."""
    with store.load(folder, number).reader() as reader:
        for name, tensor in zip(names, into, strict=True):
            reader.read_later(name, None, tensor)
        reader.wait()


def report(times: dict[str, float], size: int) -> list[str]:
    """A line for each ratio."""
    lines = [f"{size / 1e9:.2f} GB, {thread_count()} threads"]
    for name, against in (
        ("save", "write and fsync"),
        ("stall", "copy"),
        ("GEMMs in a save", "GEMMs alone"),
        ("load, cached", "read, cached"),
        ("load, cold", "read, cold"),
    ):
        mine = times[name]
        other = times[against]
        ratio = other / mine if name == "save" else mine / other
        goal = GOALS.get(name)
        met = (
            "" if goal is None else f" (goal: {'at least' if name == 'save' else 'at most'} {goal})"
        )
        what = "of the rate of" if name == "save" else "times"
        rates = [
            f" = {size / one / 1e9:5.2f} GB/s" * ("GEMMs" not in name) for one in (mine, other)
        ]
        both = [f"{one:7.3f} s{rate}" for one, rate in zip((mine, other), rates, strict=True)]
        lines.append(
            f"{name:16s} {both[0]}; {against:16s} {both[1]}: {ratio:.2f} {what} {against}{met}"
        )
    lines.append(
        f"an async save is on the disk {times['async save']:.3f} s after it was begun, or "
        "before the GEMMs end"
    )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--json", help="file to write the seconds to")
    args = parser.parse_args(argv)
    writer = Writer()  # before torch has threads
    try:
        state = make_state(args.gb * 1e9)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            times = measure(Path(folder), state, writer, args.rounds)
    finally:
        writer.close()
    size = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    print("\n".join(report(times, size)), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"bytes": size, **times}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
