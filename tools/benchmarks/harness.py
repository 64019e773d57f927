"""What all benchmarks share: the registry, and the race between the sides of one comparison.

A benchmark is a function that yields Cases. A case has sides, the first of which is ours; each side
is a process (or several ranks) of its own that builds a subject, a class with

    warm_up()  gets ready; returns what all sides must agree on (numbers or a text), or None
    turn()     does the work of the case once; returns its seconds
    facts()    optional: further figures by name, after the turns

The sides take turns, the order moving on by one every round, and are stopped (SIGSTOP) meanwhile. A
ratio is the median over the rounds of (seconds of the other side / ours) in the same round.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import worker
from processes import ROOT, Worker, environment_of

COMMAND = "cases.subject:Command"
PEERS = ("bare", "transformers", "megatron-core", "tokenizers", "gigatoken")
# A peer takes the fastest of these settings of its CPU threads; ours runs as users start it.
SETTINGS = (
    "",
    "OMP_WAIT_POLICY=active",
    "OMP_WAIT_POLICY=passive",
    "OMP_WAIT_POLICY=active OMP_PROC_BIND=true",
)


class Disagreement(ValueError):
    """Two sides do not do the same work, so their times say nothing."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison. `prepare`: a method of the subject, with its arguments, that is
    called before any other side starts. `ranks` get torchrun's variables; `apart`: each does the
    work of the case by itself."""

    name: str
    subject: str
    arguments: dict[str, Any]
    tree: Path = ROOT
    ours: bool = True
    settings: Sequence[str] = ("",)
    prepare: tuple[Any, ...] = ()
    ranks: int = 0
    apart: bool = False
    threads: int | None = None

    @property
    def waiting(self) -> bool:
        """Whether its CPU threads wait as pretrain_gpt.py sets it."""
        return self.ours and self.subject != COMMAND


@dataclass(frozen=True)
class Case:
    """A comparison: `amount` units of work per turn. `together`: the sides take turns; otherwise
    each has all its turns alone, for devices whose memory a stopped process keeps."""

    name: str
    sides: Sequence[Side]
    amount: float = 1.0
    unit: str = ""
    tolerance: float = 0.0
    together: bool = True


@dataclass
class Setup:
    """What a benchmark's function gets: where to write, how small, and who takes part."""

    folder: Path
    small: bool = False
    peers: Sequence[str] | None = None  # None: all that are installed
    trees: Sequence[Path] = ()
    device: str = "cpu"

    @property
    def settings(self) -> Sequence[str]:
        """What a peer may choose from."""
        return SETTINGS if self.device == "cpu" and not self.small else SETTINGS[:1]

    def ours(self, name: str, subject: str, arguments: dict[str, Any], **more: Any) -> list[Side]:
        """Our side, and the same of every other checkout."""
        checkouts = [
            Side(f"{name} in {tree.name}", subject, arguments, tree, **more | {"prepare": ()})
            for tree in self.trees
        ]
        return [Side(name, subject, arguments, **more), *checkouts]

    def commands(self, arguments: Callable[[Path], dict[str, Any]]) -> list[Side]:
        """Sides that are whole processes, by the arguments of a Command in each checkout."""
        return [
            Side("ours" if tree == ROOT else f"ours in {tree.name}", COMMAND, arguments(tree))
            for tree in (ROOT, *self.trees)
        ]

    def peer(
        self, name: str, needs: str, subject: str, arguments: dict[str, Any], **more: Any
    ) -> list[Side]:
        """The side of a peer, where it is asked for and its package is installed."""
        if self.peers is not None and not name.startswith(tuple(self.peers)):
            return []
        with contextlib.suppress(ModuleNotFoundError):
            if not needs or importlib.util.find_spec(needs):
                return [Side(name, subject, arguments, ours=False, **more)]
        return []


@dataclass(frozen=True)
class Benchmark:
    """A function that yields cases; its keyword arguments are the words NAME=VALUE."""

    name: str
    about: str
    cases: Callable[..., Iterator[Case]]

    @property
    def parameters(self) -> dict[str, Any]:
        """Defaults by name; a tuple has several values, each of which gives cases."""
        _, *parameters = inspect.signature(self.cases).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters}


REGISTRY: dict[str, Benchmark] = {}


def each(*values: str | int) -> Any:
    """The default of a parameter that has several values."""
    return values


def benchmark(function: Callable[..., Iterator[Case]]) -> Callable[..., Iterator[Case]]:
    """Register a function under its name; its docstring says what is measured."""
    about = " ".join((inspect.getdoc(function) or "").split())
    REGISTRY[function.__name__] = Benchmark(function.__name__, about, function)
    return function


def launchers(side: Side) -> list[dict[str, str]]:
    """The variables that torchrun would set for each process of a side."""
    if side.apart or not side.ranks:
        return [{}] * max(1, side.ranks)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(side.ranks)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(side.ranks)
    ]


class InProcess:
    """The subject in this process, with the interface of Worker."""

    def __init__(self, job: dict[str, Any]):
        self._subject = worker.build(job)
        self._answers: list[Any] = [None]

    def send(self, command: str, *arguments: Any) -> None:
        self._answers.append(getattr(self._subject, command)(*arguments))

    def receive(self) -> Any:
        return self._answers.pop(0)

    def ask(self, command: str, *arguments: Any) -> Any:
        self._answers.clear()
        self.send(command, *arguments)
        return self.receive()

    def pause(self) -> None: ...

    resume = end = pause

    def peak_bytes(self) -> int:
        return 0


