#!/usr/bin/env python
"""Hangs of a rank: is the right one named, how long does that take, and does everything end.

A cell is a place at which a rank stops making progress, a way in which it does, which rank it is,
and a launcher. Ranks train a tiny model on CPUs until the culprit comes to the place. Printed for
each cell: whether rank, process, host and phase were named right, the seconds from the hang to the
report and from there until every process had ended, the exit code of a rank that was not ended by a
signal, and what remained (processes, files of /dev/shm). Where the network between two ranks is
cut, either is right. Exit code 1 if a cell is not as it must
be: named right within the limit of the phase plus 15 s, ended within 5 s more, nothing left.

Without --all, --cells of them are drawn with --seed, at least one of each place and each kind.
`network` (the culprit's connections are cut) needs root, unshare and ip. Needs Linux.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.shared import namespaces, ranks

HUNG = 4
REPORT_WITHIN = 15.0  # seconds after the limit
END_WITHIN = 5.0
PATIENCE = 90.0
LONG = {"import", "start-up", "first iteration", "evaluation", "save"}
ITERATION_LIMIT = 3
LONG_LIMIT = 6
IMPORT_LIMIT = 20
# place: (module, function, call at which it hangs, axis, flags, phases that are right)
TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
PLACES = {
    "import": ("megatron.config.command_line", "read", 1, "", (), ("start-up",)),
    "start-up": ("megatron.training.build", "build_run", 1, "", (), ("start-up",)),
    "first iteration": (
        "megatron.training.step",
        "make_batch",
        1,
        "",
        (),
        ("first iteration 1, data",),
    ),
    "data": ("megatron.training.step", "make_batch", 20, "", (), ("data",)),
    "forward": ("megatron.model.gpt", "GPTModel.forward", 20, "", (), ("forward",)),
    "backward": ("torch.autograd", "backward", 20, "", (), ("backward",)),
    "TP collective": (
        "megatron.parallel.collectives",
        "start_all_reduce",
        400,
        "tp",
        (TP, "WORLD"),
        ("collective",),
    ),
    "DP collective": (
        "megatron.parallel.ddp",
        "start_all_reduce",
        8,
        "instances",
        (),
        ("gradient reduction",),
    ),
    "PP receive": (
        "megatron.parallel.pipeline",
        "P2PLinks.receive",
        30,
        "",
        (PP, "WORLD"),
        ("pipeline transfer",),
    ),
    "optimizer": (
        "megatron.optimizer.optimizer",
        "MixedPrecisionOptimizer.step",
        3,
        "",
        (),
        ("optimizer",),
    ),
    "evaluation": (
        "megatron.training.evaluation",
        "evaluate",
        1,
        "",
        ("--eval-interval", "3"),
        ("evaluation",),
    ),
    "save": (
        "megatron.training.checkpointing.save",
        "save_checkpoint",
        1,
        "",
        ("--save-interval", "3"),
        ("save",),
    ),
}
KINDS = ("sleep", "stopped", "C code with the lock", "disk", "network")
FLAGS = "--lr 0.003 --global-batch-size 12 --train-iters 500 --eval-iters 1".split()
# the culprit hangs; module, name, at, axis, kind, culprit are defined before
CHANGES = """
import importlib, re, signal, subprocess, time

def hang():
    print(f"hangs {os.getpid()} {time.time()}", file=sys.stderr, flush=True)
    if kind == "sleep":
        time.sleep(1000)
    elif kind == "stopped":
        import signal
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    elif kind == "C code with the lock":
        re.match("(a+)+$", "a" * 60 + "b")
    elif kind == "disk":
        os.mkfifo(f"fifo.{os.getpid()}")
        open(f"fifo.{os.getpid()}").read()
    else:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)

if rank == culprit:
    owner = importlib.import_module(module)
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    name = name.split(".")[-1]
    right = getattr(owner, name)
    calls = []

    def wrong(*args, **kwargs):
        if not axis or any(getattr(one, "name", "") == axis for one in args):
            calls.append(1)
            if len(calls) == at:
                hang()
        return right(*args, **kwargs)

    wrong.__code__ = wrong.__code__.replace(co_name=name)
    setattr(owner, name, wrong)
