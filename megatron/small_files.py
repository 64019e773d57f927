"""Text and JSON files that are read whole: no device or pipe is waited for, no file above a limit
is read, and JSON cannot end the process by its depth or the size of its numbers. And names of files
that others give: none leads out of its folder.
"""

import errno
import json
import math
import os
import stat
import time
import unicodedata
import uuid
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

LIMIT = 1 << 30  # bytes
_BLOCK = 1 << 16
_LONGEST_NAME = 255  # bytes, of a part of a path
# of characters: those that control a terminal or end a line, and bytes that are not UTF-8
_REFUSED = ("Cc", "Cs", "Zl", "Zp")
Result = TypeVar("Result")


class UnsafeName(ValueError):
    """A name that does not, or may not, name a file of its folder."""


def safe_name(name: Any, source: object, below: bool = False) -> str:
    """`name`, which `source` gives, of a file in a folder; with `below` also in a folder of it.

    Raises UnsafeName for `..`, `.` and empty parts, so for absolute paths too; for backslashes,
    control characters, what is not UTF-8, and parts that no file system can hold.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if (
        not parts
        or (len(parts) > 1 and not below)
        or any(part in ("", ".", "..") for part in parts)
        or any(len(part.encode(errors="surrogatepass")) > _LONGEST_NAME for part in parts)
        or "\\" in name
        or any(unicodedata.category(character) in _REFUSED for character in name)
    ):
        origin = str(source) if str(source).isprintable() else repr(str(source))
        raise UnsafeName(
            f"{origin}: the name {repr(name)[:100]} may lead out of its folder, or is none that "
            "a file can have everywhere; rename it where it comes from [name-not-safe]"
        )
    return name


def path_inside(folder: str | os.PathLike[str], name: Any, below: bool = False) -> Path:
    """The path of a file in a folder, which may be missing; see `safe_name`. Raises UnsafeName also
    for a link out of the folder. In the Hugging Face cache links lead into blobs/."""
    path = Path(folder, safe_name(name, os.fspath(folder), below))
    root = Path(os.path.realpath(folder))
    roots = [root]
    for revision in (root, *root.parents):
        if revision.parent.name == "snapshots":
            roots.append(revision.parents[1] / "blobs")
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(each) for each in roots):
        raise UnsafeName(
            f"{path}: is a link to {target}, outside of the folder; if that file belongs there, "
            "put a copy of it in place of the link [link-out-of-folder]"
        )
    return path


def retried(action: Callable[[], Result], *numbers: int) -> Result:
    """`action()`, tried again while the system refuses it with one of these error numbers, which
    pass on network file systems: ESTALE where another host has replaced a file (opening it again
    finds the new one), EBUSY and ENOTEMPTY while somebody has a removed file open."""
    for pause in (0.1, 0.3, 1.0):
        try:
            return action()
        except Exception as error:
            if getattr(error, "errno", None) not in numbers:
                raise
        time.sleep(pause)
    return action()


def make_directories(
    path: str | os.PathLike[str], seconds: float = 10.0, mode: int = 0o777
) -> None:
    """`os.makedirs(path, mode, exist_ok=True)` where several hosts make one directory. Raises
    OSError.

    On network file systems a host that looked in vain a moment ago goes on not seeing what another
    host has made since (cached negative lookups): mkdir says that the name exists, stat that it
    does not. Both cannot last; up to `seconds` are waited for it.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return os.makedirs(path, mode, exist_ok=True)
        except FileExistsError:
            if os.path.lexists(path) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, durably and in one step in the place of an older one. Raises OSError."""
    partial = f"{os.fspath(path)}.{uuid.uuid4().hex}.tmp"
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def fsync(path: str | os.PathLike[str]) -> None:
    """Have a file's content, or a directory's names, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(path: str | os.PathLike[str], limit: int = LIMIT) -> bytes:
    """All bytes of a regular file. Raises OSError, also for a pipe, a device and a file of more
    than `limit` bytes."""

    def read() -> bytes | None:
        with open_regular(path) as file:
            return read_open(file, limit)

    data = retried(read, errno.ESTALE)
    if data is None:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", os.fspath(path))
    return data


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """A regular file, open to be read. Raises OSError, also for a pipe and a device, which are not
    waited for."""
    name = os.fspath(path)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    raise OSError(errno.EINVAL, "not a regular file but a pipe, socket or device", name)


def read_open(file: BufferedReader, limit: int) -> bytes | None:
    """The bytes of an open file, None if they are more than `limit`. Takes no more memory than the
    file has bytes. Raises OSError."""
    size = os.fstat(file.fileno()).st_size
    data = file.read(size + 1) if size <= limit else b""
    while size <= limit and (more := file.read(_BLOCK)):  # /proc has sizes of 0; files may grow
        data += more
        size = len(data)
    return data if size <= limit else None


def read_text(
    path: str | os.PathLike[str],
    encoding: str = "utf-8",
    errors: str = "strict",
    limit: int = LIMIT,
) -> str:
    """The text of a file, line ends as `\\n`. Raises OSError as `read_bytes` does, and
    UnicodeDecodeError."""
    text = read_bytes(path, limit).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError (UnicodeDecodeError, json.JSONDecodeError), also
    for brackets nested too deeply and for numbers that a float cannot hold."""
    try:
        return json.loads(text, parse_float=_finite)
    except RecursionError:
        raise json.JSONDecodeError("brackets nested too deeply", "", 0) from None


def read_json(path: str | os.PathLike[str], encoding: str = "utf-8") -> Any:
    """The value in a JSON file. Raises OSError and ValueError as `read_text` and `parse_json`."""
    return parse_json(read_text(path, encoding))


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise json.JSONDecodeError(f"the number {text[:40]} is too large", text, 0)
    return number
