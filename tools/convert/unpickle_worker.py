"""Reads tensors out of torch's pickled files, in a process of its own: the only file in which
anything is unpickled.

Each line of its input is a job in JSON, each line of its output the answer, null or what is wrong
with the file:

    ["read", "FILE.pt", "OUT.safetensors", "OUT.json", "PREFIX", ...]
    ["write", "IN.safetensors", "IN.json", "FILE.pt"]

No name in a pickle leads to anything but the stand-ins below: `find_class` imports nothing, and a
name that is not listed ends the program. Storages are read straight from the archive, by name and
length, and nothing is unpacked to disk. So the worst file makes an error. `write` is the other
direction, for files that Megatron-LM shall read.

read: tensors whose path in the nested dicts, joined by dots, begins with a PREFIX go to
OUT.safetensors under that path; plain values (numbers, texts, lists; a Namespace is a dict) go to
OUT.json. Source of the layout: torch.serialization.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.safetensors_file import DTYPE_NAMES, Entry, SafetensorsFile, write_file
from megatron.small_files import open_regular

MAX_PICKLE_BYTES = 1 << 28
MAX_DEPTH = 100
# of the root: they hold tensors, and no plain values that count
_LARGE = re.compile(r"model\d*|optimizer")


class Refused(Exception):
    """What is wrong with the file."""


@dataclass(frozen=True)
class Storage:
    """A run of numbers in the archive."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True)
class TensorPlace:
    """A tensor as a view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Opaque:
    """Stands for an object that nobody needs: it takes everything and does nothing."""

    def __init__(self, *args: Any, **more: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Namespace:
    """Stands for argparse.Namespace and the like: what a pickle sets on it is kept as data."""

    values: Mapping[str, Any] = MappingProxyType({})

    def __setstate__(self, state: Any) -> None:
        self.values = state if isinstance(state, dict) else {}


class Table(dict):
    """Stands for collections.OrderedDict; a state dict's notes on it (_metadata) are dropped."""

    def __setstate__(self, state: Any) -> None:
        pass


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> TensorPlace:
    """Stands for torch._utils._rebuild_tensor_v2."""
    numbers = (offset, *shape, *stride)
    if (
        not isinstance(storage, Storage)
        or len(shape) != len(stride)
        or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    ):
        raise Refused("a tensor with a place that makes no sense")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if prod(shape) and last >= storage.numel:
        raise Refused(
            f"a tensor of shape {list(shape)} reaches beyond its storage of {storage.numel} numbers"
        )
    return TensorPlace(storage, offset, tuple(shape), tuple(stride))


def _parameter(data: Any, *rest: Any) -> Any:
    """Stands for torch._utils._rebuild_parameter."""
    return data


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
# Every name that a pickle may use, and what stands for it.
ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): tuple,
    ("torch", "device"): Opaque,
    ("collections", "OrderedDict"): Table,
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
    ("builtins", "set"): list,
    ("__builtin__", "set"): list,
    ("datetime", "timedelta"): Opaque,
    ("pathlib", "PosixPath"): Opaque,
    ("signal", "Signals"): Opaque,
    ("_io", "BytesIO"): Opaque,
    ("_codecs", "encode"): Opaque,
    ("numpy", "ndarray"): Opaque,
    ("numpy", "dtype"): Opaque,
    ("numpy.core.multiarray", "_reconstruct"): Opaque,
    ("numpy._core.multiarray", "_reconstruct"): Opaque,
    ("numpy.core.multiarray", "scalar"): Opaque,
    ("numpy._core.multiarray", "scalar"): Opaque,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", name): f"torch.{name}" for name in _DTYPES},
}
# enumerations in arguments; nothing is imported
_OPAQUE_MODULES = ("megatron.", "transformer_engine.")


class _Unpickler(pickle.Unpickler):
    """Knows the names of ALLOWED and no other."""

    def find_class(self, module: str, name: str) -> Any:
        """See ALLOWED."""
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module.startswith(_OPAQUE_MODULES) and name.isidentifier():
            return Opaque
        raise Refused(
            f"its pickle names {module}.{name}, which is not among the names of plain tensors; it "
            "may be meant to run code, and is not read"
        )

    def persistent_load(self, pid: Any) -> Storage:
        """A storage: ("storage", its type, its key, where it was, its numbers)."""
        try:
            kind, dtype, key, _, numel = pid
        except (TypeError, ValueError):
            raise Refused("a persistent id that is no storage") from None
        if (
            kind != "storage"
            or not isinstance(dtype, torch.dtype)
            or not isinstance(key, str)
            or type(numel) is not int
        ):
            raise Refused("a persistent id that is no storage")
        return Storage(dtype, key, numel)


