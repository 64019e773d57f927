"""What a person reads: lines of rank 0, of the last rank, and things said once. Knows no model and no process group."""
from __future__ import annotations

import json
import sys
import time

from megatron import launcher

_SAID: set[str] = set()
OTHERS_WAIT = 3.0       # seconds, for a launcher that saw one rank leave to end the others


def print_rank_0(text: str) -> None:
    """Print `text` on global rank 0."""
    if launcher.rank() == 0:
        print(text, flush=True)


def print_rank_last(text: str) -> None:
    """Print `text` on the last global rank, where Megatron prints losses."""
    if launcher.rank() == launcher.world_size() - 1:
        print(text, flush=True)


def info(module: str, text: str) -> None:
    """A library line of rank 0 in the form of Python's root logger, `INFO:<module>:<text>`, as Megatron prints them."""
    print_rank_0(f"INFO:{module}:{text}")


def warn_once(text: str) -> None:
    """Print `WARNING: text` on rank 0 the first time it is said in this process."""
    if text not in _SAID:
        _SAID.add(text)
        print_rank_0(f"WARNING: {text}")


def say_once(text: str) -> None:
    """Print `text` on rank 0 the first time it is said in this process."""
    if text not in _SAID:
        _SAID.add(text)
        print_rank_0(text)


def last_words(text: str) -> None:
    """Say why this process ends, where a user sees it last.

    That is stderr, or what torchrun prints when it has ended the other ranks, below a heading with rank and host: it
    names a file for this text. Of several attempts (--max-restarts) it shows the last one's only.
    """
    if file := launcher.error_file():
        details = {"py_callstack": text.rstrip("\n"), "timestamp": str(int(time.time()))}
        message = {"message": text.strip().rpartition("\n")[2], "extraInfo": details}
        try:
            file.write_text(json.dumps({"message": message}))
            return
        except OSError:
            pass                    # then torchrun has nothing to show
    sys.stderr.write(text)
    sys.stderr.flush()
