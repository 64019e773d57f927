"""Runs one function on several real gloo ranks for a test; knows neither the model nor any parallel
layout.

The ranks are forked from a server process that has torch loaded already (a plain fork of a pytest
process that has run torch can deadlock), meet over a file instead of a port, and use one thread
each.
"""

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megatron import addons

ROOT = Path(__file__).resolve().parent.parent
PLANTED = "PLANTED_BUG"  # a bug that every rank gets
OUTPUT_SHOWN = 4000  # characters of a failing rank's own output
LOST_CONNECTION = re.compile(r"gloo|connection|\bpeer\b|socket|broken pipe", re.IGNORECASE)


class RanksFailed(AssertionError):
    """A rank raised, died or ran out of time; the text holds the first failing rank's traceback,
    once."""


def start_server() -> None:
    """Let the server of the ranks load torch in the background, before the first test asks for
    it."""
    context()
    forkserver.ensure_running()


def _training_modules() -> list[str]:
    """All modules that a run may import, also those that functions import; of features the hooks."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "megatron").glob("*/**/*.py"))]
    return [
        *(
            ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            for path in paths
            if {"core", "analysis", "inference"}.isdisjoint(path.parts)
            and ("features" not in path.parts or path.name == "hook.py")
        ),
        *addons.modules("hook"),
    ]


@functools.cache
def context() -> multiprocessing.context.ForkServerContext:
    """The fork server's context; the server lives as long as the test session."""
    context = multiprocessing.get_context("forkserver")
    modules = [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "numpy",
        "pytest",
        "megatron.training.loop",
        "megatron.training.logging.preamble",
        "megatron.config.command_line",
        *_training_modules(),
        "tests.runs",
        "tests.known_flags",
        "tests.campaigns.e2e.programs",
        "tensorboard.backend.event_processing.event_accumulator",
    ]
    context.set_forkserver_preload(modules)
    return context


def _join_group(rank: int, world: int, store: str, seconds: float) -> None:
    """Make this process one rank of a gloo group that meets in the file `store`."""
    from datetime import timedelta

    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    file_store = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world, timeout=limit)


def _rank_main(rank: int, world: int, job: bytes, setting: dict[str, Any], pipe: Any) -> None:
    """The body of one rank: take over the caller's surroundings, call the function, send back a
    result or traceback."""
    # what the server loaded is nobody's garbage: collections need not walk through it
    gc.freeze()
    output = os.open(setting["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(
        setting["environ"], RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank)
    )
    os.chdir(setting["cwd"])
    try:
        import torch

        torch.set_num_threads(1)
        if bug := os.environ.get(PLANTED):
            from tests.planted import bugs

            bugs.plant(bugs.Bug(*json.loads(bug)))
        if world > 1 and setting["join"]:
            _join_group(rank, world, setting["store"], setting["seconds"])
        function, args = pickle.loads(job)
        answer = ("result", function(rank, world, *args))
        # Plain pickle on purpose: multiprocessing's would pass tensors as shared memory that dies
        # with this process.
        message = pickle.dumps(answer)
    except BaseException:
        message = pickle.dumps(("traceback", traceback.format_exc()))
    with contextlib.suppress(OSError, EOFError):
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(message)
        # stay until the caller ends all ranks: a peer may still need its connection to this one
        pipe.recv_bytes()
    os._exit(0)


def _tail(path: Path) -> str:
    """The last words a rank printed, or nothing."""
    text = path.read_text(errors="replace")[-OUTPUT_SHOWN:].strip() if path.exists() else ""
    return f"\n--- what it printed last ---\n{text}" if text else ""


def _raise_for_the_dead(processes: list, outputs: list[Path], seconds: float) -> None:
    """RanksFailed for a rank that is gone without having said why, if there is one within this
    time."""
    wait([process.sentinel for process in processes], timeout=seconds)
    for rank, process in enumerate(processes):
        if process.exitcode is not None:
            text = f"rank {rank} of {len(processes)} died, exit code {process.exitcode}"
            raise RanksFailed(text + _tail(outputs[rank])) from None


def _collect(processes: list, pipes: list, seconds: float, outputs: list[Path]) -> list[Any]:
    """One result per rank, or RanksFailed as soon as the first rank fails, dies silently or the
    time is over."""
    world = len(processes)
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(results) < world:
        open_ranks = {pipes[rank]: rank for rank in range(world) if rank not in results}
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank in sorted(open_ranks.values()))
            shown = min(open_ranks.values())
            raise RanksFailed(
                f"no answer from rank {late} of {world} after {seconds:.0f} "
                f"s{_tail(outputs[shown])}"
            )
        for pipe in ready:
            rank = open_ranks[pipe]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                processes[rank].join(5)
                _raise_for_the_dead(processes, outputs, 0.5)
                raise RanksFailed(
                    f"rank {rank} of {world} closed its pipe{_tail(outputs[rank])}"
                ) from None
            if kind == "traceback":
                # Who lost a connection has perhaps lost it to one that died, whose end is seen a
                # little later.
                _raise_for_the_dead(
                    processes, outputs, 0.5 if LOST_CONNECTION.search(value) else 0.0
                )
                raise RanksFailed(f"rank {rank} of {world} failed:\n{value}{_tail(outputs[rank])}")
            results[rank] = value
    return [results[rank] for rank in range(world)]


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 120.0,
    join: bool = True,
    environ: dict[str, str] | None = None,
) -> list[Any]:
    """Call `function(rank, world, *args)` on `world` fresh processes and return their results, rank
    by rank.

    `function` must be a module-level function of an importable module (it travels by name). From
    two ranks on, the processes are already one gloo group unless `join` is False; a single rank has
    no group, as in a real run. RANK, WORLD_SIZE and LOCAL_RANK are set, `environ` is laid over the
    caller's environment, and the working directory is the caller's. Raises RanksFailed with the
    first failing rank's traceback; then, and after `seconds`, every rank is killed.
    """
    server = context()
    folder = Path(tempfile.mkdtemp(prefix="forkrun-"))
    outputs = [folder / f"rank_{rank}.txt" for rank in range(world)]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    common = {"environ": surroundings, "cwd": os.getcwd(), "seconds": seconds, "join": join}
    job = pickle.dumps((function, args))
    processes = []
    pipes = []
    try:
        for rank in range(world):
            mine, theirs = server.Pipe()
            setting = {**common, "output": str(outputs[rank]), "store": str(folder / "store")}
            process = server.Process(
                target=_rank_main, args=(rank, world, job, setting, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        return _collect(processes, pipes, seconds, outputs)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)
