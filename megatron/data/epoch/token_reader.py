"""Reads the tokens of many files in any order, without a mapping of each."""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Sequence

import numpy as np

from megatron.data.epoch.token_files import TokenFile
from megatron.data.file_access import open_to_read, read_at
from megatron.data.indexed_dataset import bin_path

MAX_OPEN = 30_000  # files that are kept open


class TokenReader:
    """Reads tokens of files, which are opened when they are first read; beyond `limit` the one
    opened first is closed.

    The process's limit of open files is raised as far as it may be. Raises ValueError for a file
    that has another size than at the start, and where it cannot be read.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = list(files)
        self._opened: dict[int, int] = {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = (
            min(hard, len(self.files) + 4096)
            if hard != resource.RLIM_INFINITY
            else len(self.files) + 4096
        )
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            soft = needed
        self.limit = (
            MAX_OPEN if soft == resource.RLIM_INFINITY else max(16, min(MAX_OPEN, soft // 2))
        )
        weakref.finalize(self, _close, self._opened)

    def read(self, number: int, first: int, count: int) -> np.ndarray:
        """Tokens `first .. first + count` of file `number`, read-only."""
        file = self.files[number]
        size = self.files[number].dtype.itemsize
        opened = self._opened.get(number)
        if opened is None:
            opened = self._open(number)
        return np.frombuffer(
            read_at(opened, bin_path(file.prefix), first * size, count * size), file.dtype
        )

    def _open(self, number: int) -> int:
        file = self.files[number]
        opened = open_to_read(bin_path(file.prefix))
        size = os.fstat(opened).st_size
        if size != file.bin_bytes:
            os.close(opened)
            raise ValueError(
                f"{file.prefix}.bin: has {size} bytes, at the start of this run it had "
                f"{file.bin_bytes}; start again, and leave data alone while they are read "
                "[file-changed-while-read]"
            )
        if len(self._opened) >= self.limit:
            os.close(self._opened.pop(next(iter(self._opened))))
        self._opened[number] = opened
        return opened

    def __getstate__(self) -> list[TokenFile]:
        return self.files

    def __setstate__(self, files: list[TokenFile]) -> None:
        TokenReader.__init__(self, files)


def _close(opened: dict[int, int]) -> None:
    for file in opened.values():
        os.close(file)
