"""Hangs of a rank: is the right one named, how long does that take, and does everything end.

A cell is a place at which a rank stops making progress, a kind of hang, the rank, and a launcher.
Printed: whether rank, process, host and phase were named right, the seconds from the hang to the
report and from there until every process had ended, and the exit codes of what was started. Wrong
is a report later than 15 s after the limit of the phase, a process that lives 5 s after the report,
and what is left behind. Where the network is cut, either end is right.

--cells of them are drawn, at least one of each place and each kind.
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

from bench.faults import inject, ranks
from bench.faults.inject import Fault

HUNG = 4
REPORT_WITHIN = 15.0  # seconds after the limit
END_WITHIN = 5.0
PATIENCE = 90.0
ITERATION = 3  # limits, seconds
LONG = 6
IMPORT = 20
TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
# place: the call at which it hangs, flags, phase that is right, limit after which it counts as hung
SITES = {
    "import": (1, (), "start-up", IMPORT),
    "start-up": (1, (), "start-up", LONG),
    "first iteration": (1, (), "first iteration 1, data", LONG),
    "data": (20, (), "data", ITERATION),
    "forward": (20, (), "forward", ITERATION),
    "backward": (20, (), "backward", ITERATION),
    "TP collective": (400, TP, "collective", ITERATION),
    "DP collective": (8, (), "gradient reduction", ITERATION),
    "PP receive": (30, PP, "pipeline transfer", ITERATION),
    "optimizer": (3, (), "optimizer", ITERATION),
    "evaluation": (1, (), "evaluation", LONG),
    "save": (1, (), "save", LONG),
}
CUT = "network cut"
KINDS = ("hang", "SIGSTOP", "C code with the lock", "stuck read", CUT)
LAUNCHERS = ("env", "srun", "torchrun")
Named = tuple[str, str, str, str]  # rank, process, host and phase in a report


@dataclass(frozen=True)
class Cell:
    """`culprit` of `world` ranks hangs at `site` in the way of `kind`."""

    site: str
    kind: str
    culprit: int
    world: int
    launcher: str

    def __str__(self) -> str:
        rank = f"{self.culprit} of {self.world}"
        return f"{self.site:16s} {self.kind:21s} {rank:7s} {self.launcher:9s}"

    @property
    def makes_sense(self) -> bool:
        """A cut network shows in the next collective only, and torchrun's agents have theirs; the
        layouts of some places are of two ranks."""
        if self.kind == CUT:
            early = self.site in ("import", "start-up", "save", "evaluation")
            return not early and self.launcher != "torchrun" and self.world == 2
        return self.world == 2 or self.site not in ("TP collective", "PP receive")

    def flags(self) -> list[str]:
        """The command line of the script."""
        start_up = LONG if self.site == "start-up" else IMPORT
        evaluation, save = (3 if self.site == name else 1000 for name in ("evaluation", "save"))
        words = (
            "--lr 0.003 --global-batch-size 12 --train-iters 500 --eval-iters 1 --save saved "
            f"--eval-interval {evaluation} --save-interval {save} --hang-timeout-seconds "
            f"{ITERATION} --hang-timeout-startup-seconds {start_up} "
            f"--hang-timeout-first-iteration-seconds {LONG} --hang-timeout-evaluation-seconds "
            f"{LONG} --hang-timeout-save-seconds {LONG}"
        )
        return [*ranks.tiny_model(4), *words.split(), *SITES[self.site][1]]


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


def run(cell: Cell, folder: Path) -> list[str]:
    """Print the row of a cell; what is not as it must be."""
    folder.mkdir()
    call, _, _, limit = SITES[cell.site]
    site = "data" if cell.site == "first iteration" else cell.site
    inject.write(folder, [Fault(cell.kind, site, cell.culprit, call)])
    shared = ranks.shared_files()
    reported: list[float] = []
    pids: list[int] = []

    def watch(processes: Sequence[subprocess.Popen]) -> None:
        pids[:] = [process.pid for process in processes]
        if not reported and reports(folder):
            reported.append(time.time())

    cut_off = cell.culprit if cell.kind == CUT else None
    launch = ranks.Launch(cell.launcher, cell.world, cell.flags(), cut_off=cut_off)
    codes, _ = ranks.attempt(launch, folder, PATIENCE, watch=watch)
    ended = time.time()
    named = reports(folder)
    hung = next(iter(inject.injected(folder)), {"pid": 0, "time": ended})
    at_report = next(iter(reported), ended)
    is_right = bool(named) and is_culprit(cell, named[0], pids, hung["pid"])
    times = at_report - hung["time"], ended - at_report
    problems = [] if is_right else [f"named: {named or 'nobody'}"]
    problems += problems_of(cell, *times, codes, ranks.left_behind(shared))
    print(
        f"{cell} {limit:4d} s  {'right' if is_right else 'WRONG':6s} {times[0]:5.1f} s "
        f"{times[1]:4.1f} s  {' '.join(map(str, codes))}{''.join(f'  {p}' for p in problems)}",
        flush=True,
    )
    return problems


def problems_of(
    cell: Cell, to_report: float, to_end: float, codes: Sequence[int], files: Sequence[str]
) -> list[str]:
    """What is not as it must be in the seconds until the report and from there to the end of all,
    in exit codes and files that are left."""
    problems = []
    if to_report > SITES[cell.site][3] + REPORT_WITHIN:
        problems.append("late")
    if to_end > END_WITHIN:
        problems.append("ended late")
    if files:
        problems.append(f"left in /dev/shm: {' '.join(files)}")
    if cell.launcher != "torchrun" and (HUNG not in codes or {*codes} - {HUNG, -signal.SIGKILL}):
        problems.append(f"exit codes {codes}")
    return problems


def is_culprit(cell: Cell, named: Named, pids: Sequence[int], pid: float) -> bool:
    """Is this the rank that hangs, and its phase?"""
    rank, process, host, phase = named
    right = SITES[cell.site][2]
    culprits = {str(cell.culprit): str(pid)}
    phases = {right}
    if cell.kind == CUT:  # both wait in the next collective
        culprits[str(1 - cell.culprit)] = str(pids[1 - cell.culprit])
        phases |= {"collective", f"{right.partition(',')[0]}, collective"}
    return culprits.get(rank) == process and host == socket.gethostname() and phase in phases


def reports(folder: Path) -> list[Named]:
    """Each that was named so far."""
    text = (folder / "err").read_text(errors="replace")
    lines = re.findall(r"hang: rank (\d+) \(process (\w+) on (\S+)\) .*?phase: ([^;\n]+);", text)
    return list(dict.fromkeys(lines))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--cells", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose row has this text")


def check(args: argparse.Namespace, home: Path) -> bool:
    """Print a row per cell; True if all are as they must be."""
    cells = [cell for cell in all_cells() if args.only in str(cell)]
    if not ranks.can_cut_networks():
        cells = [cell for cell in cells if cell.kind != CUT]
    cells = drawn(cells, args.cells, args.seed)
    print(f"{'place':16s} {'kind':21s} rank    launcher  limit  named   report  end   codes")
    bad = 0
    for number, cell in enumerate(cells):
        folder = home / f"cell {number}"
        if run(cell, folder):
            bad += 1
        else:
            shutil.rmtree(folder)
    print(f"{len(cells) - bad} of {len(cells)} cells as they must be (seed {args.seed})")
    return not bad
