"""Reads tensors out of torch's pickled files, in a process of its own: the only file in which
anything is unpickled.

Each line of its input is a job in JSON, each line of its output the answer, null or what is wrong
with the file:

    ["read", "FILE.pt", "OUT.safetensors", "OUT.json", "PREFIX", ...]
    ["write", "IN.safetensors", "IN.json", "FILE.pt"]
    ["index", "FOLDER", "OUT.json"]
    ["append", "MEMORY", "NAME", "DTYPE", "[SIZE, ...]", "PLACES.jsonl", "FOLDER"]
    ["finish", "PLACES.jsonl", "IN.json", "FOLDER"]

No name in a pickle leads to anything but the stand-ins below: `find_class` imports nothing, and a
name that is not listed ends the program. Storages are read straight from the archive, by name and
length, and nothing is unpacked to disk. So the worst file makes an error. `write` is the other
direction, for files that Megatron-LM shall read.

read: tensors whose path in the nested dicts, joined by dots, begins with a PREFIX go to
OUT.safetensors under that path; plain values (numbers, texts, lists; a Namespace is a dict) go to
OUT.json. index: where the tensors of a torch.distributed.checkpoint folder are in its files goes to
OUT.json. append, finish: write such a folder, tensor by tensor. Source of the layouts:
torch.serialization, torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import io
import json
import mmap
import os
import pickle  # noqa: TID251
import re
import signal
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch

from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    SafetensorsFile,
    write_file,
)
from megatron.small_files import (
    UnsafeName,
    open_regular,
    path_inside,
    read_json,
    read_text,
    safe_name,
)

MAX_PICKLE_BYTES = 1 << 28
MAX_DEPTH = 100
METADATA = ".metadata"  # of torch.distributed.checkpoint
_DATA = "__0_0.distcp"  # the file of its first rank
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature, length of name and extra
# objects that say how many updates the optimizer has made
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.+")
_LARGE = re.compile(r"model\d*")  # of the root: they hold tensors, and no plain values that count


class Refused(Exception):
    """What is wrong with the file."""


@dataclass(frozen=True)
class Storage:
    """A run of numbers in the archive."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True)
class TensorView:
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


class Properties:
    """Stands for torch.distributed.checkpoint's TensorProperties."""

    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


class Tensor(Namespace):
    """Stands for its TensorStorageMetadata: properties, size, chunks."""


class Object(Namespace):
    """Stands for its BytesStorageMetadata."""


class Table(dict):
    """Stands for collections.OrderedDict; a state dict's notes on it (_metadata) are dropped."""

    def __setstate__(self, state: Any) -> None:
        pass


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rebuild_args: Any) -> TensorView:
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
    return TensorView(storage, offset, tuple(shape), tuple(stride))


def _parameter(data: Any, *rebuild_args: Any) -> Any:
    """Stands for torch._utils._rebuild_parameter."""
    return data


def _member(enumeration: Any, name: Any) -> Opaque:
    """Stands for getattr: Python 3.11.2 writes a member of an enumeration as getattr(its class, its
    name). Raises Refused for a part of anything else."""
    if enumeration is not Opaque:
        raise _refused_name("builtins", "getattr")
    return Opaque()


def _refused_name(module: str, name: str) -> Refused:
    return Refused(
        f"its pickle names {module}.{name}, which is not among the names of plain tensors; it "
        "may be meant to run code, and is not read"
    )


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
_DCP = "torch.distributed.checkpoint."
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
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,
    ("datetime", "timedelta"): Opaque,
    ("pathlib", "PosixPath"): Opaque,
    ("pathlib._local", "PosixPath"): Opaque,  # of Python 3.13
    ("signal", "Signals"): Opaque,
    ("_io", "BytesIO"): Opaque,
    ("_codecs", "encode"): Opaque,
    ("numpy", "ndarray"): Opaque,
    ("numpy", "dtype"): Opaque,
    ("numpy.core.multiarray", "_reconstruct"): Opaque,
    ("numpy._core.multiarray", "_reconstruct"): Opaque,
    ("numpy.core.multiarray", "scalar"): Opaque,
    ("numpy._core.multiarray", "scalar"): Opaque,
    (_DCP + "metadata", "Metadata"): Namespace,
    (_DCP + "metadata", "TensorStorageMetadata"): Tensor,
    (_DCP + "metadata", "BytesStorageMetadata"): Object,
    (_DCP + "metadata", "TensorProperties"): Properties,
    (_DCP + "metadata", "ChunkStorageMetadata"): Namespace,
    (_DCP + "metadata", "MetadataIndex"): Namespace,
    (_DCP + "metadata", "StorageMeta"): Opaque,
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"): Opaque,
    (_DCP + "filesystem", "_StorageInfo"): Namespace,
    ("torch.serialization", "_get_layout"): Opaque,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Namespace,
    ("deepspeed.utils.mixed_precision_linkage", "fragment_address"): Namespace,
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): Namespace,
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): Namespace,
    **{("signal", sig.name): Opaque() for sig in signal.Signals},  # of Python 3.11.2
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", name): f"torch.{name}" for name in _DTYPES},
}
# enumerations in arguments, plans of saving in metadata; nothing is imported
_OPAQUE_MODULES = ("megatron.", "deepspeed.", "internlm.", "transformer_engine.", _DCP + "planner")


