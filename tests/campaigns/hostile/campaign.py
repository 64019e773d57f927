"""Runs readers on damaged files in one process and says of each input what became of it. Knows no
format; what is read how is in `tests.campaigns.hostile.kinds`."""

import collections
import contextlib
import importlib.util
import io
import math
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.campaigns.hostile.mutations import SPECIAL, mutated, put_special

HANG_SECONDS = 10
SPARE_BYTES = 500 << 20
REFUSED = object()  # what a reader says of a file that it refuses


class Refused(Exception):
    """A program reported the file and ended with a code that is not 0."""


def run_tool(main: Callable[[list[str]], int], *words: object, good: tuple[int, ...] = (0,)) -> str:
    """What a program prints. Raises Refused where it ends with another code than `good`."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    if code not in good:
        raise Refused(err.getvalue() or out.getvalue())
    return out.getvalue()


class Hang(BaseException):
    """A reader took longer than HANG_SECONDS."""


@dataclass(frozen=True)
class Kind:
    """Files of one kind: `make` writes good ones in a folder, `read` reads them and returns what it
    understood, and raises one of `errors` for what it refuses. `damage` names the files that are
    damaged, one in each input; with `checksummed` a value other than the good one is wrong.
    `oracle` is a second reader: its value is the right one, and what it raises ValueError for is to
    be refused. `forged` inputs, made by hand, are refused: their checksums are right.
    `needs`: modules without which the kind is not run."""

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], Any]
    damage: tuple[str, ...]
    errors: tuple[type[Exception], ...] = (ValueError, OSError, Refused)
    checksummed: bool = False
    needs: tuple[str, ...] = ()
    stream: bool = False  # of any length, also from a pipe, which is waited for
    message: bool = False  # no file: nothing else stands in its place
    cost: float = 1  # how many inputs of a common kind one of these takes
    oracle: Callable[[Path], Any] | None = None
    forged: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)

    def runs_here(self) -> bool:
        """Whether its modules are installed."""
        return all(importlib.util.find_spec(name) is not None for name in self.needs)


class Watch:
    """Notes programs that are started, and writes outside of a folder, by Python's audit events."""

    STARTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.startfile")
    WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod")

    def __init__(self) -> None:
        self.folder: str | None = None
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, words: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in self.STARTS:
            self.found.append("executed")
        elif event == "open":
            path, _, flags = words
            if isinstance(path, str | bytes) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._check(path)
        elif event in self.WRITES and isinstance(words[0], str | bytes):
            self._check(words[0])

    def _check(self, path: str | bytes) -> None:
        place = os.path.abspath(os.fsdecode(path))
        if not place.startswith(self.folder) and place != os.devnull:
            self.found.append(f"written outside: {place}")


def _late(*_: object) -> None:
    raise Hang


