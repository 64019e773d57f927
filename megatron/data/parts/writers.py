"""Which commands write parts now: each process holds a file of its own in the folder, locked until
it ends."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator

from megatron import log
from megatron.data.parts.part_set import PartSet
from megatron.file_sums import table_sum
from megatron.small_files import make_directories, parse_json

PREFIX = "writer-"


@contextlib.contextmanager
def writing(parts: PartSet, overwrite: bool) -> Iterator[None]:
    """Within the block this process makes `parts`, whose parts.json is there. Raises OSError;
    ValueError for the parts of another command, unless `overwrite`, and with it while a process of
    another command still writes."""
    make_directories(parts.folder)
    command = table_sum({"made_of": list(parts.made_of)})
    path = f"{parts.folder}/{PREFIX}{uuid.uuid4().hex}.json"
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command,
    }
    with open(f"{path}.tmp", "x", encoding="utf-8") as file:
        try:
            _lock(file.fileno(), parts.folder)
            json.dump(owner, file)
            file.flush()
            os.rename(f"{path}.tmp", path)  # locked and whole under its name
            for other in _others(parts.folder, path):
                if overwrite and other.get("command") != command:
                    raise ValueError(
                        f"--overwrite: process {other.get('pid', '?')} on "
                        f"{other.get('host', '?')} writes parts of another command in "
                        f"{parts.folder} since {other.get('since', '?')}; end it, or choose "
                        "another --output-prefix [output-in-use]"
                    )
            parts.write_plan(overwrite)
            yield
        finally:
            for name in (path, f"{path}.tmp"):
                with contextlib.suppress(OSError):
                    os.unlink(name)


def _lock(descriptor: int, folder: str) -> None:
    try:
        # ends with this process, whoever it has forked
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        log.warn_once(
            f"{folder}: this file system has no file locks ({error.strerror}), so --overwrite does "
            "not notice other processes that write there: end them first [no-file-locks]"
        )


def _others(folder: str, own: str) -> Iterator[dict[str, object]]:
    """What the other processes say that write there; files of those that were killed go."""
    for name in sorted(os.listdir(folder)):
        path = f"{folder}/{name}"
        if not name.startswith(PREFIX) or name.endswith(".tmp") or path == own:
            continue
        with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    yield _owner(file.read(10_000))
            else:
                os.unlink(path)


def _owner(content: bytes) -> dict[str, object]:
    try:
        table = parse_json(content)
    except ValueError:
        return {}
    return table if isinstance(table, dict) else {}
