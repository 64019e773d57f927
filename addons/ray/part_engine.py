"""The parts of a corpus as tasks of a Ray cluster (preprocess_data.py --cluster ray). The only
importer of ray.

Ray schedules the parts that are not whole, and tries a part again when its process or machine goes
away (RAY_TASK_MAX_RETRIES, 3 times). A part to which the file system of a machine says no, a full
disk say, is begun again on another one. That is safe at any moment: a part appears whole or not at
all. Inputs and output are on a file system that all machines share.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import re
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.parts import corpus as of_megatron
from megatron.data.parts.corpus import Corpus, CorpusTotals
from megatron.data.parts.making import is_whole
from megatron.data.preprocess.encode_files import Held
from megatron.data.preprocess.workers import WorkerKilled

AHEAD = 10_000  # tasks that Ray knows of: enough for every CPU of a large cluster
FAILURES = 10  # parts that cannot be made, after which no others are begun
MACHINES = 3  # whose file systems may refuse a part before it is one of those
END = 30.0  # seconds for the tasks to remove what they have not finished
CONNECT = 10.0  # seconds for a cluster to answer
TICK = 1.0  # seconds between two looks at the tasks
CLIENT = "ray://"  # of an address that is reached through Ray's client
NODE = "ray.io/node-id"  # the label of a machine that is its id
PACKAGES = Path(of_megatron.__file__).resolve().parents[3]  # where megatron is, on every machine


def address_of(flag: str | None) -> str | None:
    """The address of the cluster; None for one of this machine."""
    return flag or os.environ.get("RAY_ADDRESS") or None


def problems(address: str | None) -> list[str]:
    """What this Python lacks for the cluster at this address."""
    if not importlib.util.find_spec("ray"):
        return [
            "--cluster ray: the package ray is not installed; pip install 'ray[client]', on every "
            "machine of the cluster [package-missing]"
        ]
    if (address or "").startswith(CLIENT) and not importlib.util.find_spec("grpc"):
        return [
            f"--cluster-address {address}: the package grpcio, which ray:// needs, is not "
            "installed; pip install 'ray[client]' [package-missing]"
        ]
    return []


def make_parts(
    corpus: Corpus,
    address: str | None,
    report: Callable[[CorpusTotals, int], object],
    held: Held = contextlib.nullcontext,
) -> tuple[CorpusTotals, list[str]]:
    """Make the parts that are not whole, on the cluster at this address (as of `ray.init`); what
    was made, and a line for each part that could not be. Begins no more parts after some failures.

    `report` hears, now and then, what has been made and how many parts are not done yet; `held` is
    a context in which no signal raises, which Ray's calls do not bear. Raises ValueError for a
    cluster that is not reached.
    """
    waiting = [number for number in range(len(corpus.units)) if not is_whole(corpus.sets, number)]
    counts = CorpusTotals()
    failures: list[str] = []
    if not waiting:
        return counts, failures
    with _connected(address) as ray:
        _say_size(ray, corpus, len(waiting))
        waiting.reverse()
        with contextlib.closing(_Tasks(ray, corpus)) as tasks:
            while len(failures) < FAILURES and (tasks.running or waiting):
                with held():
                    while waiting and len(tasks.running) < AHEAD:
                        tasks.begin(waiting.pop())
                    for ended in tasks.ended():
                        if isinstance(ended, CorpusTotals):
                            counts = counts.plus(ended)
                        else:
                            failures.append(ended)
                report(counts, len(tasks.running) + len(waiting))
    return counts, failures


class Refused(NamedTuple):
    """A part could not be made because of a file system: Ray's id of the machine, its name, the
    file and what is wrong."""

    machine: str
    host: str
    reason: str


class _Tasks:
    """Parts that Ray makes. `running`: the part of each task."""

    def __init__(self, ray: Any, corpus: Corpus) -> None:
        self.running: dict[Any, int] = {}
        self._ray = ray
        self._corpus = corpus
        self._shared = ray.put(corpus)
        self._task = ray.remote(
            num_cpus=corpus.limits.workers,
            retry_exceptions=[WorkerKilled],
            runtime_env=_environ(),
        )(_make)
        self._folder = os.getcwd()
        self._refused: dict[int, list[Refused]] = defaultdict(list)  # by part

    def begin(self, number: int) -> None:
        """Begin a part, not on a machine that has refused it."""
        machines = [refused.machine for refused in self._refused[number]]
        task = self._task
        if machines:
            task = task.options(label_selector={NODE: f"!in({', '.join(machines)})"})
        self.running[task.remote(self._shared, number, self._folder)] = number

    def ended(self) -> Iterator[CorpusTotals | str]:
        """Of the tasks that end within TICK seconds: what was made, or the line about a part."""
        tasks = list(self.running)
        done, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=TICK)
        for reference in done:
            number = self.running.pop(reference)
            try:
                result = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                yield _failure(number, error)
                continue
            if isinstance(result, CorpusTotals):
                yield result
            elif self._elsewhere(number, result):
                self.begin(number)
            else:
                yield _refusal(number, self._refused[number])

    def _elsewhere(self, number: int, refused: Refused) -> bool:
        """Whether there is another machine for a part that one has refused."""
        known = {each.machine for each in itertools.chain(*self._refused.values())}
        if refused.machine not in known:
            print(
                f"warning: {refused.host}: {refused.reason}; a part that it cannot make is begun "
                "again on another machine, if there is one",
                file=sys.stderr,
            )
        self._refused[number].append(refused)
        machines = {each.machine for each in self._refused[number]}
        return len(machines) < MACHINES and any(
            node["NodeID"] not in machines for node in _usable(self._ray, self._corpus)
        )

    def close(self) -> None:
        """End what is running, and give it the time to remove what it has written."""
        for reference in self.running:
            self._ray.cancel(reference)
        if self.running:
            self._ray.wait(list(self.running), num_returns=len(self.running), timeout=END)


def _make(corpus: Corpus, number: int, folder: str) -> CorpusTotals | Refused:
    """One part, in a process of Ray. `folder`: from which relative paths are meant."""
    try:
        os.chdir(folder)
        return corpus.make(number)
    except OSError as error:
        import ray

        name = error.filename or corpus.sets[0].folder  # none where a disk is full
        machine = ray.get_runtime_context().get_node_id()
        reason = f"{name}: cannot be used ({error.strerror or error})"
        return Refused(machine, socket.gethostname(), reason)


def _environ() -> dict[str, dict[str, str]]:
    """What the processes of Ray need to find this package; and one thread for each."""
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    threads = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    return {"env_vars": {"PYTHONPATH": path, **threads}}


def _failure(number: int, error: Any) -> str:
    """The line about a part. Raises what is no fault of the input."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ValueError):
        return str(cause)
    if cause is not None:
        raise error
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"part {number}: Ray gave it up ({type(error).__name__}: {reason}); start the same command "
        "again, with a larger RAY_TASK_MAX_RETRIES if machines go away often [cluster-gave-up]"
    )