@dataclass
class Running:
    """A side and its processes while it has some."""

    side: Side
    setting: str
    in_process: bool
    threads: int | None = None
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    _workers: list[Any] = field(default_factory=list)

    def start(self) -> Any:
        """Build the subject and warm it up; what it must agree on."""
        side = self.side
        for rank, launcher in enumerate(launchers(side)):
            arguments = side.arguments | ({"launcher": launcher} if launcher else {})
            job: dict[str, Any] = {"subject": side.subject, "arguments": arguments}
            job |= {"tree": str(side.tree), "launcher": launcher}
            job |= {"waiting": side.waiting and not self.in_process}
            name = f"{side.name}, rank {rank}" if side.ranks > 1 else side.name
            self._workers.append(
                InProcess(job)
                if self.in_process and side.tree == ROOT
                else Worker(name, job, environment_of(self.setting, side.threads or self.threads))
            )
        for process in self._workers:
            process.receive()
        if side.prepare:
            self._workers[0].ask(*side.prepare)
        agreed = self._all("warm_up")[0]
        self._each("pause")
        return agreed

    def _all(self, command: str) -> list[Any]:
        for process in self._workers:
            process.send(command)
        return [process.receive() for process in self._workers]

    def _each(self, method: str) -> None:
        for process in self._workers:
            getattr(process, method)()

    def turns(self, count: int) -> None:
        """The work of the case so many times; the seconds of the slowest rank."""
        self._each("resume")
        for _ in range(count):
            seconds = max(self._all("turn")) / (len(self._workers) if self.side.apart else 1)
            self.seconds.append(seconds)
        self._each("pause")

    def end(self) -> None:
        """Take the facts and end the processes."""
        self._each("resume")
        self.facts = {"peak GB": sum(worker.peak_bytes() for worker in self._workers) / 1e9}
        self.facts |= self._all("facts")[0]
        self.kill()

    def kill(self) -> None:
        """End the processes."""
        self._each("end")
        self._workers.clear()


def agree(side: str, value: Any, expected: Any, tolerance: float) -> None:
    """Raise Disagreement unless numbers are near each other, and anything else is equal."""
    if value is None or expected is None:
        return
    if isinstance(value, list) and len(value) == len(expected):
        pairs = zip(value, expected, strict=True)
        near = all(abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in pairs)
    else:
        near = value == expected
    if not near:
        raise Disagreement(f"{side} has {str(value)[:200]}, ours {str(expected)[:200]}")


def run_case(
    case: Case, rounds: int, in_process: bool = False, threads: int | None = None
) -> dict[str, Any]:
    """The figures of a case: seconds of every turn, rates and ratios, by side. `in_process`: all
    sides in this process; `threads`: of CPUs, of each other process. Raises Disagreement and
    WorkerFailed."""
    running: list[Running] = []
    expected: Any = None
    try:
        for side in case.sides:
            setting = side.settings[0] if in_process else fastest_setting(side, threads)
            running.append(Running(side, setting, in_process, threads))
            agreed = running[-1].start()
            agree(side.name, agreed, expected, case.tolerance)
            expected = agreed if expected is None else expected
            if not case.together:
                running[-1].turns(rounds)
                running[-1].end()
        if case.together:
            for done in range(rounds):
                for number in range(len(running)):
                    running[(done + number) % len(running)].turns(1)
            for runner in running:
                runner.end()
    finally:
        for runner in running:
            runner.kill()
    return figures(case, running)


def fastest_setting(side: Side, threads: int | None) -> str:
    """That of its settings with which one turn takes the least time."""
    seconds = {}
    for setting in side.settings if len(side.settings) > 1 else ():
        runner = Running(side, setting, False, threads)
        try:
            runner.start()
            runner.turns(1)
            seconds[setting] = runner.seconds[0]
        finally:
            runner.kill()
    return min(seconds, key=seconds.__getitem__, default=side.settings[0])


def figures(case: Case, running: Sequence[Running]) -> dict[str, Any]:
    """Seconds, rates and facts of each side, and how many times as long as ours the others take."""
    sides = {}
    for runner in running:
        median = statistics.median(runner.seconds)
        sides[runner.side.name] = {"seconds": runner.seconds, "median": median, **runner.facts}
        sides[runner.side.name]["rate"] = case.amount / median
        sides[runner.side.name] |= {"setting": runner.setting} if runner.setting else {}
    first, *compared = running
    ratios = {}
    for peer in compared:
        values = [a / b for a, b in zip(peer.seconds, first.seconds, strict=True)]
        ratios[peer.side.name] = {
            "median": statistics.median(values),
            "range": [min(values), max(values)],
        }
    return {
        "case": case.name,
        "amount": case.amount,
        "unit": case.unit,
        "sides": sides,
        "ratios": ratios,
    }


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns, the first column to the left and the others to the right."""
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width[i]) if i else cell.ljust(width[i]) for i, cell in enumerate(line)
        ).rstrip()
        for line in lines
    ]
