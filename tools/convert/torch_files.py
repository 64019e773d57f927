"""Pickled files by way of safetensors: they are read and written by
tools/convert/unpickle_worker.py in a process of its own, so that nothing is unpickled here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    SafetensorsFile,
    bytes_of,
    host_copy,
    write_file,
)
from megatron.small_files import read_json
from tools.convert.links import ConversionError, Header, Shape
from tools.shared.progress import Progress

WORTH_SHOWING = 10**8  # bytes; the start of the process takes longer than fewer
Key = TypeVar("Key")
WORKER = Path(__file__).resolve().with_name("unpickle_worker.py")


class Unpickler:
    """The process that unpickles, and a folder for its files, which are open until it is closed. A
    context manager."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._count = 0
        self._files: list[SafetensorsFile] = []
        paths = os.pathsep.join(
            filter(None, [str(WORKER.parents[2]), os.environ.get("PYTHONPATH")])
        )
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin and self._process.stdout, "both are pipes"
        self._jobs = self._process.stdin
        self._answers = self._process.stdout

    def _ask(self, source: Path, *job: object) -> None:
        """Run a job; a problem of `source` becomes a ConversionError."""
        self._send(*job)
        self._check(source)

    def _send(self, *job: object) -> None:
        """Begin a job."""
        # otherwise the process has ended, which its answer shows
        with contextlib.suppress(BrokenPipeError):
            self._jobs.write(json.dumps([str(word) for word in job]) + "\n")
            self._jobs.flush()

    def _check(self, source: Path) -> None:
        """Wait for the end of a job; a problem of `source` becomes a ConversionError."""
        answer = self._answers.readline()
        wrong = (
            json.loads(answer)
            if answer
            else f"the process that reads it ended with {self._process.wait()}"
        )
        if wrong is not None:
            raise ConversionError(f"{source}: {wrong}")

    def _names(self) -> tuple[Path, Path]:
        self._count += 1
        return self.folder / f"{self._count}.safetensors", self.folder / f"{self._count}.json"

    def read(self, path: Path, prefixes: Sequence[str] = ("",)) -> TorchFile:
        """Take a file apart: the tensors whose path begins with one of `prefixes`, and the plain
        values of its root."""
        tensors, values = self._names()
        self._ask(path, "read", path, tensors, values, *prefixes)
        file = SafetensorsFile(tensors)
        self._files.append(file)
        return TorchFile(path, file, read_json(values))

    def read_all(
        self, paths: Mapping[Key, Path], prefixes: Sequence[str] = ("",)
    ) -> dict[Key, TorchFile]:
        """`read` of each file, with progress."""
        sizes = {key: path.stat().st_size if path.is_file() else 0 for key, path in paths.items()}
        progress = Progress(sum(sizes.values()))
        files = {}
        for key, path in paths.items():
            files[key] = self.read(path, prefixes)
            progress.shift += sizes[key]
            if progress.total >= WORTH_SHOWING:
                progress.update(
                    0, f"unpacked {progress.shift / 1e9:.2f} of {progress.total / 1e9:.2f} GB"
                )
        progress.clear()
        return files

    def index(self, folder: Path) -> dict[str, Any]:
        """Where the tensors of a torch.distributed.checkpoint folder are; see `index` there."""
        _, table = self._names()
        self._ask(folder, "index", folder, table)
        return read_json(table)

    def write(
        self,
        path: Path,
        entries: Sequence[Entry],
        paths: Mapping[str, Sequence[str]],
        values: Mapping[str, Any],
        args: Mapping[str, Any],
    ) -> None:
        """Write a file: `values` and an args Namespace at its root, and each tensor at its path of
        keys."""
        tensors, table = self._names()
        write_file(tensors, entries)
        content = {
            "paths": {name: list(keys) for name, keys in paths.items()},
            "values": dict(values),
            "args": dict(args),
        }
        table.write_text(json.dumps(content), encoding="utf-8")
        self._ask(path, "write", tensors, table, path)
        tensors.unlink()

    def write_sharded(
        self, folder: Path, entries: Sequence[Entry], table: Mapping[str, Any]
    ) -> None:
        """Write the tensors of a torch.distributed.checkpoint folder; `table` as in `finish` there.
        A tensor goes to the process by memory, and is written there while the next one is made."""
        locations, index = self._names()
        locations.touch()
        sizes = {
            chunk["name"]: chunk["sizes"]
            for tensor in table["tensors"].values()
            for chunk in tensor["chunks"]
        }
        index.write_text(json.dumps(table), encoding="utf-8")
        memories = [_shared_memory(self.folder / f"memory{number}") for number in range(2)]
        try:
            for number, entry in enumerate(entries):
                memory, path = memories[number % 2]
                _fill(memory, bytes_of(host_copy(entry)))
                if number:
                    self._check(folder)
                self._send(
                    "append",
                    path,
                    entry.key,
                    DTYPE_NAMES[entry.dtype],
                    json.dumps(sizes[entry.key]),
                    locations,
                    folder,
                )
            if entries:
                self._check(folder)
            self._ask(folder, "finish", locations, index, folder)
        finally:
            for memory, _ in memories:
                os.close(memory)

    def close(self) -> None:
        """End the process, close the files."""
        for file in self._files:
            file.close()
        self._jobs.close()
        self._answers.close()
        self._process.wait()

    def __enter__(self) -> Unpickler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shared_memory(path: Path) -> tuple[int, str]:
    """A file in memory, open, and the path that another process opens; elsewhere than on Linux a
    new file at `path`."""
    if not hasattr(os, "memfd_create"):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), str(path)
    file = os.memfd_create("tensor")
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _fill(file: int, data: memoryview) -> None:
    """Write to the beginning of a file."""
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], written)


class TorchFile:
    """A pickled file, taken apart: `values` (the plain ones of its root), and its tensors, by
    path."""

    def __init__(self, path: Path, file: SafetensorsFile, values: dict[str, Any]):
        self.path = path
        self._file = file
        self.values = values

    def headers(self) -> dict[str, Header]:
        """Number format and shape by path."""
        return {
            key: (DTYPES[location.dtype], location.shape)
            for key, location in self._file.locations.items()
        }

    def header(self, name: str) -> Header:
        """Number format and shape of one tensor."""
        location = self._file.locations[name]
        return DTYPES[location.dtype], location.shape

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._file.read(name)

    def read_part(self, name: str, start: int, shape: Shape) -> torch.Tensor:
        """As many numbers of a tensor, from the number `start` on, as fill the shape."""
        numbers = torch.empty(shape, dtype=self.header(name)[0])
        self._file.read_into(name, bytes_of(numbers), start * numbers.itemsize)
        return numbers


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a file, or a part of a flat one: the numbers from `start` on."""

    file: TorchFile
    path: str
    shape: Shape
    start: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.file.header(self.path)[0]

    def read(self) -> torch.Tensor:
        """It."""
        return self.file.read_part(self.path, self.start, self.shape)