def _refusal(number: int, refused: Sequence[Refused]) -> str:
    """The line about a part that no machine could make."""
    hosts = ", ".join(dict.fromkeys(each.host for each in refused))
    return (
        f"part {number}: {refused[-1].reason} on {hosts}; remedy that and start the same command "
        "again [file-operation-failed]"
    )


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """The module ray, connected. Signals stay with this process's own handlers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to Ray's makers
    import ray

    if host := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address or ""):
        _check_listens(address, host[1], int(host[2]))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # with ray:// a process on the cluster's head stands for this one, and imports megatron first
    more = {"runtime_env": _environ()} if (address or "").startswith(CLIENT) else {}
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **more)
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
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
        "ray start --head, correct its address or token (RAY_AUTH_TOKEN), or leave the flag out "
        "for one on this machine [cluster-not-reached]"
    )


def _usable(ray: Any, corpus: Corpus) -> list[dict[str, Any]]:
    """The machines that have room for a task."""
    return [
        node
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= corpus.limits.workers
    ]


def _say_size(ray: Any, corpus: Corpus, parts: int) -> None:
    """How large the cluster is; and if no machine of it has room for a task."""
    cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    print(
        f"Ray: {len(cpus)} machines, {sum(cpus):.0f} CPUs; {parts} of {len(corpus.units)} parts to "
        "make",
        flush=True,
    )
    if not _usable(ray, corpus):
        print(
            f"warning: --workers {corpus.limits.workers}: no machine of the cluster has so many "
            "CPUs, so that no part is begun until one joins",
            file=sys.stderr,
        )
