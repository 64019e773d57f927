"""Shards of a killed hf-export: complete ones, by the checksums recorded when they were written,
are not written again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron import small_files
from megatron.checkpoint.filesystem import DISK, CheckpointError
from megatron.checkpoint.safetensors_file import Written
from megatron.checkpoint.safetensors_reader import SafetensorsFile

NAME = ".shards.json"


class KeptShards:
    """The finished shards in a folder. `purpose` says which tensors of which checkpoint they are
    made of; those made for another one are removed, as is all that is not noted."""

    def __init__(self, folder: Path, purpose: str):
        self._folder = folder
        self._notes: dict[str, Any] = {"purpose": purpose, "shards": {}}
        try:
            notes = small_files.read_json(folder / NAME)
            if notes["purpose"] == purpose and isinstance(notes["shards"], dict):
                self._notes = notes
        except (OSError, ValueError, TypeError, KeyError):
            pass
        for path in folder.iterdir():
            if path.name not in (NAME, *self._notes["shards"]):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def has(self, name: str) -> bool:
        """Is this shard there, every byte as it was written? One that is not is removed."""
        note = self._notes["shards"].get(name)
        if note is None:
            return False
        try:
            with SafetensorsFile(self._folder / name) as file:
                if (
                    file.header_crc32 == note["header"]
                    and file.locations.keys() == note["sums"].keys()
                ):
                    for key, sums in note["sums"].items():
                        location = file.locations[key]
                        data = bytearray(location.stop - location.start)
                        file.read_into(key, memoryview(data), sums=sums)
                    return True
        except (CheckpointError, TypeError, KeyError, IndexError, AttributeError):
            pass  # damaged, or the notes are
        (self._folder / name).unlink(missing_ok=True)
        return False

    def add(self, name: str, written: Written) -> None:
        """Record a complete shard."""
        self._notes["shards"][name] = {"header": written.header_crc32, "sums": written.sums}
        new = self._folder / f"{NAME}.new"
        DISK.write_file(new, json.dumps(self._notes).encode())
        DISK.rename(new, self._folder / NAME)

    def close(self) -> None:
        """Remove the records, since the folder is complete."""
        (self._folder / NAME).unlink(missing_ok=True)