"""


@dataclass(frozen=True)
class Cell:
    """A case: `culprit` of `world` ranks hangs at `place` in the way of `kind`."""

    place: str
    kind: str
    culprit: int
    world: int
    launcher: str

    def __str__(self) -> str:
        return (
            f"{self.place:16s} {self.kind:21s} {f'{self.culprit} of {self.world}':7s} "
            f"{self.launcher:9s}"
        )

    @property
    def limit(self) -> int:
        """Seconds without progress after which the culprit counts as hung."""
        if self.place == "import":
            return IMPORT_LIMIT
        return LONG_LIMIT if self.place in LONG else ITERATION_LIMIT


@dataclass
class Outcome:
    """What happened in a cell."""

    named: str
    right: bool
    to_report: float
    to_end: float
    codes: list[int | None]
    left: str

    def problems(self, cell: Cell) -> list[str]:
        """What is not as it must be."""
        found = []
        if not self.right:
            found.append(f"named: {self.named or 'nobody'}")
        if self.to_report > cell.limit + REPORT_WITHIN:
            found.append("late")
        if self.to_end > END_WITHIN:
            found.append("ended late")
        if self.left:
            found.append(f"left: {self.left}")
        codes = self.codes if cell.launcher != "torchrun" else [HUNG]
        if HUNG not in codes or not set(codes) <= {HUNG, -signal.SIGKILL}:
            found.append(f"exit codes {codes}")
        return found


def all_cells() -> list[Cell]:
    """Every cell that makes sense."""
    found = []
    for place in PLACES:
        for kind in KINDS:
            for culprit, world in ((0, 2), (1, 2), (1, 3), (2, 3)):
                for launcher in ranks.LAUNCHERS:
                    early = place in ("import", "start-up", "save", "evaluation")
                    # a cut network shows in the next collective only; torchrun's agents have theirs
                    if kind == "network" and (launcher == "torchrun" or early or world == 3):
                        continue
                    if place == "TP collective" and world == 3:
                        continue  # four heads
                    if place == "PP receive" and world == 3:
                        continue
                    found.append(Cell(place, kind, culprit, world, launcher))
    return found


def drawn(cells: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """So many cells, at least one of each place with each kind as far as that goes."""
    generator = random.Random(seed)
    shuffled = generator.sample(list(cells), len(cells))
    if not namespaces.available():
        shuffled = [cell for cell in shuffled if cell.kind != "network"]
    pairs: set[tuple[str, str]] = set()
    first = []
    for cell in shuffled:
        if (cell.place, cell.kind) not in pairs:
            pairs.add((cell.place, cell.kind))
            first.append(cell)
    rest = [cell for cell in shuffled if cell not in first]
    chosen = [*first, *rest][:count]
    return sorted(chosen, key=lambda cell: (list(PLACES).index(cell.place), KINDS.index(cell.kind)))


def flags(cell: Cell) -> list[str]:
    """The command line of the script."""
    _, _, _, _, more, _ = PLACES[cell.place]
    words = [str(cell.world) if word == "WORLD" else word for word in more]
    for flag in ("--eval-interval", "--save-interval"):
        words += [] if flag in more else [flag, "1000"]
    long = str(LONG_LIMIT)
    return [
        *ranks.tiny_model(4),
        *FLAGS,
        *words,
        *("--save", "saved"),
        *("--hang-timeout-seconds", str(ITERATION_LIMIT)),
        *(
            "--hang-timeout-startup-seconds",
            long if cell.place == "start-up" else str(IMPORT_LIMIT),
        ),
        *("--hang-timeout-first-iteration-seconds", long),
        *("--hang-timeout-evaluation-seconds", long),
        *("--hang-timeout-save-seconds", long),
    ]


def start(
    cell: Cell, folder: Path, network: namespaces.Network | None
) -> list[subprocess.Popen[bytes]]:
    """The processes that a launcher starts; their stderr is `folder`/err."""
    names = "module, name, at, axis, kind, culprit"
    values = (*PLACES[cell.place][:4], cell.kind, cell.culprit)
    ranks.write_rank(folder, f"{names} = {values!r}\n{CHANGES}")
    launch = ranks.Launch(cell.launcher, cell.world, flags(cell))
    if network:
        address = "10.99.0.2" if cell.culprit == 0 else "10.99.0.1"
        launch = replace(
            launch,
            apart=True,
            address=address,
            enter=lambda rank: network.enter(int(rank == cell.culprit)),
        )
    return ranks.start(launch, folder)


def run(cell: Cell, keep: Path | None) -> Outcome:
    """One cell."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        folder = Path(name)
        shared = ranks.shared_files()
        network = namespaces.Network() if cell.kind == "network" else None
        processes = start(cell, folder, network)
        try:
            outcome = watch(cell, folder, processes)
        finally:
            ranks.end(folder, processes)
            if network:
                network.close()
        files = ranks.left_behind(shared)
        outcome.left = " ".join(filter(None, [outcome.left, *files]))
        if keep and outcome.problems(cell):
            keep.mkdir(parents=True, exist_ok=True)
            for part in ("err", "log"):
                shutil.copy(folder / part, keep / f"{str(cell).replace(' ', '_')}.{part}")
    return outcome


