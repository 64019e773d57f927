"""Checkpoints made to harm, with checksums that are right, and what reads them. Knows no case and
judges nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.checkpoint.candidates import candidates
from megatron.checksums import crc32
from tests.checkpoint.saves import Unsynced, save


class Gadget:
    """Unpickled, it would leave a file behind."""

    def __init__(self, canary: str):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def gadget(protocol: int = 2) -> bytes:
    return pickle.dumps(Gadget(os.environ["CANARY"]), protocol)


def torch_file() -> bytes:
    """What torch.save makes of it."""
    buffer = io.BytesIO()
    torch.save({"model": Gadget(os.environ["CANARY"])}, buffer)
    return buffer.getvalue()


def climbing_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in ("../../canary", os.environ["CANARY"], "archive/data.pkl"):
            file.writestr(name, gadget())
    return buffer.getvalue()


def read_all(root: Path) -> None:
    """What a load does: candidates, metadata, every byte."""
    tries, problems = candidates(root / "run")
    if not tries:
        raise ValueError("nothing there: " + "; ".join(problems))
    with tries[0].open().reader() as reader:
        reader.verify()
        for name in reader.names():
            reader.read(name)


def checkpoint(root: Path) -> Path:
    return save(root / "run", 20, Unsynced())


def put(name: str, data: Callable[[], bytes]) -> Callable[[Path], object]:
    """A checkpoint in which one file is replaced."""
    return lambda root: (checkpoint(root) / name).write_bytes(data())


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """A checkpoint in which something else has a file's name."""

    def act(root: Path) -> None:
        path = checkpoint(root) / name
        path.unlink()
        make(path)

    return act


def signed(table: dict) -> bytes:
    """A manifest's text with the right checksum."""
    body = json.dumps({key: value for key, value in table.items() if key != "crc32"})[1:]
    zeroed = ('{"crc32": "00000000",\n' + body + "\n").encode()
    return zeroed.replace(b"00000000", crc32(zeroed).encode(), 1)


def manifest(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """A checkpoint whose manifest says something else."""

    def act(root: Path) -> None:
        path = checkpoint(root) / "manifest.json"
        table = json.loads(path.read_bytes())
        change(table)
        path.write_bytes(signed(table))

    return act


def small(name: str, data: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """A checkpoint in which one of the small files is another, and the manifest agrees."""

    def act(root: Path) -> None:
        path = checkpoint(root) / name
        path.write_bytes(data(path.read_bytes()))
        listed = path.with_name("manifest.json")
        table = json.loads(listed.read_bytes())
        table["files"][name] = {"bytes": path.stat().st_size, "crc32": crc32(path.read_bytes())}
        listed.write_bytes(signed(table))

    return act


def weights(
    change: Callable[[dict], object] | None = None, head: Callable[[bytes], bytes] | None = None
):
    """A checkpoint whose safetensors header is another, and the manifest agrees."""

    def act(root: Path) -> None:
        path = checkpoint(root) / "weights_00000.safetensors"
        data = path.read_bytes()
        stop = 8 + int.from_bytes(data[:8], "little")
        if change:
            table = json.loads(data[8:stop])
            change(table)
            text = json.dumps(table).encode()
            header = struct.pack("<Q", len(text)) + text
        else:
            header = head(data[8:stop])
        path.write_bytes(header + data[stop:])
        listed = path.with_name("manifest.json")
        table = json.loads(listed.read_bytes())
        table["files"][path.name] = {"bytes": path.stat().st_size, "crc32": crc32(header)}
        listed.write_bytes(signed(table))

    return act


def first(table: dict) -> dict:
    return table["tensors"]["decoder.weight"]


def rename_file(new: str) -> Callable[[dict], object]:
    """The weights' file by another name, wherever the manifest has it."""

    def change(table: dict) -> None:
        table["files"][new] = table["files"].pop("weights_00000.safetensors")
        for record in table["tensors"].values():
            for chunk in record["chunks"]:
                chunk["file"] = new

    return change


def huge_shape(table: dict) -> None:
    table["block_bytes"] = 1 << 30
    first(table).update(shape=[1 << 20, 1 << 20], chunks=[])
    first(table)["chunks"] = [
        {
            "file": "weights_00000.safetensors",
            "key": "decoder.weight",
            "bytes": 1 << 42,
            "box": [[0, 1 << 20]] * 2,
            "sums": ["00000000"] * (1 << 12),
        }
    ]
