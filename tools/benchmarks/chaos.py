#!/usr/bin/env python
"""Faults of many kinds in runs that are started again until they are done: is the result that of an
undisturbed run, and does the run's ledger say what happened.

A run trains a tiny model on CPUs with two ranks. --seed draws layout, launcher and a list of
faults: kind, rank, and the iteration (counted from the start or the fault before) or step of a save
at which the fault comes. After each failure the same command starts again (a shell loop, or
torchrun's agent with --max-restarts). Checked at the end of a run: its checkpoint of the last
iteration equals that of an undisturbed run byte for byte; the ledger (run_events.jsonl) has an
attempt for each start that came as far as iteration 1, and for each fault that ends a rank a
failure or the next attempt's start; no process and no file in /dev/shm remains. Exit code 1 if
not. Needs Linux.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.training.logging.run_events_file import NAME, attempts_of, failure_of, read_events
from tools.shared import ranks

# kind: whether the rank ends or hangs by it
KINDS = {
    "SIGKILL": True,
    "SIGKILL in a save": True,
    "SIGKILL of both ranks": True,
    "SIGSTOP": True,
    "exception": True,
    "abort": True,
    "out of memory": True,
    "NaN": True,
    "hang in data": True,
    "hang in the backward pass": True,
    "hang in a save": True,
    "disk full": True,
    "failing disk": True,
    "launcher killed": True,
    "slow disk": False,
    "clock one hour ahead": False,
    "clock one hour back": False,
}
IN_SAVE = {"SIGKILL in a save", "hang in a save", "disk full", "failing disk"}
LAYOUTS = {
    "dp 2": ("--use-distributed-optimizer",),
    "tp 2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp 2": ("--pipeline-model-parallel-size", "2"),
}
LAUNCHERS = ("loop", "torchrun loop", "torchrun --max-restarts")
ITERATIONS = 30
FLAGS = (
    "--lr 0.003 --global-batch-size 4 --eval-iters 0 "
    f"--train-iters {ITERATIONS} --save-interval 3 "
    "--save saved --load saved --crash-loop-limit 0 --hang-timeout-seconds 3 "
    "--hang-timeout-save-seconds 4 --hang-timeout-first-iteration-seconds 30"
).split()
STARTS = 3  # per fault, before a run counts as one that never ends
PATIENCE = 120.0  # seconds for one attempt
# A rank does what faults.json says.
CHANGES = """
import errno, glob, json, resource, signal, time
faults = json.load(open("faults.json"))
since = {"step": 0, "save": 0}
slow = [0.0]

def due(place):
    number = len(glob.glob("injected.*"))
    if number >= len(faults):
        return None
    fault = faults[number]
    if fault["rank"] != rank or (fault["place"] == "save") != (place == "save"):
        return None
    since[place] += 1
    if since[place] < fault["at"]:
        return None
    since.update(step=0, save=0)
    with open(f"injected.{number}", "w") as file:
        print(os.getpid(), time.time(), file=file)
    return fault["kind"]

