"""What a person reads: lines of rank 0, of the last rank, and things said once. Knows no model and no process group."""
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

_SAID: set[str] = set()
OTHERS_WAIT = 3.0       # seconds, for a launcher that saw one rank leave to end the others


def rank() -> int:
    """Global rank of this process as its launcher gave it (torchrun's RANK, else srun's SLURM_PROCID); else 0."""
    return int(os.environ.get("RANK") or (os.environ.get("SLURM_PROCID") if world_size() > 1 else None) or 0)


def world_size() -> int:
    """Number of processes as the launcher gave it (WORLD_SIZE, else the size of srun's step); 1 without one.

    SLURM_NTASKS says nothing: a shell or a batch script in an allocation has it too, and is one process.
    """
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)


def local_rank() -> int:
    """Rank on this node as the launcher gave it (LOCAL_RANK or SLURM_LOCALID); else 0."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def print_rank_0(text: str) -> None:
    """Print `text` on global rank 0."""
    if rank() == 0:
        print(text, flush=True)


def print_rank_last(text: str) -> None:
    """Print `text` on the last global rank, where Megatron prints losses."""
    if rank() == world_size() - 1:
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
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"):
        details = {"py_callstack": text.rstrip("\n"), "timestamp": str(int(time.time()))}
        message = {"message": text.strip().rpartition("\n")[2], "extraInfo": details}
        try:
            Path(file).write_text(json.dumps({"message": message}))
            return
        except OSError:
            pass                    # then torchrun has nothing to show
    sys.stderr.write(text)
    sys.stderr.flush()