class TorchFile:
    """An open file of torch.save's zip layout: `tree`, the unpickled stand-ins, and the tensors'
    bytes."""

    def __init__(self, path: Path):
        try:
            self._zip = zipfile.ZipFile(open_regular(path))
        except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise Refused(
                f"is not a zip file as torch.save writes it since version 1.6 ({error}); load an "
                "older one there and save it again"
            ) from None
        self._names = set(self._zip.namelist())
        pickles = [
            name for name in self._names if name.count("/") == 1 and name.endswith("/data.pkl")
        ]
        if len(pickles) != 1 or len(self._names) != len(self._zip.namelist()):
            raise Refused("is a zip file, but not one of torch.save")
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = self._prefix + "byteorder"
        if order in self._names and self._bytes(order, 16) != b"little":
            raise Refused("was written on a big-endian machine, which is not read")
        data = self._bytes(pickles[0], MAX_PICKLE_BYTES)
        try:
            self.tree = _Unpickler(io.BytesIO(data), encoding="utf-8").load()
        except Refused:
            raise
        # a stand-in called with what it cannot take, a broken pickle: always the file's fault
        except Exception as error:
            raise Refused(
                f"its pickle cannot be read ({type(error).__name__}: {str(error)[:200]})"
            ) from None

    def _bytes(self, name: str, limit: int) -> bytearray:
        """A member that is stored plain and no longer than `limit`."""
        info = self._zip.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
            raise Refused(
                f"its member {name} is compressed or has {info.file_size} bytes where at most "
                f"{limit} belong"
            )
        data = bytearray(info.file_size)
        try:
            with self._zip.open(info) as member:
                done = member.readinto(data)
                if done != len(data) or member.read(1):
                    raise Refused(f"its member {name} ends early; the file is damaged")
        except (zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:
            raise Refused(f"its member {name} is damaged ({error})") from None
        return data

    def check(self, place: TensorPlace) -> str:
        """The name of a tensor's member, which is there and has the length that it should have."""
        storage = place.storage
        name = f"{self._prefix}data/{storage.key}"
        length = storage.numel * storage.dtype.itemsize
        if name not in self._names:
            raise Refused(f"lacks its member {name}")
        if self._zip.getinfo(name).file_size != length:
            raise Refused(
                f"its member {name} has {self._zip.getinfo(name).file_size} bytes, should have "
                f"{length}"
            )
        return name

    def tensor(self, place: TensorPlace) -> torch.Tensor:
        """The numbers of a tensor."""
        storage = place.storage
        data = self._bytes(self.check(place), storage.numel * storage.dtype.itemsize)
        if not prod(place.shape):
            return torch.empty(place.shape, dtype=storage.dtype)
        return torch.frombuffer(data, dtype=storage.dtype).as_strided(
            place.shape, place.stride, place.offset
        )


def leaves(tree: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, TensorPlace]]:
    """(path, tensor) of all tensors in nested dicts and lists."""
    if depth > MAX_DEPTH:
        raise Refused("its pickle is nested too deeply")
    if isinstance(tree, TensorPlace):
        yield path, tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}.{key}" if path else str(key), depth + 1)


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON data: what is no number, text, list, dict or Namespace becomes None."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > MAX_DEPTH:
        raise Refused("its pickle is nested too deeply")
    if isinstance(value, Namespace):
        value = value.values
    if isinstance(value, Mapping):
        return {str(key): plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one, depth + 1) for one in value]
    return None


def read(source: Path, tensors: Path, values: Path, prefixes: list[str]) -> None:
    """See the head of this file."""
    file = TorchFile(source)
    entries = []
    found: set[str] = set()
    for name, place in leaves(file.tree):
        if not name.startswith(tuple(prefixes)):
            continue
        if name in found:
            raise Refused(f"holds {name} twice")
        if place.storage.dtype not in DTYPE_NAMES:
            raise Refused(f"{name} has a dtype that is not converted")
        file.check(place)
        found.add(name)
        entries.append(
            Entry(name, place.storage.dtype, place.shape, lambda place=place: file.tensor(place))
        )
    write_file(tensors, entries)
    root = file.tree if isinstance(file.tree, dict) else {}
    kept = {
        key: value
        for key, value in root.items()
        if isinstance(key, str) and not _LARGE.fullmatch(key)
    }
    values.write_text(json.dumps(plain(kept)), encoding="utf-8")


def write(tensors: Path, values: Path, target: Path) -> None:
    """Save a nested dict: "values" at the root, "args" as a Namespace, and each tensor at its path
    ("paths")."""
    table = json.loads(values.read_text(encoding="utf-8"))
    root: dict[str, Any] = {"args": argparse.Namespace(**table["args"]), **table["values"]}
    with SafetensorsFile(tensors) as file:
        for name, path in table["paths"].items():
            inner = root
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = file.read(name)
    torch.save(root, target)


def answer(job: list[str]) -> str | None:
    """Do a job; None, or what is wrong."""
    command, *paths = job
    try:
        if command == "read":
            read(*map(Path, paths[:3]), paths[3:])
        else:
            write(*map(Path, paths))
    except (Refused, CheckpointError, OSError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