def do(kind):
    if kind in ("SIGKILL", "SIGKILL in a save"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "SIGKILL of both ranks":
        open("kill_all", "w").close()
        time.sleep(1000)
    elif kind == "launcher killed":
        open("kill_launcher", "w").close()
        time.sleep(1000)
    elif kind == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    elif kind == "exception":
        raise RuntimeError("an injected exception")
    elif kind == "abort":
        os.abort()
    elif kind == "out of memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
        bytearray(1 << 28)
    elif kind.startswith("hang"):
        time.sleep(1000)
    elif kind == "disk full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif kind == "failing disk":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    elif kind == "slow disk":
        slow[0] = 0.02
    elif kind.startswith("clock"):
        right, shift = time.time, 3600 if kind.endswith("ahead") else -3600
        time.time = lambda: right() + shift

import torch
from megatron.checkpoint import filesystem
from megatron.model import gpt
from megatron.training import loop, step

def around(owner, name, wants):
    right = getattr(owner, name)

    def wrong(*args, **kwargs):
        kind = wants()
        if kind == "NaN":
            gone = right(*args, **kwargs)
            return gone * float("nan")
        if kind:
            do(kind)
        return right(*args, **kwargs)

    setattr(owner, name, wrong)

pending = []

def begin():
    if kind := due("step"):
        places = {"hang in data": "data", "NaN": "forward", "hang in the backward pass": "backward"}
        if kind not in places:
            return kind
        pending.append((places[kind], kind))

def at(place):
    def wants():
        if pending and pending[0][0] == place:
            return pending.pop()[1]
    return wants

def disk_step(self, action, path):
    time.sleep(slow[0])
    if kind := due("save"):
        do(kind)

around(loop, "train_step", begin)
around(step, "make_batch", at("data"))
around(gpt.GPTModel, "forward", at("forward"))
around(torch.autograd, "backward", at("backward"))
filesystem.Disk.step = disk_step
"""


@dataclass(frozen=True)
class Fault:
    """`kind` comes to `rank` in its `at`-th iteration or step of a save since the last fault."""

    kind: str
    rank: int
    place: str
    at: int


@dataclass(frozen=True)
class Case:
    """A run with its faults."""

    seed: int
    layout: str
    launcher: str
    faults: tuple[Fault, ...]


def drawn(seed: int, count: int, kinds: Sequence[str]) -> Case:
    """The case of a seed."""
    generator = random.Random(seed)
    faults = []
    layout = generator.choice(list(LAYOUTS))
    launcher = generator.choice(LAUNCHERS)
    for _ in range(count):
        kind = generator.choice(kinds)
        rank = generator.randrange(2)
        if kind == "launcher killed" and launcher != "torchrun loop":
            kind = "SIGKILL"
        if kind == "NaN" and layout == "pp 2":
            rank = 1  # the last stage has the loss
        in_save = kind in IN_SAVE
        at = generator.randint(1, 12 if in_save else 5)
        faults.append(Fault(kind, rank, "save" if in_save else "step", at))
    return Case(seed, layout, launcher, tuple(faults))


def launch(case: Case) -> ranks.Launch:
    """How the ranks of an attempt start; torchrun's agent may make all attempts."""
    again = len(case.faults) * STARTS if case.launcher.endswith("restarts") else 0
    flags = [*ranks.tiny_model(), *FLAGS, *LAYOUTS[case.layout]]
    launcher = "env" if case.launcher == "loop" else "torchrun"
    return ranks.Launch(launcher, 2, flags, again)


def attempt(case: Case, folder: Path, patience: float) -> tuple[bool, bool]:
    """One start of the launcher: (trained to the end, ended by itself)."""
    processes = ranks.start(launch(case), folder)
    deadline = time.monotonic() + patience
    try:
        while any(one.poll() is None for one in processes) or ranks.living(folder):
            if (folder / "kill_all").exists():
                (folder / "kill_all").unlink()
                agents = [one.pid for one in processes] if case.launcher != "loop" else []
                for pid in set(ranks.living(folder)) - set(agents):
                    ranks.kill(pid)
            if (folder / "kill_launcher").exists():
                (folder / "kill_launcher").unlink()
                processes[0].kill()
            if time.monotonic() > deadline:
                return False, False
            time.sleep(0.05)
        return all(one.poll() == 0 for one in processes), True
    finally:
        ranks.end(folder, processes)


def check_ledger(case: Case, folder: Path, starts: int) -> list[str]:
    """What the ledger does not have."""
    attempts = attempts_of(read_events(folder / "saved" / NAME))
    found = []
    if not attempts or not any(one["event"] == "end" for one in attempts[-1]):
        found.append("the ledger has no end")
    if case.launcher != "torchrun --max-restarts" and len(attempts) > starts:
        found.append(f"the ledger has {len(attempts)} attempts of {starts}")
    # of an attempt of which every process was killed, the next start says so
    failures = [failure_of(one) for one in attempts[:-1]]
    if None in failures:
        found.append("an attempt has neither an end nor a failure in the ledger")
    unexplained = sum(bool(one and one.get("recovered")) for one in failures)
    silent = sum(one.kind in ("SIGKILL of both ranks", "launcher killed") for one in case.faults)
    if unexplained > silent:
        found.append(f"{unexplained} attempts had nobody to report their failure")
    return found


def run(case: Case, folder: Path, expected: Mapping[str, bytes]) -> tuple[list[str], int, float]:
    """(what is not as it must be, starts, seconds) of a case."""
    folder.mkdir()
    ranks.write_rank(folder, CHANGES)
    (folder / "faults.json").write_text(json.dumps([asdict(one) for one in case.faults]))
    shared = ranks.shared_files()
    begun = time.monotonic()
    starts = 0
    found: list[str] = []
    patience = PATIENCE * (len(case.faults) + 1 if case.launcher.endswith("restarts") else 1)
    while True:
        starts += 1
        done, ended = attempt(case, folder, patience)
        if not ended:
            found.append(f"start {starts} did not end by itself")
        if done:
            break
        if starts > STARTS * (len(case.faults) + 1):
            return [*found, "never done"], starts, time.monotonic() - begun
    seconds = time.monotonic() - begun
    injected = len(list(folder.glob("injected.*")))
    if injected < len(case.faults):  # the run ended before they came
        case = Case(case.seed, case.layout, case.launcher, case.faults[:injected])
    if ranks.checkpoint(folder, ITERATIONS) != expected:
        found.append("the final checkpoint differs")
    found += check_ledger(case, folder, starts)
    if left := sorted(ranks.shared_files() - shared):
        found.append(f"left in /dev/shm: {' '.join(left)}")
    return found, starts, seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per run and the counts; 1 if a run is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=6, help="number of runs (default: 6)")
    parser.add_argument("--faults", type=int, default=5, help="faults per run (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run (default: 1)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folders of runs that are wrong")
    args = parser.parse_args(argv)
    bad = 0
    counts: collections.Counter[str] = collections.Counter()
    expected: dict[str, dict[str, bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        home = Path(os.path.realpath(name))
        for seed in range(args.seed, args.seed + args.runs):
            case = drawn(seed, args.faults, args.kinds)
            if case.layout not in expected:
                whole = Case(0, case.layout, "loop", ())
                folder = home / f"undisturbed {case.layout}"
                found, _, _ = run(whole, folder, {})
                assert found == ["the final checkpoint differs"], found
                expected[case.layout] = ranks.checkpoint(folder, ITERATIONS)
            folder = home / str(seed)
            found, starts, seconds = run(case, folder, expected[case.layout])
            injected = len(list(folder.glob("injected.*")))
            counts.update(one.kind for one in case.faults[:injected])
            bad += bool(found)
            print(
                f"seed {seed:<4d} {case.layout} {case.launcher:24s} {injected} faults, "
                f"{starts:2d} starts, {seconds:5.1f} s  {'; '.join(found) or 'right'}",
                flush=True,
            )
            if found and args.keep:
                shutil.copytree(folder, args.keep / str(seed), dirs_exist_ok=True)
            shutil.rmtree(folder)
    for kind, count in sorted(counts.items()):
        print(f"  {kind:26s}{count:4d}")
    print(f"{args.runs - bad} of {args.runs} runs as they must be, {counts.total()} faults")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
