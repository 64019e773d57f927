"""Reads the tokens of many files in any order, without a mapping of each."""

import resource
import weakref
from collections.abc import Sequence

import numpy as np

from megatron.data.epoch.token_files import TokenFile, open_corpus
from megatron.data.token_bytes import TokenBytes

MAX_OPEN = 30_000  # files that are kept open


class TokenReader:
    """Reads tokens of files, which are opened when they are first read; beyond `limit` the one
    opened first is closed.

    The process's limit of open files is raised as far as it may be. Raises ValueError for a file
    that has another size than at the start, and where it cannot be read.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = list(files)
        self._opened: dict[int, TokenBytes] = {}
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
        return np.frombuffer(opened.read(first * size, count * size), file.dtype)

    def _open(self, number: int) -> TokenBytes:
        file = self.files[number]
        opened = open_corpus(file.prefix)
        if opened.size != file.bin_bytes:
            opened.close()
            raise ValueError(
                f"{file.prefix}.bin: has {opened.size} bytes, at the start of this run it had "
                f"{file.bin_bytes}; start again, and leave data alone while they are read "
                "[file-changed-while-read]"
            )
        if len(self._opened) >= self.limit:
            self._opened.pop(next(iter(self._opened))).close()
        self._opened[number] = opened
        return opened

    def __getstate__(self) -> list[TokenFile]:
        return self.files

    def __setstate__(self, files: list[TokenFile]) -> None:
        TokenReader.__init__(self, files)


def _close(opened: dict[int, TokenBytes]) -> None:
    for file in opened.values():
        file.close()
