"""Checkpoint writing and reading beside what the machine's disk and memory can do."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cases.subject import Subject
from harness import Case, Setup, Side, benchmark, each

from megatron.checkpoint import store
from megatron.checkpoint.async_writer import Writer
from megatron.checkpoint.safetensors_file import SECTION_BYTES, bytes_of, thread_count
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState

CPU = torch.device("cpu")
WEIGHTS = "weights_00000.safetensors"


def make_state(size: float, width: int) -> dict[str, torch.Tensor]:
    """Tensors of about `size` bytes, with names and shapes as a GPT's weights and Adam moments
    have; every page is touched."""
    h = width
    layer = {"qkv": (3 * h, h), "proj": (h, h), "norm": (h,), "fc1": (4 * h, h), "fc2": (h, 4 * h)}
    layers = max(1, round(size / (12 * sum(torch.Size(one).numel() for one in layer.values()))))
    shapes = {f"layers.{n}.{name}": one for n in range(layers) for name, one in layer.items()}
    kinds = ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    return {kind + name: torch.rand(shape) for kind in kinds for name, shape in shapes.items()}


class State(Subject):
    """Tensors, as many to read into, and a folder; each subject times one thing with them."""

    def __init__(self, folder: str, gb: float, width: int, cold: bool = False):
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        state = make_state(gb * 1e9, width)
        self.names = list(state)
        self.tensors = list(state.values())
        self.copies = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.slices = [TensorSlice.whole(name, tensor) for name, tensor in state.items()]
        self.cold = cold

    def turn(self) -> float:
        """Seconds of `timed`, between `before` and `after`."""
        self.before()
        start = time.perf_counter()
        self.timed()
        seconds = time.perf_counter() - start
        self.after()
        return seconds

    def before(self) -> None: ...

    def timed(self) -> None: ...

    def after(self) -> None: ...

    def forget(self, path: Path) -> None:
        """Put a file out of the page cache."""
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)

    def sections(self, tensors: list[torch.Tensor]) -> list[tuple[memoryview, int]]:
        """(bytes, place in a file that holds the tensors one behind the other), in pieces."""
        found = []
        at = 0
        for view in map(bytes_of, tensors):
            starts = range(0, len(view), SECTION_BYTES)
            found += [(view[low : low + SECTION_BYTES], at + low) for low in starts]
            at += len(view)
        return found


def remove_saved(folder: Path) -> None:
    """The checkpoint of iteration 1."""
    shutil.rmtree(store.iteration_directory(folder, 1))
    (folder / store.TRACKER).unlink()


class Save(State):
    """store.save, with checksums and fsync."""

    def timed(self) -> None:
        store.save(self.folder, 1, self.slices, RunState(iteration=1), "")

    def after(self) -> None:
        remove_saved(self.folder)


class RawWrite(State):
    """Write and fsync of as many bytes by as many threads."""

    def timed(self) -> None:
        file = os.open(self.folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        pieces = self.sections(self.tensors)
        os.posix_fallocate(file, 0, pieces[-1][1] + len(pieces[-1][0]))

        def write(piece: tuple[memoryview, int]) -> None:
            os.pwrite(file, *piece)
            os.posix_fadvise(file, piece[1], len(piece[0]), os.POSIX_FADV_DONTNEED)

        with ThreadPoolExecutor(thread_count()) as pool:
            list(pool.map(write, pieces))
        os.fsync(file)
        os.close(file)

    def after(self) -> None:
        (self.folder / "raw").unlink()


class Stall(State):
    """How long --async-save holds up training."""

    def __init__(self, **given: Any):
        self.writer = Writer()  # before torch has threads
        super().__init__(**given)
        self.writer.reserve(self.slices, CPU)

    def before(self) -> None:
        self._temporary = store.begin(self.folder, 1)

    def timed(self) -> None:
        self.writer.start(self.slices, self._temporary, 0, 1, CPU)

    def after(self) -> None:
        store.commit(self._temporary, 1, self.writer.result, RunState(iteration=1), "")
        remove_saved(self.folder)


class Copy(State):
    """One copy of the tensors to memory that is there."""

    def timed(self) -> None:
        for copy, tensor in zip(self.copies, self.tensors, strict=True):
            copy.copy_(tensor)


class Load(State):
    """Everything read into tensors that are there, every byte verified."""

    def warm_up(self) -> None:
        store.save(self.folder, 1, self.slices, RunState(iteration=1), "")
        self.file = store.iteration_directory(self.folder, 1) / WEIGHTS
        self.turn()
        assert all(map(torch.equal, self.copies, self.tensors)), "another tensor was read"

    def before(self) -> None:
        if self.cold:
            self.forget(self.file)

    def timed(self) -> None:
        saved = store.load(self.folder, 1)
        assert saved is not None
        with saved.reader() as reader:
            for name, tensor in zip(self.names, self.copies, strict=True):
                reader.read_later(name, None, tensor)
            reader.wait()


class RawRead(Load):
    """Reads of as many bytes of the same file by as many threads."""

    def warm_up(self) -> None:
        store.save(self.folder, 1, self.slices, RunState(iteration=1), "")
        self.file = store.iteration_directory(self.folder, 1) / WEIGHTS

    def timed(self) -> None:
        file = os.open(self.file, os.O_RDONLY)
        with ThreadPoolExecutor(thread_count()) as pool:
            sections = self.sections(self.copies)
            list(pool.map(lambda piece: os.preadv(file, [piece[0]], piece[1]), sections))
        os.close(file)


PAIRS = {
    "save": (Save, RawWrite, "write and fsync"),
    "async-save": (Stall, Copy, "copy in memory"),
    "load": (Load, RawRead, "read"),
    "load-cold": (Load, RawRead, "read"),
}


@benchmark
def checkpoint(setup: Setup, what: str = each(*PAIRS), gb: float = 1.0) -> Iterator[Case]:
    """A checkpoint of gb GB saved and loaded, checksums and fsync included, beside plain writes and
    reads of as many bytes with as many threads (load: from the page cache, load-cold: from the
    disk), and how long --async-save holds up training beside one copy in memory. Needs
    4 x gb GB of memory."""
    ours, other, name = PAIRS[what]
    size, width = (0.002, 64) if setup.small else (gb, 1024)
    given = {"gb": size, "width": width, "cold": what == "load-cold", "folder": str(setup.folder)}
    sides = setup.ours("ours", f"cases.checkpoint:{ours.__name__}", given)
    sides.append(Side(name, f"cases.checkpoint:{other.__name__}", given, ours=False))
    yield Case(what, sides, size, "GB")
