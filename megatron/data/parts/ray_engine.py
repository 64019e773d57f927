"""The parts of a corpus as tasks of a Ray cluster (preprocess_data.py --cluster ray). The only
importer of ray.

Ray schedules the parts that are not whole, and tries a part again when its process or machine goes
away (RAY_TASK_MAX_RETRIES, 3 times). That is safe at any moment: a
part appears whole or not at all. Inputs and output are on a file system that all machines share.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.data.parts.corpus import Corpus, Made
from megatron.data.parts.making import is_whole
from megatron.data.preprocess.workers import WorkerKilled

AHEAD = 10_000  # tasks that Ray knows of: enough for every CPU of a large cluster
FAILURES = 10  # parts that cannot be made, after which no others are begun
CONNECT = 10.0  # seconds for a cluster to answer
TICK = 1.0  # seconds between two looks at the tasks
PACKAGES = Path(__file__).resolve().parents[3]  # where megatron is, on every machine


def problems() -> list[str]:
    """What this Python lacks."""
    if importlib.util.find_spec("ray"):
        return []
    return [
        "--cluster ray: the package ray is not installed; pip install ray, on every machine of the "
        "cluster [package-missing]"
    ]


def make_parts(
    corpus: Corpus, address: str | None, report: Callable[[Made, int], object]
) -> tuple[Made, list[str]]:
    """Make the parts that are not whole, on the cluster at this address (as of `ray.init`); what
    was made, and a line for each part that could not be. Begins no more parts after some failures.

    `report` hears, now and then, what has been made and how many parts are not done yet. Raises
    ValueError for a cluster that is not reached.
    """
    waiting = [number for number in range(len(corpus.units)) if not is_whole(corpus.sets, number)]
    counts = Made()
    failures: list[str] = []
    if not waiting:
        return counts, failures
    with _connected(address) as ray:
        _say_size(ray, corpus, len(waiting))
        waiting.reverse()
        shared = ray.put(corpus)
        task = ray.remote(
            num_cpus=corpus.limits.workers,
            retry_exceptions=[WorkerKilled],
            runtime_env={"env_vars": _environ()},
        )(_make)
        folder = os.getcwd()
        running: dict[Any, int] = {}
        while running or (waiting and len(failures) < FAILURES):
            while waiting and len(running) < AHEAD and len(failures) < FAILURES:
                number = waiting.pop()
                running[task.remote(shared, number, folder)] = number
            done, _ = ray.wait(list(running), num_returns=len(running), timeout=TICK)
            for reference in done:
                try:
                    counts = counts.plus(ray.get(reference))
                except ray.exceptions.RayError as error:
                    failures.append(_failure(corpus, running[reference], error))
                del running[reference]
            if len(failures) >= FAILURES:
                for reference in running:
                    ray.cancel(reference)
                running.clear()
            report(counts, len(running) + len(waiting))
    return counts, failures


def _make(corpus: Corpus, number: int, folder: str) -> Made:
    """One part, in a process of Ray. `folder`: from which relative paths are meant."""
    os.chdir(folder)
    return corpus.make(number)


def _environ() -> dict[str, str]:
    """What the processes of Ray need to find this package; and one thread for each."""
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


def _failure(corpus: Corpus, number: int, error: Any) -> str:
    """The line about a part. Raises what is no fault of the input."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ValueError):
        return str(cause)
    if isinstance(cause, OSError):
        name = cause.filename or corpus.sets[0].folder  # none where a disk is full
        return f"part {number}: {name}: cannot be used ({cause.strerror or cause})"
    if cause is not None:
        raise error
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"part {number}: Ray gave it up ({type(error).__name__}: {reason}); start the same command "
        "again, with a larger RAY_TASK_MAX_RETRIES if machines go away often [cluster-gave-up]"
    )


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """The module ray, connected. Signals stay with this process's own handlers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to Ray's makers
    import ray

    if host := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address or ""):
        _check_listens(address, host[1], int(host[2]))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _not_reached(address, reason) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_listens(address: str | None, host: str, port: int) -> None:
    """Ray itself would try for minutes. Raises ValueError."""
    try:
        socket.create_connection((host, port), CONNECT).close()
    except OSError as error:
        raise _not_reached(address, str(error.strerror or error)) from None


def _not_reached(address: str | None, reason: str) -> ValueError:
    return ValueError(
        f"--cluster-address {address}: no Ray cluster is reached ({reason}); start one with "
        "ray start --head, or leave the flag out for one on this machine [cluster-not-reached]"
    )


def _say_size(ray: Any, corpus: Corpus, parts: int) -> None:
    """How large the cluster is; and if no machine of it has room for a task."""
    cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    print(
        f"Ray: {len(cpus)} machines, {sum(cpus):.0f} CPUs; {parts} of {len(corpus.units)} parts to "
        "make",
        flush=True,
    )
    if max(cpus, default=0) < corpus.limits.workers:
        print(
            f"warning: --workers {corpus.limits.workers}: no machine of the cluster has so many "
            "CPUs, so that no part is begun until one joins",
            file=sys.stderr,
        )
