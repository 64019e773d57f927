"""InternLM's token files: X.bin has one sample per line, {"tokens": [ids]}, and X.bin.meta says
where each begins.

X.bin.meta is a .npy array of integers [n, 2 or more]: in the first column the byte where a line
begins, in the last one its tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tokenize
import uuid
import weakref
from array import array
from pathlib import Path

import numpy as np

from megatron.data.blend.paths import PARTIAL
from megatron.data.file_access import open_to_read, read_at
from megatron.data.preprocess.jsonl import ids_of
from megatron.small_files import open_regular

_NOT_AN_ARRAY = (SyntaxError, tokenize.TokenError, MemoryError, OverflowError, RecursionError)
MAX_LINE_BYTES = 1 << 26
BLOCK_BYTES = 1 << 16  # read at once where the end of a line is not known


def meta_path(bin_path: str) -> str:
    """The file next to X.bin that says where its lines begin."""
    return f"{bin_path}.meta"


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _load_meta(path: str, bin_bytes: int) -> np.ndarray:
    """The checked array of a .meta file of a .bin of so many bytes."""
    how = "make it again with the tokenizer that made it, or with tools/convert_data.py"
    try:
        with open_regular(path) as file:
            meta = np.load(file, allow_pickle=False)
    # numpy parses the header as Python and reserves what it says
    except (*_NOT_AN_ARRAY, ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{path}: not an array in numpy's .npy format ({_reason(error)}); {how} "
            "[packed-meta-malformed]"
        ) from None
    if (
        not isinstance(meta, np.ndarray)
        or meta.ndim != 2
        or meta.shape[1] < 2
        or meta.dtype.kind not in "iu"
    ):
        problem = (
            f"{meta.dtype} {list(meta.shape)}" if isinstance(meta, np.ndarray) else "several arrays"
        )
        raise ValueError(
            f"{path}: holds {problem}, not integers [samples, 2] (first byte of each line, its "
            f"tokens); {how} [packed-meta-malformed]"
        )
    meta = np.stack((meta[:, 0], meta[:, -1]), 1).astype(np.int64)
    outside = (meta[:, 0] < 0) | (meta[:, 0] >= bin_bytes)
    for wrong, column, reason in (
        (outside, 0, f"line begins at byte {{}}, {path[:-5]} has {bin_bytes} bytes"),
        (meta[:, 1] < 0, 1, "line has {} tokens"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{path}: entry {row} says that its {reason.format(meta[row, column])}; {how} "
                "[packed-meta-malformed]"
            )
    return meta


class JsonlTokens:
    """The samples of one X.bin, whose `prefix` is the path without .bin. Raises FileNotFoundError
    without X.bin.meta, ValueError for one that does not fit; reading a sample raises ValueError for
    a line that is not what the meta says."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.prefix = path.removesuffix(".bin")
        if not os.path.exists(meta_path(path)):
            raise FileNotFoundError(
                f"{meta_path(path)}: is missing next to {path}; copy it too, or make both again "
                "[packed-meta-missing]"
            )
        self._file = open_to_read(path)
        weakref.finalize(self, os.close, self._file)
        self.bin_bytes = os.fstat(self._file).st_size
        self._meta = _load_meta(meta_path(path), self.bin_bytes)
        self.lengths = self._meta[:, 1]

    def line(self, sample: int) -> bytes:
        """The line of a sample, without its end."""
        start = int(self._meta[sample, 0])
        after = int(self._meta[sample + 1, 0]) if sample + 1 < len(self._meta) else self.bin_bytes
        line = b""
        count = min(after - start, MAX_LINE_BYTES) if after > start else BLOCK_BYTES
        while True:
            if len(line) >= MAX_LINE_BYTES:
                raise ValueError(f"its line has more than {MAX_LINE_BYTES} bytes")
            count = min(count, self.bin_bytes - start - len(line))
            if count <= 0:
                return line
            searched = len(line)
            line += read_at(self._file, self.path, start + searched, count)
            end = line.find(b"\n", searched)
            if end >= 0:
                return line[:end]
            count = len(line)

    def ids(self, sample: int) -> np.ndarray:
        """All ids of a sample, int64."""
        try:
            ids = ids_of(self.line(sample))
            if len(ids) != self.lengths[sample]:
                raise ValueError(
                    f"has {len(ids)} tokens, {meta_path(self.path)} says {self.lengths[sample]}"
                )
        except ValueError as error:
            raise ValueError(
                f"{self.path}: sample {sample}, at byte {self._meta[sample, 0]}: {error}; make "
                "the file and its meta again, or copy both again [data-file-damaged]"
            ) from None
        return ids

    def id_range(self, limit: int | None = None) -> tuple[int, int]:
        """(smallest, largest) id of the first lines until they have `limit` tokens (None: all), (0,
        -1) without any."""
        tokens = 0
        lows: list[int] = []
        highs: list[int] = []
        for sample in range(len(self.lengths)):
            if limit is not None and tokens >= limit:
                break
            ids = self.ids(sample)
            tokens += len(ids)
            if len(ids):
                lows = [min([*lows, int(ids.min())])]
                highs = [max([*highs, int(ids.max())])]
        return (lows[0], highs[0]) if tokens else (0, -1)

    def read(self, sample: int, first: int, count: int) -> np.ndarray:
        """Ids `first .. first + count` of a sample, int64."""
        return self.ids(sample)[first : first + count]

    def bytes_of(self, sample: int, first: int, count: int) -> tuple[int, int]:
        """The bytes of the sample's line: where in it a token stands is not known."""
        start = int(self._meta[sample, 0])
        return start, start + len(self.line(sample))

    def fingerprint(self) -> bytes:
        """What distinguishes its samples from others: sizes, places and lengths."""
        return hashlib.sha256(self._meta.tobytes()).digest() + repr(self.bin_bytes).encode()


class JsonlWriter:
    """Writes X.bin and X.bin.meta under temporary names and, at the end of a `with`, gives both
    their names; after an exception nothing is left of them. The meta is of int64, so that files may
    be larger than 2 GiB."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._partial = f"{path}{PARTIAL}{uuid.uuid4().hex}"
        self._file = open(self._partial, "wb", buffering=1 << 20)  # noqa: SIM115 (closed in __exit__)
        self._offset = 0
        self._meta = array("q")

    def add(self, ids: np.ndarray) -> None:
        """Append a sample."""
        line = json.dumps({"tokens": ids.tolist()}).encode() + b"\n"
        self._file.write(line)
        self._meta.extend((self._offset, len(ids)))
        self._offset += len(line)

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        aside = self._partial, meta_path(self._partial)
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                with open(aside[1], "wb") as file:
                    np.save(file, np.frombuffer(self._meta, np.int64).reshape(-1, 2))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside[1], meta_path(self.path))
                os.replace(aside[0], self.path)
        finally:
            with contextlib.suppress(OSError):  # a full disk, which has been said
                self._file.close()
            for path in aside:
                Path(path).unlink(missing_ok=True)