class _Unpickler(pickle.Unpickler):
    """Knows the names of ALLOWED and no other."""

    def find_class(self, module: str, name: str) -> Any:
        """See ALLOWED."""
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module.startswith(_OPAQUE_MODULES) and name.isidentifier():
            return Opaque
        raise _refused_name(module, name)

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


def unpickle(data: bytes | bytearray) -> Any:
    """The stand-ins that a pickle makes."""
    try:
        return _Unpickler(io.BytesIO(data), encoding="utf-8").load()
    except Refused:
        raise
    # a stand-in called with what it cannot take, a broken pickle: always the file's fault
    except Exception as error:
        raise Refused(
            f"its pickle cannot be read ({type(error).__name__}: {str(error)[:200]})"
        ) from None


class Section(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file."""
        self._position = offset + (0, self._position, self._length)[whence]
        if self._position < 0:
            raise ValueError("a negative position")
        return self._position

    def tell(self) -> int:
        """As of any file."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        size = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(size)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class TorchFile:
    """An open file of torch.save's zip layout: `tree`, the unpickled stand-ins, and the tensors'
    bytes."""

    def __init__(self, file: Any):
        self._file = file
        try:
            self._zip = zipfile.ZipFile(file)
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
        self.tree = unpickle(data)

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
                assert isinstance(member, zipfile.ZipExtFile)
                done = member.readinto(data)
                if done != len(data) or member.read(1):
                    raise Refused(f"its member {name} ends early; the file is damaged")
        except (zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:
            raise Refused(f"its member {name} is damaged ({error})") from None
        return data

    def check(self, location: TensorView) -> str:
        """The name of a tensor's member, which is there and has the length that it should have."""
        storage = location.storage
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

    def locate(self, location: TensorView) -> tuple[int, int]:
        """(where the data of a tensor begins in the file, its CRC-32)."""
        info = self._zip.getinfo(self.check(location))
        if info.compress_type != zipfile.ZIP_STORED:
            raise Refused(f"its member {info.filename} is compressed")
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
            raise Refused(f"its member {info.filename} has no header; the file is damaged")
        _, name, extra = _LOCAL_HEADER.unpack(header)
        return info.header_offset + len(header) + name + extra, info.CRC

    def tensor(self, location: TensorView) -> torch.Tensor:
        """The numbers of a tensor."""
        storage = location.storage
        data = self._bytes(self.check(location), storage.numel * storage.dtype.itemsize)
        if not prod(location.shape):
            return torch.empty(location.shape, dtype=storage.dtype)
        return torch.frombuffer(data, dtype=storage.dtype).as_strided(
            location.shape, location.stride, location.offset
        )


def _opened(path: Path) -> BinaryIO:
    """A file, open."""
    try:
        return open_regular(path_inside(path.parent, path.name))
    except OSError as error:
        raise Refused(f"cannot be read ({error.strerror})") from None


def leaves(tree: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, TensorView]]:
    """(path, tensor) of all tensors in nested dicts and lists."""
    if depth > MAX_DEPTH:
        raise Refused("its pickle is nested too deeply")
    if isinstance(tree, TensorView):
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
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    return None


def read(source: Path, tensors: Path, values: Path, prefixes: list[str]) -> None:
    """See the head of this file."""
    file = TorchFile(_opened(source))
    entries = []
    names: set[str] = set()
    for name, location in leaves(file.tree):
        if not name.startswith(tuple(prefixes)):
            continue
        if name in names:
            raise Refused(f"holds {name} twice")
        if location.storage.dtype not in DTYPE_NAMES:
            raise Refused(f"{name} has a dtype that is not converted")
        file.check(location)
        names.add(name)
        entries.append(
            Entry(name, location.storage.dtype, location.shape, partial(file.tensor, location))
        )
    write_file(tensors, entries)
    root = file.tree if isinstance(file.tree, dict) else {}
    plain_values = {
        key: value
        for key, value in root.items()
        if isinstance(key, str) and not _LARGE.fullmatch(key)
    }
    values.write_text(json.dumps(plain(plain_values)), encoding="utf-8")


def _numbers(value: Any) -> list[int]:
    """A shape or an offset."""
    if not isinstance(value, (list, tuple)) or not all(
        type(number) is int and 0 <= number < 1 << 48 for number in value
    ):
        raise Refused(f"{METADATA} has a shape or offset that makes no sense")
    return list(value)


def _dict_of(value: Any, name: str) -> dict:
    """A dict among the values of a stand-in."""
    values = value.values if isinstance(value, Namespace) else {}
    if not isinstance(values.get(name), dict):
        raise Refused(f"{METADATA} is not the metadata of torch.distributed.checkpoint")
    return values[name]


def _stored(
    folder: Path, files: dict[str, BinaryIO], info: Namespace
) -> tuple[TorchFile, str, int]:
    """What torch.save has written into a larger file, its name, and where it begins there."""
    name = safe_name(info.values.get("relative_path"), METADATA)
    if info.values.get("transform_descriptors"):
        raise Refused("its tensors are compressed or encrypted, which is not read")
    section = _numbers([info.values.get("offset"), info.values.get("length")])
    if name not in files:
        files[name] = _opened(path_inside(folder, name))
    return TorchFile(Section(files[name], *section)), name, section[0]


def _chunk(folder: Path, files: dict[str, BinaryIO], info: Namespace, dtype: str, sizes: list[int]):
    """{file, start, crc} of one part of a tensor."""
    file, name, first = _stored(folder, files, info)
    tensor = file.tree
    if not isinstance(tensor, TensorView):
        raise Refused("is not a tensor")
    shape = list(tensor.shape)
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    plain = all(
        size == 1 or step == want
        for size, step, want in zip(shape, tensor.stride, steps, strict=True)
    )
    fills_storage = tensor.offset == 0 and tensor.storage.numel == prod(shape)
    if shape != sizes or str(tensor.storage.dtype) != dtype or not plain or not fills_storage:
        raise Refused(
            f"has {tensor.storage.dtype} of shape {shape}; {METADATA} says {dtype} of shape {sizes}"
        )
    start, crc = file.locate(tensor)
    return {"file": name, "start": first + start, "crc": crc}


def _object(
    folder: Path, files: dict[str, BinaryIO], name: str, locations: Mapping[Any, Namespace]
) -> Any:
    """The plain values of a stored object."""
    info = locations.get((name, None))
    if info is None:
        raise Refused(f"{METADATA} does not say where {name} is")
    try:
        return plain(_stored(folder, files, info)[0].tree)
    except Refused as wrong:
        raise Refused(f"{info.values.get('relative_path')}: {name}: {wrong}") from None


def index(folder: Path, target: Path) -> None:
    """See the head of this file. OUT.json: {"tensors": {name: {"dtype", "shape", "chunks":
    [{"offsets", "sizes", "file", "start", "crc"}]}}, "objects": {name: plain values}}. Of objects
    those of the optimizer alone are read, the others are null."""
    with _opened(folder / METADATA) as file:
        data = file.read(MAX_PICKLE_BYTES + 1)
    if len(data) > MAX_PICKLE_BYTES:
        raise Refused(f"{METADATA} has more than {MAX_PICKLE_BYTES} bytes")
    metadata = unpickle(data)
    locations = {}
    for key, info in _dict_of(metadata, "storage_data").items():
        if not isinstance(key, Namespace) or not isinstance(info, Namespace):
            raise Refused(f"{METADATA} is not the metadata of torch.distributed.checkpoint")
        offset = key.values.get("offset")
        fqn = key.values.get("fqn")
        locations[str(fqn), None if offset is None else tuple(_numbers(offset))] = info
    tensors: dict[str, Any] = {}
    objects = {}
    files: dict[str, BinaryIO] = {}
    for name, entry in _dict_of(metadata, "state_dict_metadata").items():
        if not isinstance(name, str) or not isinstance(entry, (Tensor, Object)):
            raise Refused(f"{METADATA} is not the metadata of torch.distributed.checkpoint")
        if isinstance(entry, Object):
            is_state = _OPTIMIZER.fullmatch(name)
            objects[name] = _object(folder, files, name, locations) if is_state else None
            continue
        dtype = str(getattr(entry.values.get("properties"), "dtype", None))
        chunks = []
        for chunk in entry.values.get("chunks", ()):
            offsets, sizes = (_numbers(chunk.values.get(word)) for word in ("offsets", "sizes"))
            info = locations.get((name, tuple(offsets)))
            if info is None:
                raise Refused(f"{METADATA} does not say where {name} at {offsets} is")
            try:
                chunk_location = _chunk(folder, files, info, dtype, sizes)
            except Refused as wrong:
                file_name = info.values.get("relative_path")
                raise Refused(f"{file_name}: {name} at {offsets}: {wrong}") from None
            chunks.append({"offsets": offsets, "sizes": sizes, **chunk_location})
        shape = _numbers(entry.values.get("size"))
        tensors[name] = {"dtype": dtype, "shape": shape, "chunks": chunks}
    target.write_text(json.dumps({"tensors": tensors, "objects": objects}), encoding="utf-8")


def _save(value: Any, file: Path | BinaryIO) -> None:
    """torch.save. Raises Refused where the disk does."""
    try:
        torch.save(value, file)  # noqa: TID251
    except RuntimeError as error:  # torch's writer closes the file that it could not write
        reason = " ".join(str(error.__context__ or error).split())
        raise Refused(f"cannot be written ({reason[:300]})") from None


def write(tensors: Path, values: Path, target: Path) -> None:
    """Save a nested dict: "values" at the root, "args" as a Namespace, and each tensor at its path
    ("paths")."""
    table = read_json(values)
    root: dict[str, Any] = {"args": argparse.Namespace(**table["args"]), **table["values"]}
    with SafetensorsFile(tensors) as file:
        for name, path in table["paths"].items():
            inner = root
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = file.read(name)
    _save(root, target)


def append(memory: str, name: str, dtype: str, sizes: str, locations: str, folder: str) -> None:
    """Add a tensor to the data of a torch.distributed.checkpoint folder: its bytes are the first
    ones in the file `memory`. Where it is becomes a line of `locations`."""
    shape = json.loads(sizes)
    length = prod(shape) * DTYPES[dtype].itemsize
    with open(memory, "rb") as file, open(Path(folder) / _DATA, "ab") as data:
        if length:
            shared = mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE)
            value = torch.frombuffer(shared, dtype=DTYPES[dtype]).view(shape)
        else:
            value = torch.empty(shape, dtype=DTYPES[dtype])
        start = data.tell()
        _save(value, data)
        location = {"dtype": dtype, "start": start, "length": data.tell() - start}
    with open(locations, "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"name": name, **location}) + "\n")


def finish(locations: Path, index: Path, folder: Path) -> None:
    """Write .metadata, and the objects, of a folder whose tensors were appended. index: {"tensors":
    {key: {"shape", "chunks": [{"name" in `locations`, "offsets", "sizes"}]}}, "objects": [key]};
    objects are empty."""
    from torch.distributed.checkpoint import metadata as dcp  # noqa: TID251
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: TID251

    table = read_json(index)
    lines = map(json.loads, read_text(locations).splitlines())
    by_name = {line["name"]: line for line in lines}
    entries: dict[str, Any] = {}
    storage = {}
    for key, entry in table["tensors"].items():
        chunks = []
        for chunk in entry["chunks"]:
            location = by_name[chunk["name"]]
            info = _StorageInfo(_DATA, location["start"], location["length"])
            storage[dcp.MetadataIndex(key, chunk["offsets"])] = info
            box = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
            chunks.append(dcp.ChunkStorageMetadata(*box))
        properties = dcp.TensorProperties(dtype=DTYPES[location["dtype"]])
        size = torch.Size(entry["shape"])
        entries[key] = dcp.TensorStorageMetadata(properties, size, chunks)
    with open(folder / _DATA, "ab") as data:
        for key in table["objects"]:
            start = data.tell()
            _save([None], data)
            storage[dcp.MetadataIndex(key)] = _StorageInfo(_DATA, start, data.tell() - start)
            entries[key] = dcp.BytesStorageMetadata()
        data.flush()
        os.fsync(data.fileno())
    metadata = dcp.Metadata(entries, storage_data=storage, storage_meta=dcp.StorageMeta())
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def answer(job: list[str]) -> str | None:
    """Do a job; None, or what is wrong."""
    command, *paths = job
    try:
        if command == "read":
            source, tensors, values = map(Path, paths[:3])
            read(source, tensors, values, paths[3:])
        elif command == "append":
            append(*paths)
        elif command == "finish":
            finish(*map(Path, paths))
        elif command == "index":
            index(*map(Path, paths))
        else:
            write(*map(Path, paths))
    except (Refused, UnsafeName, CheckpointError, OSError) as error:
        return str(error)
    # stand-ins at places where others belong: always the file's fault
    except (AttributeError, TypeError, ValueError) as error:
        return f"is not laid out as it should be ({type(error).__name__}: {str(error)[:200]})"
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
