"""Hangs of a rank: is the right one named, how long does that take, and does everything end.

A cell is a place at which a rank stops making progress, a kind of hang, the rank, and a launcher.
Printed: whether rank, process, host and phase were named right, the seconds from the hang to the
report and from there until every process had ended, and the exit codes of what was started. Wrong
is a report later than 15 s after the limit of the phase, a process that lives 5 s after the report,
and what is left behind. Where the network is cut, either end is right.

--cells of them are drawn, at least one of each place and each kind; --all are all.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks.faults import inject, ranks
from tools.benchmarks.faults.inject import Fault

HUNG = 4
REPORT_WITHIN = 15.0  # seconds after the limit
END_WITHIN = 5.0
PATIENCE = 90.0
LONG = {"import", "start-up", "first iteration", "evaluation", "save"}
ITERATION_LIMIT = 3
LONG_LIMIT = 6
IMPORT_LIMIT = 20
TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
# place: the call at which it hangs, flags, phase that is right
SITES = {
    "import": (1, (), "start-up"),
    "start-up": (1, (), "start-up"),
    "first iteration": (1, (), "first iteration 1, data"),
    "data": (20, (), "data"),
    "forward": (20, (), "forward"),
    "backward": (20, (), "backward"),
    "TP collective": (400, TP, "collective"),
    "DP collective": (8, (), "gradient reduction"),
    "PP receive": (30, PP, "pipeline transfer"),
    "optimizer": (3, (), "optimizer"),
    "evaluation": (1, (), "evaluation"),
    "save": (1, (), "save"),
}
KINDS = ("hang", "SIGSTOP", "C code with the lock", "stuck read", "network cut")
LAUNCHERS = ("env", "srun", "torchrun")


@dataclass(frozen=True)
class Cell:
    """`culprit` of `world` ranks hangs at `site` in the way of `kind`."""

    site: str
    kind: str
    culprit: int
    world: int
    launcher: str

    def __str__(self) -> str:
        return (
            f"{self.site:16s} {self.kind:21s} {f'{self.culprit} of {self.world}':7s} "
            f"{self.launcher:9s}"
        )

    @property
    def limit(self) -> int:
        """Seconds without progress after which the culprit counts as hung."""
        if self.site == "import":
            return IMPORT_LIMIT
        return LONG_LIMIT if self.site in LONG else ITERATION_LIMIT

    @property
    def makes_sense(self) -> bool:
        """A cut network shows in the next collective only, and torchrun's agents have theirs; the
        layouts of some places are of two ranks."""
        if self.kind == "network cut":
            early = self.site in ("import", "start-up", "save", "evaluation")
            return not early and self.launcher != "torchrun" and self.world == 2
        return self.world == 2 or self.site not in ("TP collective", "PP receive")

    def flags(self) -> list[str]:
        """The command line of the script."""
        limits = {
            "": ITERATION_LIMIT,
            "-startup": LONG_LIMIT if self.site == "start-up" else IMPORT_LIMIT,
            "-first-iteration": LONG_LIMIT,
            "-evaluation": LONG_LIMIT,
            "-save": LONG_LIMIT,
        }
        words = "--lr 0.003 --global-batch-size 12 --train-iters 500 --eval-iters 1".split()
        words += ["--save", "saved"]
        words += ["--eval-interval", "3" if self.site == "evaluation" else "1000"]
        words += ["--save-interval", "3" if self.site == "save" else "1000"]
        for phase, seconds in limits.items():
            words += [f"--hang-timeout{phase}-seconds", str(seconds)]
        return [*ranks.tiny_model(4), *words, *SITES[self.site][1]]


def all_cells() -> list[Cell]:
    """Every cell that makes sense."""
    cells = [
        Cell(site, kind, culprit, world, launcher)
        for site in SITES
        for kind in KINDS
        for culprit, world in ((0, 2), (1, 2), (1, 3), (2, 3))
        for launcher in LAUNCHERS
    ]
    return [cell for cell in cells if cell.makes_sense]


def drawn(cells: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """So many cells, at least one of each place with each kind as far as that goes."""
    shuffled = random.Random(seed).sample(list(cells), len(cells))
    first = list({(cell.site, cell.kind): cell for cell in reversed(shuffled)}.values())
    remaining = [cell for cell in shuffled if cell not in first]
    chosen = [*first, *remaining][:count]
    return sorted(chosen, key=lambda cell: (list(SITES).index(cell.site), KINDS.index(cell.kind)))


@dataclass
class Outcome:
    """What happened in a cell: (rank, process, host, phase) of each that was named, seconds until
    then and from there to the end of all."""

    named: list[tuple[str, str, str, str]]
    is_right: bool
    to_report: float
    to_end: float
    codes: list[int]
    files: list[str]

    def problems(self, cell: Cell) -> list[str]:
        """What is not as it must be."""
        problems = []
        if not self.is_right:
            problems.append(f"named: {self.named or 'nobody'}")
        if self.to_report > cell.limit + REPORT_WITHIN:
            problems.append("late")
        if self.to_end > END_WITHIN:
            problems.append("ended late")
        if self.files:
            problems.append(f"left in /dev/shm: {' '.join(self.files)}")
        codes = self.codes if cell.launcher != "torchrun" else [HUNG]
        if HUNG not in codes or not set(codes) <= {HUNG, -signal.SIGKILL}:
            problems.append(f"exit codes {codes}")
        return problems


def run(cell: Cell, folder: Path) -> Outcome:
    """One cell."""
    folder.mkdir()
    phase, _, _ = SITES[cell.site]
    phase_name = "data" if cell.site == "first iteration" else cell.site
    inject.write(folder, [Fault(cell.kind, phase_name, cell.culprit, phase)])
    shared = ranks.shared_files()
    reported: list[float] = []
    pids: list[int] = []

    def watch(processes: Sequence[subprocess.Popen]) -> None:
        pids[:] = [process.pid for process in processes]
        if not reported and reports((folder / "err").read_text(errors="replace")):
            reported.append(time.time())

    cut_off = cell.culprit if cell.kind == "network cut" else None
    launch = ranks.Launch(cell.launcher, cell.world, cell.flags(), cut_off=cut_off)
    codes, _ = ranks.attempt(launch, folder, PATIENCE, watch=watch)
    ended = time.time()
    named = reports((folder / "err").read_text(errors="replace"))
    hung = next(iter(inject.injected(folder)), {"pid": 0, "time": ended})
    at_report = next(iter(reported), ended)
    is_right = bool(named) and is_culprit(cell, named[0], pids, hung["pid"])
    files = ranks.left_behind(shared)
    return Outcome(named, is_right, at_report - hung["time"], ended - at_report, codes, files)


def is_culprit(cell: Cell, named: tuple[str, ...], pids: Sequence[int], pid: float) -> bool:
    """Is this the rank that hangs, and its phase?"""
    rank, process, host, phase = named
    culprits = {str(cell.culprit): str(pid)}
    phases = {SITES[cell.site][2]}
    if cell.kind == "network cut":  # both wait in the next collective
        culprits[str(1 - cell.culprit)] = str(pids[1 - cell.culprit])
        phases |= {"collective", *(f"{phase.partition(',')[0]}, collective" for phase in phases)}
    return culprits.get(rank) == process and host == socket.gethostname() and phase in phases


def reports(text: str) -> list[tuple[str, str, str, str]]:
    """(rank, process, host, phase) of each that was named."""
    lines = re.findall(r"hang: rank (\d+) \(process (\w+) on (\S+)\) .*?phase: ([^;\n]+);", text)
    return list(dict.fromkeys(lines))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--cells", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="every cell")
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose row has this text")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folders of cells that are wrong")


def check(args: argparse.Namespace, home: Path) -> bool:
    """Print a row per cell; True if all are as they must be."""
    cells = all_cells()
    if not ranks.can_cut_networks():
        cells = [cell for cell in cells if cell.kind != "network cut"]
    cells = [cell for cell in cells if args.only in str(cell)]
    cells = cells if args.all else drawn(cells, args.cells, args.seed)
    print(f"{'place':16s} {'kind':21s} rank    launcher  limit  named   report  end   codes")
    bad = 0
    for number, cell in enumerate(cells):
        folder = home / str(number)
        outcome = run(cell, folder)
        problems = outcome.problems(cell)
        bad += bool(problems)
        print(
            f"{cell} {cell.limit:4d} s  {'right' if outcome.is_right else 'WRONG':6s} "
            f"{outcome.to_report:5.1f} s {outcome.to_end:4.1f} s  "
            f"{' '.join(map(str, outcome.codes))}{''.join(f'  {problem}' for problem in problems)}",
            flush=True,
        )
        if problems and args.keep:
            shutil.copytree(folder, args.keep / f"cell {number}", dirs_exist_ok=True)
        shutil.rmtree(folder)
    print(f"{len(cells) - bad} of {len(cells)} cells as they must be (seed {args.seed})")
    return not bad
