"""Log lines of rank 0, of the last rank, and warnings that are printed once."""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TextIO

from megatron import launcher
from megatron.problems import printable

_PRINTED: set[str] = set()
# Its level decides whether details are printed: INFO does, WARNING does not (--log-format short).
_DETAILS = logging.getLogger("megatron.details")
_DETAILS.setLevel(logging.INFO)
CLEAR_LINE = "\r\x1b[K"  # erases a status line on a terminal
PEERS_WAIT = 3.0  # seconds, for a launcher that saw one rank leave to end the others


def show_details(wanted: bool) -> None:
    """Choose whether `detail` and `info` print, in this process."""
    _DETAILS.setLevel(logging.INFO if wanted else logging.WARNING)


def shows_details() -> bool:
    """Whether `detail` and `info` print."""
    return _DETAILS.isEnabledFor(logging.INFO)


def has_status_line(stream: TextIO) -> bool:
    """May a status line stand on `stream`: with --log-format short, on a terminal that knows
    control characters?"""
    return not shows_details() and stream.isatty() and os.environ.get("TERM") != "dumb"


def print_line(text: object) -> None:
    """Print `text`, or what a script prints, on this rank; on a terminal it replaces the status
    line, which any rank may have written."""
    start = CLEAR_LINE if has_status_line(sys.stdout) else ""
    print(f"{start}{printable(str(text))}", flush=True)


def print_rank_0(text: object) -> None:
    """Print `text` on global rank 0."""
    if launcher.rank() == 0:
        print_line(text)


def print_rank_last(text: object) -> None:
    """Print `text` on the last global rank, where Megatron prints losses."""
    if launcher.rank() == launcher.world_size() - 1:
        print_line(text)


def detail(text: str) -> None:
    """Print a line of Megatron's that --log-format short omits, on global rank 0."""
    if shows_details():
        print_rank_0(text)


def detail_datetime(event: str) -> None:
    """A detail with the time, `[what] datetime: ...` with a trailing space, as Megatron prints
    it."""
    detail(f"[{event}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")


def info(module: str, text: str) -> None:
    """A detail of rank 0 in the form of Python's root logger, `INFO:<module>:<text>`, as Megatron
    prints them."""
    detail(f"INFO:{module}:{text}")


def warn_once(text: str) -> None:
    """Print `WARNING: text` on rank 0 the first time it is said in this process."""
    if text not in _PRINTED:
        _PRINTED.add(text)
        print_rank_0(f"WARNING: {text}")


def last_words(text: str) -> None:
    """Print why this process ends, where a user sees it last.

    That is stderr, or what torchrun prints when it has ended the other ranks, below a heading with
    rank and host: it names a file for this text. Of several attempts (--max-restarts) it shows the
    last one's only.
    """
    if not tell_torchrun(text):
        start = CLEAR_LINE if has_status_line(sys.stderr) else ""
        sys.stderr.write(f"{start}{printable(text)}")
        sys.stderr.flush()


def tell_torchrun(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Write why the process with these variables fails where torchrun reads it; whether it could be
    written."""
    file = launcher.error_file(environ)
    if file is None:
        return False
    text = printable(text)
    details = {"py_callstack": text.rstrip("\n"), "timestamp": str(int(time.time()))}
    message = {"message": text.strip().rpartition("\n")[2], "extraInfo": details}
    try:
        file.write_text(json.dumps({"message": message}))
    except OSError:
        return False  # then torchrun has nothing to show
    return True
