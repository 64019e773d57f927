"""Compressed files and parquet, unpacked in pieces: whatever a file says of itself, the memory that
reading it takes is bounded.
"""

import contextlib
import gzip
import importlib
import io
import lzma
import os
import resource
import zlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

# what is unpacked before its size is known may take this: a dictionary of xz, pages of parquet
MEMORY = 512 << 20
WINDOW = 128 << 20  # the largest that zstd itself reads unless it is told to
ROWS = 256  # of a parquet file that are read at a time
ROWS_BYTES = 1 << 24  # of rows that are given together
CHUNK = 1 << 18
SCAN = 1 << 16
FEED = 1 << 10  # bytes of zstd that are unpacked at a time: to 32 MiB at most
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


def unpacked(raw: io.BufferedReader, packed: str) -> io.BufferedIOBase:
    """What a file holds that is `packed` ("gzip", "xz", "zstd", "" for not at all). Reading raises
    one of BROKEN, and ValueError for a file that takes too much memory."""
    if packed == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if packed == "xz":
        return io.BufferedReader(_ChunkReader(_xz(raw)), 1 << 20)
    if packed == "zstd":
        return io.BufferedReader(_ChunkReader(_zstd(raw)), 1 << 20)
    return raw


class _ChunkReader(io.RawIOBase):
    """The bytes that an iterator gives, as a file."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks = chunks
        self._out = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes; raises what the iterator raises."""
        while not self._out:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._out = memoryview(chunk)
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count


def _xz(raw: io.BufferedReader) -> Iterator[bytes]:
    """What any number of xz streams hold."""
    while packed := raw.read(SCAN).lstrip(b"\0"):  # zeros may stand between streams
        while packed:
            stream = lzma.LZMADecompressor(memlimit=MEMORY)
            while not stream.eof:
                try:
                    yield stream.decompress(packed, CHUNK)
                except lzma.LZMAError as error:
                    if "limit" in str(error):
                        raise _takes_memory(raw.name) from None
                    raise
                packed = raw.read(SCAN) if stream.needs_input else b""
                if stream.needs_input and not packed:
                    raise EOFError("it ends within a stream")
            packed = stream.unused_data.lstrip(b"\0")


def _zstd(raw: io.BufferedReader) -> Iterator[bytes]:
    """What any number of zstd frames hold; unlike the library's own reader it notices a cut one.
    The library unpacks all that it is given, so it is given little."""
    zstandard = library("zstandard", raw.name)
    machine = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    packed = b""
    while packed := packed or raw.read(FEED):
        frame = machine.decompressobj()
        size = fed = 0
        try:
            wide = zstandard.get_frame_parameters(packed).window_size > WINDOW
            while not frame.eof:
                if not packed:
                    raise EOFError("it ends within a frame")
                chunk = frame.decompress(packed)
                size += len(chunk)
                fed += len(packed)
                # 2 GB with zstd --long=31, which take memory as they fill: text is not so alike
                if wide and size > WINDOW + 64 * fed:
                    raise _takes_memory(raw.name)
                yield chunk
                packed = frame.unused_data if frame.eof else raw.read(FEED)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from None


class ParquetRows:
    """The rows of a parquet file: the columns `keys`, those of `optional` that it has;
    `names` of all it has. Raises ValueError for a damaged file, or one without a key."""

    def __init__(self, raw: io.BufferedReader, keys: Sequence[str], optional: Sequence[str] = ()):
        self._name = raw.name
        pyarrow = library("pyarrow", raw.name)
        parquet = library("pyarrow.parquet", raw.name)
        # arrow's own allocator reserves 1 GB, which `_at_most` would count
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        self._error = pyarrow.ArrowException
        self._most = MEMORY + 2 * os.fstat(raw.fileno()).st_size
        with self._explained(), _at_most(self._most):
            self._file = parquet.ParquetFile(raw)
        names = self._file.schema_arrow.names
        missing = [key for key in keys if key not in names]
        if missing:
            raise ValueError(
                f'{raw.name}: has no column "{missing[0]}" (its columns: {", ".join(names[:5])}; '
                "choose with --json-keys) [parquet-column-missing]"
            )
        self.names = names
        self._columns = [key for key in (*keys, *optional) if key in names]
        self._keys = (*keys, *optional)
        self.count = self._file.metadata.num_rows

    def groups(self) -> list[int]:
        """How many rows each row group has."""
        metadata = self._file.metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def blocks(
        self, start: int, longest: int, stop: int
    ) -> Iterator[tuple[int, int, list[list[Any]] | None]]:
        """Rows from number `start` on, of the row groups that begin before `stop`: number of the
        first and of the one after the last, and the values of each key. As many as ROWS_BYTES hold,
        or one; of a row of more than `longest` bytes None."""
        with self._explained():
            for first, batch in self._batches(start, stop):
                values = None
                if batch.num_rows > 1 or batch.nbytes <= longest:
                    values = [
                        batch.column(key).to_pylist()
                        if key in self._columns
                        else [None] * batch.num_rows
                        for key in self._keys
                    ]
                yield first, first + batch.num_rows, values

    def _batches(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Rows that need too much memory together are read one by one, from the first of their
        group on. Raises ValueError if one does."""
        after = 0
        for group, count in enumerate(self.groups()):
            before = after
            after += count
            if before >= stop:
                return
            rows = ROWS
            while start < after:
                try:
                    for first, batch in self._group(group, before, start, rows):
                        yield first, batch
                        start = first + batch.num_rows
                    start = after
                except MemoryError:
                    if rows == 1:
                        raise _takes_memory(f"{self._name}, row {start + 1}") from None
                    rows = 1

    def _group(self, group: int, position: int, start: int, rows: int) -> Iterator[tuple[int, Any]]:
        batches = self._file.iter_batches(
            rows, row_groups=[group], columns=self._columns, use_threads=False
        )
        while True:
            with _at_most(self._most):
                batch = next(batches, None)
            if batch is None:
                return
            position += batch.num_rows
            batch = batch.slice(max(start - position + batch.num_rows, 0))
            step = max(1, batch.num_rows if batch.nbytes <= ROWS_BYTES else 1)
            for first in range(0, batch.num_rows, step):
                yield position - batch.num_rows + first, batch.slice(first, step)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            line = str(error).split("\n")[0]
            raise ValueError(
                f"{self._name}: the parquet file is damaged or cut short ({line}); make it again "
                "[input-file-damaged]"
            ) from None


@contextlib.contextmanager
def _at_most(allowed: int) -> Iterator[None]:
    """Within it this process gets MemoryError where it asks for so many bytes more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with open("/proc/self/statm", "rb") as file:
            most = int(file.read(100).split()[5]) * resource.getpagesize() + allowed
    except OSError:  # not Linux
        most = soft
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _takes_memory(subject: str) -> ValueError:
    return ValueError(
        f"{subject}: unpacking it takes more than {MEMORY >> 20} MiB of memory; write the file "
        "again: xz and zstd without a larger window than usual, parquet in smaller row groups "
        "[unpacking-takes-memory]"
    )


def library(module: str, file: str) -> ModuleType:
    """An optional package that reads `file`. Raises ValueError if it is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{file}: reading it needs the package {package} ({error}); run: pip install "
            f"{package} (or install this suite with its extra: [data]) [package-missing]"
        ) from None
