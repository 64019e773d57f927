"""What all benchmarks share: the registry, and the race between the sides of one comparison.

A benchmark is a function that yields Cases. A case has sides, the first of which is ours; each side
is a process (or several ranks) of its own in which worker.py builds a Subject (subject.py). The
sides take turns, the order moving on by one every round, and are stopped (SIGSTOP) meanwhile. A
ratio is the median over the rounds of (seconds of the other side / ours) in the same round.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).resolve().with_name("worker.py")
COMMAND = "subject:Command"
PEERS = ("bare", "transformers", "tokenizers", "gigatoken")
THREAD_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_DOMAIN")
# A peer takes the fastest of these settings of its CPU threads; ours runs as users start it.
SETTINGS = (
    "",
    "OMP_WAIT_POLICY=active",
    "OMP_WAIT_POLICY=passive",
    "OMP_WAIT_POLICY=active OMP_PROC_BIND=true",
)


class Failed(RuntimeError):
    """A side's process failed, or two sides do not do the same work; the text says how."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a subject (MODULE:CLASS) of the checkout `tree`, with its
    arguments. `waiting`: its CPU threads wait as pretrain_gpt.py sets it. Each of several `ranks`
    gets torchrun's variables, as its argument `launcher` too."""

    name: str
    subject: str
    arguments: dict[str, Any]
    tree: Path = ROOT
    waiting: bool = False
    settings: Sequence[str] = ("",)
    ranks: int = 1
    threads: int | None = None


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

    def ours(
        self,
        subject: str,
        arguments: Callable[[Path], dict[str, Any]],
        name: str = "ours",
        **more: Any,
    ) -> list[Side]:
        """Our side and the same of every other checkout, by the arguments in each."""
        more["waiting"] = subject != COMMAND
        sides = [Side(name, subject, arguments(ROOT), **more)]
        for tree in self.trees:
            sides.append(Side(f"{name} in {tree.name}", subject, arguments(tree), tree, **more))
        return sides

    def peer(
        self, name: str, needs: str, subject: str, arguments: dict[str, Any], **more: Any
    ) -> list[Side]:
        """The side of a peer, where it is asked for and the package that it needs is installed."""
        is_asked = self.peers is None or name in self.peers
        if is_asked and (not needs or importlib.util.find_spec(needs)):
            return [Side(name, subject, arguments, **more)]
        return []


REGISTRY: dict[str, Callable[..., Iterator[Case]]] = {}


def each(*values: str | int) -> Any:
    """The default of a parameter that has several values, each of which gives cases."""
    return values


def benchmark(function: Callable[..., Iterator[Case]]) -> Callable[..., Iterator[Case]]:
    """Register a function of a Setup that yields cases; its keyword arguments are the words
    NAME=VALUE, its docstring says what is measured."""
    REGISTRY[function.__name__] = function
    return function


def parameters(function: Callable[..., Iterator[Case]]) -> dict[str, Any]:
    """The defaults of a benchmark's words by name."""
    _, *words = inspect.signature(function).parameters.values()
    return {word.name: word.default for word in words}