def watch(cell: Cell, folder: Path, processes: list[subprocess.Popen[bytes]]) -> Outcome:
    """Wait for the hang, its report and the end of all."""
    hung_at = reported_at = ended_at = 0.0
    pid = 0
    named: list[tuple[str, str, str, str]] = []
    deadline = time.time() + PATIENCE
    while time.time() < deadline:
        text = (folder / "err").read_text(errors="replace")
        if not hung_at and (match := re.search(r"hangs (\d+) ([\d.]+)", text)):
            pid = int(match[1])
            hung_at = float(match[2])
        if not reported_at and (named := reports(text)):
            reported_at = time.time()
        if all(one.poll() is not None for one in processes) and not ranks.living(folder):
            ended_at = time.time()
            break
        time.sleep(0.05)
    named = reports((folder / "err").read_text(errors="replace")) or named
    culprits = [(str(cell.culprit), str(pid), socket.gethostname())]
    phases = PLACES[cell.place][5]
    if cell.kind == "network":  # both wait in the next collective; a link has two ends
        phases = (
            *phases,
            "collective",
            *(f"{one.partition(',')[0]}, collective" for one in phases),
        )
        other = processes[1 - cell.culprit].pid
        culprits.append((str(1 - cell.culprit), str(other), socket.gethostname()))
    is_right = bool(named) and named[0][:3] in culprits and named[0][3] in phases
    ended_at = ended_at or time.time()
    time.sleep(0.2)
    left = ranks.living(folder)
    return Outcome(
        "; ".join(f"rank {one[0]} ({one[1]}): {one[3]}" for one in named),
        is_right,
        (reported_at or ended_at) - hung_at,
        ended_at - (reported_at or ended_at),
        [one.poll() for one in processes],
        f"processes {left}" if left else "",
    )


def reports(text: str) -> list[tuple[str, str, str, str]]:
    """(rank, process, host, phase) of each that was named."""
    found = re.findall(r"hang: rank (\d+) \(process (\w+) on (\S+)\) .*?phase: ([^;\n]+);", text)
    return list(dict.fromkeys(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a cell is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="every cell")
    parser.add_argument("--only", metavar="TEXT", help="those whose row has this text")
    parser.add_argument("--from-cell", type=int, default=0, metavar="N", help="omit the first N")
    parser.add_argument("--to-cell", type=int, metavar="N", help="omit those from the N-th on")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="output of cells that fail")
    args = parser.parse_args(argv)
    cells = all_cells() if args.all else drawn(all_cells(), args.cells, args.seed)
    cells = cells[args.from_cell : args.to_cell]
    cells = [cell for cell in cells if not args.only or args.only in str(cell)]
    print(
        f"{'place':16s} {'kind':21s} {'rank':7s} {'launcher':9s} limit  named   report  end   codes"
    )
    bad = 0
    for cell in cells:
        outcome = run(cell, args.keep)
        problems = outcome.problems(cell)
        bad += bool(problems)
        print(
            f"{cell} {cell.limit:4d} s  {'right' if outcome.right else 'WRONG':6s} "
            f"{outcome.to_report:5.1f} s {outcome.to_end:4.1f} s  "
            f"{' '.join(map(str, outcome.codes))}{''.join(f'  {one}' for one in problems)}",
            flush=True,
        )
    print(f"{len(cells) - bad} of {len(cells)} cells as they must be (seed {args.seed})")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
