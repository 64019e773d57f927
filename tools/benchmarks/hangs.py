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
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HUNG = 4
REPORT_WITHIN = 15.0  # seconds after the limit
END_WITHIN = 5.0
PATIENCE = 90.0
LAUNCHERS = ("env", "srun", "torchrun")
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
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 211 --lr 0.003 "
    "--mock-data --micro-batch-size 1 --global-batch-size 12 --train-iters 500 --log-interval 1 "
    "--eval-iters 1 --num-workers 0 --device cpu"
).split()
# runs as a rank: makes the culprit hang, then runs the script
CULPRIT = """
import importlib, os, re, runpy, signal, subprocess, sys, time
place, kind, culprit, script = sys.argv[1:5]
module, name, at, axis = place.split("|")
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]

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
            if len(calls) == int(at):
                hang()
        return right(*args, **kwargs)

    wrong.__code__ = wrong.__code__.replace(co_name=name)
    setattr(owner, name, wrong)
sys.argv = [script, *sys.argv[5:]]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
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
                for launcher in LAUNCHERS:
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
    if not network_can_be_cut():
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


def network_can_be_cut() -> bool:
    """Are there network namespaces for this user?"""
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "ip", "nsenter"))


class Network:
    """Two namespaces with a link between them: all ranks but the culprit are in the first."""

    def __init__(self) -> None:
        self.pids = [subprocess.Popen(["unshare", "--net", "sleep", "1000"]).pid for _ in range(2)]
        while any(
            os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
            for pid in self.pids
        ):
            time.sleep(0.01)
        first, second = map(str, self.pids)
        ip = ["ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "eth0"]
        _call(*ip, "netns", second)
        for number, pid in enumerate((first, second), 1):
            for words in (
                ["ip", "addr", "add", f"10.99.0.{number}/24", "dev", "eth0"],
                ["ip", "link", "set", "eth0", "up"],
                ["ip", "link", "set", "lo", "up"],
            ):
                _call("nsenter", "--net", "-t", pid, *words)

    def enter(self, number: int) -> list[str]:
        """The words before a command that runs in the namespace."""
        return ["nsenter", "--net", "-t", str(self.pids[number])]

    def close(self) -> None:
        """Both end."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _call(*words: str) -> None:
    subprocess.run(words, check=True)


def environment(cell: Cell, rank: int, port: int, address: str) -> dict[str, str]:
    """What the launcher of a cell gives a rank."""
    common = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    apart = cell.kind == "network"  # every rank is a node
    local = "0" if apart else str(rank)
    size = "1" if apart else str(cell.world)
    if cell.launcher == "srun":
        return common | {
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(cell.world),
            "SLURM_LOCALID": local,
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_NODEID": str(rank) if apart else "0",
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{cell.world})" if apart else size,
        }
    return common | {
        "RANK": str(rank),
        "WORLD_SIZE": str(cell.world),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": size,
    }