def launchers(ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun would set for each of several ranks."""
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class Running:
    """A side and its processes, which build and warm up its subject. Methods raise Failed."""

    def __init__(self, side: Side, setting: str = ""):
        self.side = side
        self.setting = setting
        self.seconds: list[float] = []
        self.facts: dict[str, Any] = {}
        self._workers: list[tuple[subprocess.Popen[bytes], Any]] = []
        variables = {k: v for k, v in os.environ.items() if not k.startswith(THREAD_VARIABLES)}
        variables |= dict(pair.split("=", 1) for pair in setting.split())
        if side.threads:
            variables["OMP_NUM_THREADS"] = str(side.threads)
        for launcher in launchers(side.ranks):
            pipe, other_end = multiprocessing.Pipe()
            with other_end:
                process = subprocess.Popen(
                    [sys.executable, str(WORKER), str(other_end.fileno())],
                    env=variables | launcher,
                    pass_fds=[other_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._workers.append((process, pipe))
            job = {"tree": str(side.tree), "subject": side.subject, "waiting": side.waiting}
            job["arguments"] = side.arguments | ({"launcher": launcher} if launcher else {})
            pipe.send(job)

    def answers(self) -> list[Any]:
        """The next answer of each rank: first what the side must agree on."""
        answers = []
        for process, pipe in self._workers:
            try:
                is_right, answer = pipe.recv()
            except (EOFError, ConnectionResetError):
                is_right, answer = False, f"its process died (exit code {process.wait()})"
            if not is_right:
                raise Failed(f"{self.side.name}: {answer}")
            answers.append(answer)
        return answers

    def _ask(self, method: str) -> list[Any]:
        for _, pipe in self._workers:
            with contextlib.suppress(BrokenPipeError):  # `answers` says that the process died
                pipe.send(method)
        return self.answers()

    def signal(self, number: int) -> None:
        """To its processes and what they started, also threads that OpenMP keeps spinning."""
        for process, _ in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def turns(self, count: int) -> None:
        """The work of the case so many times; the seconds of the slowest rank."""
        self.signal(signal.SIGCONT)
        self.seconds += [max(self._ask("turn")) for _ in range(count)]
        self.signal(signal.SIGSTOP)

    def end(self) -> None:
        """Take the facts and end."""
        self.signal(signal.SIGCONT)
        facts = self._ask("facts")
        self.facts = {**facts[0], "peak GB": sum(rank["peak GB"] for rank in facts)}
        self.kill()

    def kill(self) -> None:
        """End the processes, and wait until their memory is free."""
        self.signal(signal.SIGKILL)
        for process, pipe in self._workers:
            process.wait()
            pipe.close()
        self._workers.clear()


def agree(side: str, value: Any, expected: Any, tolerance: float) -> None:
    """Raise Failed unless numbers are near each other, and anything else is equal."""
    if value is None or expected is None:
        return
    if isinstance(value, list) and len(value) == len(expected):
        pairs = zip(value, expected, strict=True)
        near = all(abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in pairs)
    else:
        near = value == expected
    if not near:
        raise Failed(f"{side} has {str(value)[:200]}, ours {str(expected)[:200]}")


def run_case(case: Case, rounds: int) -> dict[str, Any]:
    """The figures of a case: seconds of every turn, rates and ratios, by side. Raises Failed."""
    expected: Any = None
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        for side in case.sides:
            runner = Running(side, fastest_setting(side))
            stack.callback(runner.kill)
            running.append(runner)
            (agreed, *_) = runner.answers()
            runner.signal(signal.SIGSTOP)
            agree(side.name, agreed, expected, case.tolerance)
            expected = agreed if expected is None else expected
            if not case.together:
                runner.turns(rounds)
                runner.end()
        for done in range(rounds if case.together else 0):
            for number in range(len(running)):
                running[(done + number) % len(running)].turns(1)
        for runner in running if case.together else ():
            runner.end()
    return figures(case, running)


def fastest_setting(side: Side) -> str:
    """That of its settings with which one turn takes the least time."""
    seconds = {}
    for setting in side.settings if len(side.settings) > 1 else ():
        runner = Running(side, setting)
        try:
            runner.answers()
            runner.turns(1)
            (seconds[setting],) = runner.seconds
        finally:
            runner.kill()
    return min(seconds, key=seconds.__getitem__, default=side.settings[0])


def figures(case: Case, running: Sequence[Running]) -> dict[str, Any]:
    """Seconds, rates and facts of each side, and how many times as long as ours the others take."""
    sides = {}
    ratios: dict[str, Any] = {}
    for runner in running:
        median = statistics.median(runner.seconds)
        side = {"seconds": runner.seconds, "median": median, **runner.facts}
        side |= {"rate": case.amount / median} | (
            {"setting": runner.setting} if runner.setting else {}
        )
        sides[runner.side.name] = side
        values = [a / b for a, b in zip(runner.seconds, running[0].seconds, strict=True)]
        ratio = {"median": statistics.median(values), "range": [min(values), max(values)]}
        ratios |= {runner.side.name: ratio} if runner is not running[0] else {}
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
    rows = []
    for first, *others in lines:
        cells = [first.ljust(width[0]), *map(str.rjust, others, width[1:])]
        rows.append("  " + "  ".join(cells).rstrip())
    return rows


def commit_of(tree: Path) -> str:
    """The commit of a checkout as git describes it, or `unknown`."""
    words = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
