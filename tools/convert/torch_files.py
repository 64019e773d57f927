"""Pickled files by way of safetensors: each is read or written by megatron/checkpoint/unpickle_worker.py in a process of
its own, so that nothing is unpickled here. Knows no model."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import megatron.checkpoint.disk
from megatron.checkpoint.safetensors_file import DTYPES, Entry, SafetensorsFile, write_file
from tools.convert.links import ConversionError, Header

WORKER = Path(megatron.checkpoint.disk.__file__).with_name("unpickle_worker.py")
ROOT = WORKER.parents[2]


def _worker(source: Path, *words: object) -> None:
    """Run the worker; its line of what is wrong with `source` becomes a ConversionError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, str(WORKER), *map(str, words)], env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"the reading process ended with {done.returncode}"])[-1]
        raise ConversionError(f"{source}: {reason}")


class TorchFile:
    """A pickled file, taken apart: `values` (the plain ones of its root), and its tensors, by path. A context manager."""

    def __init__(self, path: Path, folder: Path, prefixes: Sequence[str]):
        """Take the tensors whose path begins with one of `prefixes`; `folder`, for files of its own, has room for them."""
        self.path = path
        name = path.relative_to(path.anchor).as_posix().replace("/", "+")
        tensors, values = folder / f"{name}.safetensors", folder / f"{name}.json"
        _worker(path, "read", path, tensors, values, *prefixes)
        self.values: dict[str, Any] = json.loads(values.read_text(encoding="utf-8"))
        self._file = SafetensorsFile(tensors)

    def headers(self) -> dict[str, Header]:
        """Number format and shape by path."""
        return {key: (DTYPES[place.dtype], place.shape) for key, place in self._file.places.items()}

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._file.read(name)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_torch_file(path: Path, folder: Path, entries: Sequence[Entry], paths: Mapping[str, Sequence[str]],
                     values: Mapping[str, Any], args: Mapping[str, Any]) -> None:
    """Write a pickled file: `values` and an args Namespace at its root, and each tensor at its path of keys."""
    tensors, table = folder / "out.safetensors", folder / "out.json"
    write_file(tensors, entries)
    what = {"paths": {name: list(path) for name, path in paths.items()}, "values": dict(values), "args": dict(args)}
    table.write_text(json.dumps(what), encoding="utf-8")
    try:
        _worker(path, "write", tensors, table, path)
    finally:
        tensors.unlink()
        table.unlink()