def flags(cell: Cell) -> list[str]:
    """The command line of the script."""
    _, _, _, _, more, _ = PLACES[cell.place]
    words = [str(cell.world) if word == "WORLD" else word for word in more]
    for flag in ("--eval-interval", "--save-interval"):
        words += [] if flag in more else [flag, "1000"]
    long = str(LONG_LIMIT)
    return [
        *MODEL,
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


def start(cell: Cell, folder: Path, network: Network | None) -> list[subprocess.Popen[bytes]]:
    """The processes that a launcher starts; their stderr is `folder`/err."""
    module, name, at, axis, _, _ = PLACES[cell.place]
    (folder / "culprit.py").write_text(CULPRIT)
    script = str(ROOT / "pretrain_gpt.py")
    place = f"{module}|{name}|{at}|{axis}"
    words = ["culprit.py", place, cell.kind, str(cell.culprit), script, *flags(cell)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(
            ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC")
        )
    } | {"PYTHONPATH": str(ROOT)}
    started = []
    with open(folder / "err", "ab") as err, open(folder / "log", "ab") as log:

        def spawn(command: list[str], environ: dict[str, str]) -> None:
            started.append(
                subprocess.Popen(
                    command,
                    cwd=folder,
                    env=kept | environ,
                    stdout=log,
                    stderr=err,
                    start_new_session=True,
                )
            )

        if cell.launcher == "torchrun":
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            spawn([*launch, f"--nproc-per-node={cell.world}", *words], {"OMP_NUM_THREADS": "1"})
            return started
        address = "10.99.0.1" if network else "127.0.0.1"
        if network and cell.culprit == 0:
            address = "10.99.0.2"
        for rank in range(cell.world):
            enter = network.enter(int(rank == cell.culprit)) if network else []
            spawn([*enter, sys.executable, *words], environment(cell, rank, port, address))
    return started


def sessions(leaders: Sequence[int]) -> list[int]:
    """Living processes of these sessions, and of those that torchrun opened for its ranks."""
    found = []
    parents: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if fields[0] not in "ZX":
                parents[int(folder.name)] = (int(fields[1]), int(fields[3]))
    for pid, (_, session) in parents.items():
        if session in leaders:
            found.append(pid)
    return found


def run(cell: Cell, keep: Path | None) -> Outcome:
    """One cell."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        folder = Path(name)
        shared = set(os.listdir("/dev/shm"))
        network = Network() if cell.kind == "network" else None
        processes = start(cell, folder, network)
        children: set[int] = set()
        try:
            outcome = watch(cell, folder, processes, children)
        finally:
            for pid in {*sessions([one.pid for one in processes]), *alive(children)}:
                os.kill(pid, signal.SIGKILL)
            for process in processes:
                process.wait()
            if network:
                network.close()
        new = set(os.listdir("/dev/shm")) - shared  # other programs make files there, too
        files = sorted(one for one in new if one.startswith(("torch", "psm_", "sem.")))
        outcome.left = " ".join(filter(None, [outcome.left, *files]))
        if keep and outcome.problems(cell):
            keep.mkdir(parents=True, exist_ok=True)
            for part in ("err", "log"):
                shutil.copy(folder / part, keep / f"{str(cell).replace(' ', '_')}.{part}")
    return outcome


def alive(pids: set[int]) -> list[int]:
    """Those that are no zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def watch(
    cell: Cell, folder: Path, processes: list[subprocess.Popen[bytes]], children: set[int]
) -> Outcome:
    """Wait for the hang, its report and the end of all; the ranks' processes are added to
    `children`."""
    leaders = [one.pid for one in processes]
    hung_at = reported_at = ended_at = 0.0
    pid = 0
    named: list[tuple[str, str, str, str]] = []
    deadline = time.time() + PATIENCE
    while time.time() < deadline:
        text = (folder / "err").read_text(errors="replace")
        if not hung_at and (match := re.search(r"hangs (\d+) ([\d.]+)", text)):
            pid = int(match[1])
            hung_at = float(match[2])
        if not hung_at or not children:
            children.update(ranks_below(leaders, cell))
        if not reported_at and (named := reports(text)):
            reported_at = time.time()
        if all(one.poll() is not None for one in processes) and not alive(children):
            ended_at = time.time()
            break
        time.sleep(0.05)
    named = reports((folder / "err").read_text(errors="replace")) or named
    culprits = [(str(cell.culprit), str(pid), socket.gethostname())]
    phases = PLACES[cell.place][5]
    if cell.kind == "network":  # both wait in the next collective; a link has two ends
        phases = (*phases, "collective")
        other = processes[1 - cell.culprit].pid
        culprits.append((str(1 - cell.culprit), str(other), socket.gethostname()))
    is_right = bool(named) and named[0][:3] in culprits and named[0][3] in phases
    ended_at = ended_at or time.time()
    time.sleep(0.2)
    left = [*sessions(leaders), *alive(children)]
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


def ranks_below(leaders: Sequence[int], cell: Cell) -> Iterator[int]:
    """The processes of the ranks."""
    if cell.launcher != "torchrun":
        yield from leaders
        return
    for leader in leaders:
        try:
            for task in Path(f"/proc/{leader}/task").iterdir():
                yield from map(int, (task / "children").read_text().split())
        except OSError:
            continue


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
