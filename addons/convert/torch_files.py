"""Files of torch.save: their plain values, and their tensors, which are read straight from the zip
archive when they are used. Nothing is unpickled here: unpickle_worker.py does it in a process of
its own."""

from __future__ import annotations

import functools
import io
import json
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from megatron.checkpoint.safetensors_file import bytes_of
from megatron.small_files import UnsafeName, open_regular, path_inside
from tools.shared.progress import Progress

from .links import ConversionError, Shape

MAX_PICKLE_BYTES = 1 << 28
WORTH_SHOWING = 10**8  # bytes
_BLOCK = 1 << 20
_HEADER = struct.Struct("<26xHH")  # of a zip member: lengths of name and extra field, which follow
_WORKER = Path(__file__).resolve().with_name("unpickle_worker.py")
Key = TypeVar("Key")


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a file, or a part of one: its numbers begin at byte `start`."""

    file: Path
    path: str
    dtype: torch.dtype
    shape: Shape
    stride: Shape
    start: int

    def read(self) -> torch.Tensor:
        """It. Raises ConversionError where the file has become shorter."""
        numbers = torch.empty(_reach(self.shape, self.stride), dtype=self.dtype)
        view = bytes_of(numbers)
        with open_regular(self.file) as file:
            file.seek(self.start)
            if file.readinto(view) != len(view):
                raise ConversionError(f"{self.file}: ends within {self.path}")
        return numbers.as_strided(self.shape, self.stride).contiguous()

    def part(self, start: int, shape: Shape) -> StoredPart:
        """As many numbers of a flat tensor, from the number `start` on, as fill the shape."""
        stride = torch.empty(shape, device="meta").stride()
        first = self.start + start * self.dtype.itemsize
        return replace(self, shape=shape, stride=stride, start=first)


@dataclass(frozen=True)
class TorchFile:
    """What a file holds: `root`, plain values, and its tensors by path."""

    path: Path
    root: Any
    tensors: Mapping[str, StoredPart]

    @property
    def values(self) -> Mapping[str, Any]:
        """The root if it is a dict, else nothing."""
        return self.root if isinstance(self.root, dict) else {}


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many numbers of a storage a tensor goes over."""
    steps = [(size - 1) * step for size, step in zip(shape, stride, strict=True)]
    return 1 + sum(steps) if prod(shape) else 0


@functools.lru_cache(32)  # tensors of one shape that have files of their own have one pickle
def _answer(data: bytes) -> str:
    """What the other process prints of a pickle."""
    words = [sys.executable, "-I", str(_WORKER)]
    done = subprocess.run(words, input=data, capture_output=True, check=False)
    ended = {"wrong": f"the process that reads its pickle ended with {done.returncode}"}
    return json.dumps(ended) if done.returncode else done.stdout.decode()


def unpickle(data: bytes, source: Path) -> dict[str, Any]:
    """See `unpickle_worker`. Raises ConversionError that names the `source`."""
    answer = json.loads(_answer(data))
    if "wrong" in answer:
        raise ConversionError(f"{source}: {answer['wrong']}")
    return answer


def read_file(
    path: Path, prefixes: tuple[str, ...] = ("",), section: tuple[int, int] | None = None
) -> TorchFile:
    """What is in a file, or in so many bytes of it (`section`: the first one, their number): the
    tensors whose path begins with one of `prefixes`, compared with their checksums. Raises
    ConversionError."""
    try:
        with open_regular(path_inside(path.parent, path.name)) as file:
            if section is None:
                return _Archive(path, file).content(prefixes)
            file.seek(section[0])
            data = io.BytesIO(file.read(section[1]))
            return _Archive(path, data, section[0]).content(prefixes)
    except (ConversionError, UnsafeName):
        raise
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror or error})") from None
    # zipfile has many, and numbers may be texts: always the file's fault
    except (EOFError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ConversionError(
            f"{path}: is damaged, or no zip file as torch.save writes it since version 1.6 "
            f"({error}); load an older one there and save it again"
        ) from None


class _Archive:
    """A zip archive of torch.save, open, which begins at byte `first` of the file `path`."""

    def __init__(self, path: Path, file: BinaryIO, first: int = 0):
        self._path = path
        self._file = file
        self._first = first
        self._zip = zipfile.ZipFile(file)
        self._members = {info.filename: info for info in self._zip.infolist()}
        self._checked: set[str] = set()
        pickles = [name for name in self._members if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if len(pickles) != 1 or len(self._members) != len(self._zip.infolist()):
            raise self._wrong("is a zip file, but not one of torch.save")
        self._pickle = pickles[0]
        self._folder = self._pickle.removesuffix("data.pkl")
        packed = [name for name, info in self._members.items() if info.compress_type]
        if packed or self._members[self._pickle].file_size > MAX_PICKLE_BYTES:
            name = (packed or pickles)[0]
            raise self._wrong(f"its member {name} is compressed, or above {MAX_PICKLE_BYTES} bytes")
        order = self._members.get(f"{self._folder}byteorder")
        if order and (order.file_size != len("little") or self._zip.read(order) != b"little"):
            raise self._wrong("was written on a big-endian machine, which is not read")

    def _wrong(self, text: str) -> ConversionError:
        return ConversionError(f"{self._path}: {text}")

    def content(self, prefixes: tuple[str, ...]) -> TorchFile:
        """See `read_file`."""
        answer = unpickle(self._zip.read(self._pickle), self._path)
        tensors = {
            name: self._located(name, *location)
            for name, location in answer["tensors"].items()
            if name.startswith(prefixes)
        }
        return TorchFile(self._path, answer["values"], tensors)

    def _located(
        self,
        name: str,
        dtype_name: str,
        key: str,
        numbers: int,
        offset: int,
        shape: Sequence[int],
        stride: Sequence[int],
    ) -> StoredPart:
        """A tensor, of which this is printed. Raises ConversionError unless its storage is there,
        undamaged, and holds it."""
        dtype = getattr(torch, dtype_name)
        places = (numbers, offset, *shape, *stride)
        if (
            not all(type(number) is int and 0 <= number < 1 << 62 for number in places)
            or offset + _reach(shape, stride) > numbers
        ):
            raise self._wrong(f"{name}: shape {shape} reaches beyond its storage of {numbers}")
        member = f"{self._folder}data/{key}"
        info = self._members.get(member)
        length = numbers * dtype.itemsize
        if info is None or info.file_size != length:
            raise self._wrong(f"its member {member} is missing, or does not have {length} bytes")
        if member not in self._checked:
            self._checked.add(member)
            with self._zip.open(info) as data:
                while data.read(_BLOCK):
                    pass
        self._file.seek(info.header_offset)
        header = _HEADER.unpack(self._file.read(_HEADER.size))
        start = self._first + info.header_offset + _HEADER.size + sum(header)
        start += offset * dtype.itemsize
        return StoredPart(self._path, name, dtype, tuple(shape), tuple(stride), start)


def read_all(paths: Mapping[Key, Path], prefixes: tuple[str, ...] = ("",)) -> dict[Key, TorchFile]:
    """`read_file` of each, with progress."""
    sizes = {key: path.stat().st_size if path.is_file() else 0 for key, path in paths.items()}
    progress = Progress(sum(sizes.values()))
    files = {}
    for key, path in paths.items():
        files[key] = read_file(path, prefixes)
        progress.shift += sizes[key]
        if progress.total >= WORTH_SHOWING:
            progress.update(
                0, f"checked {progress.shift / 1e9:.2f} of {progress.total / 1e9:.2f} GB"
            )
    progress.clear()
    return files