def _judge(kind: Kind, folder: Path, good: Any, right: list[Any], spare: int) -> tuple[str, str]:
    """(outcome, details) of reading a folder; `right`: what may be said of it, empty for all."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, hard))
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        value = kind.read(folder)
        outcome, details = ("read", "") if value == good else ("read otherwise", "")
        if right and value not in right:
            outcome = "BAD accepted"
            details = f"{str(value)[:200]} is none of {str(right)[:200]}"
    except Hang:
        outcome, details = "BAD hang", traceback.format_exc(limit=-6)
    except MemoryError:
        outcome, details = "BAD memory", traceback.format_exc(limit=-6)
    except kind.errors as error:
        outcome, details = "refused", str(error)
        if not details or len(details) > 20_000 or "Traceback" in details:
            outcome = "BAD message"
            details = f"{len(details)} characters: {details[:200]}"
        elif right and REFUSED not in right:
            outcome = "BAD refused"
    except BaseException as error:
        outcome = "BAD traceback"
        details = f"{type(error).__name__}\n{traceback.format_exc(limit=-6)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return outcome, details


def _watched(
    kind: Kind, home: Path, good: Any, right: list[Any], spare: int, watch: Watch
) -> tuple[str, str]:
    """(outcome, details) of reading the folder of a case, and of what else happens."""
    folder = home / "case"
    os.chdir(folder)
    watch.found = []
    watch.folder = str(folder)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            outcome, details = _judge(kind, folder, good, right, spare)
    finally:
        watch.folder = None
        os.chdir(home)
    if watch.found:
        return f"BAD {watch.found[0].split(':')[0]}", watch.found[0]
    return outcome, details


def _right(kind: Kind, folder: Path, good: Any) -> list[Any]:
    """What may be said of a damaged folder; nothing where all may."""
    if kind.oracle is None:
        return [good, REFUSED] if kind.checksummed else []
    try:
        return [kind.oracle(folder)]
    except ValueError:
        return [REFUSED]


def one_input(
    kind: Kind, seed: int, good: dict[str, bytes], value: Any, home: Path, watch: Watch
) -> tuple[str, str]:
    """(outcome, details) of input `seed` of a kind: the same for the same seed."""
    chance = random.Random(f"{kind.name} {seed}")
    folder = home / "case"
    _lay_out(folder, good)
    name = chance.choice([name for name in good if any(fnmatch(name, one) for one in kind.damage)])
    others = [os.environb[b"HOSTILE_PAYLOAD"], chance.choice(list(good.values()))]
    data = mutated(good[name], chance, others)
    what = f"{len(data)} bytes, crc32 {zlib.crc32(data):08x}"
    (folder / name).write_bytes(data)
    right = _right(kind, folder, value)
    outcome, details = _watched(kind, home, value, right, SPARE_BYTES + 2 * len(data), watch)
    return outcome, f"{kind.name}, input {seed} ({name}: {what}): {details}"


def one_special(
    kind: Kind, number: int, good: dict[str, bytes], value: Any, home: Path, watch: Watch
) -> tuple[str, str]:
    """(outcome, details) of what is no file, or has no content, in the place of one of a kind."""
    folder = home / "case"
    _lay_out(folder, good)
    names = [name for name in good if any(fnmatch(name, one) for one in kind.damage)]
    name, what = names[number % len(names)], SPECIAL[number]
    put_special(folder / name, what)
    right = [value, REFUSED] if kind.checksummed else []
    spare = SPARE_BYTES + (1 << 30) * (what == "sparse")
    outcome, details = _watched(kind, home, value, right, spare, watch)
    return outcome, f"{kind.name}, {what} for {name}: {details}"


def _lay_out(folder: Path, good: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in good.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def one_forged(kind: Kind, name: str, home: Path, watch: Watch) -> tuple[str, str]:
    """(outcome, details) of a forged input."""
    shutil.rmtree(home / "case", ignore_errors=True)
    (home / "case").mkdir()
    kind.forged[name](home / "case")
    outcome, details = _watched(kind, home, None, [REFUSED], SPARE_BYTES, watch)
    return outcome, f"{kind.name}, {name}: {details}"


def run(kinds: list[Kind], count: int, home: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """({kind: {outcome: inputs}}, the bad ones) of `count` damaged inputs of a kind that costs 1,
    and of all special and forged ones."""
    watch = Watch()
    signal.signal(signal.SIGALRM, _late)
    before = {path.name for path in home.parent.iterdir()}
    counts: dict[str, dict[str, int]] = {}
    bad: list[str] = []
    for kind in kinds:
        good, value = _good(kind, home)
        cases: list[tuple[str, str]] = []
        for seed in range(max(2, math.ceil(count / kind.cost))):
            cases.append(one_input(kind, seed, good, value, home, watch))
        for number in range(2 * kind.stream, len(SPECIAL) * (not kind.message)):
            cases.append(one_special(kind, number, good, value, home, watch))
        cases += [one_forged(kind, name, home, watch) for name in kind.forged]
        bad += [f"{outcome}: {details}" for outcome, details in cases if outcome.startswith("BAD")]
        counts[kind.name] = dict(collections.Counter(outcome for outcome, _ in cases))
    left = {path.name for path in home.parent.iterdir()} - before
    return counts, bad + [f"BAD written outside: {name}" for name in sorted(left)]


def _good(kind: Kind, home: Path) -> tuple[dict[str, bytes], Any]:
    """The files of a kind, and what is read from them. Raises what `read` raises."""
    folder = home / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind.make(folder)
    good = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        value = kind.read(folder)
    os.chdir(home)
    return good, value
