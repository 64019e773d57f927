#!/usr/bin/env python
"""Faults of many kinds in runs that are started again until they are done: is the result that of an
undisturbed run, and does the run's ledger say what happened.

A run trains a tiny model on CPUs with two ranks. --seed draws layout, launcher and a list of
faults: kind, rank, and the iteration (counted from the start or the fault before), step of a save
or upload at which the fault comes. After each failure the same command starts again (a shell loop,
or torchrun's agent with --max-restarts). Checked at the end
of a run: its checkpoint of the last iteration equals that of an undisturbed run byte for byte (with
a fault of an object store: the one in the store); the ledger (run_events.jsonl) has an attempt for
each start that came as far as iteration 1, and for each fault that ends a rank a failure; of each
bit flip in a gradient the rank was named (--verify-step-action majority); no process and no file in
/dev/shm remains. Exit code 1 if not. Needs Linux; to cut networks root, unshare, nsenter and ip.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.training.logging.run_events_file import NAME, attempts_of, failure_of, read_events
from tools.shared import namespaces, ranks

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
    "network cut": True,
    "object store fails": False,
    "object store lies": False,
    "object store is slow": False,
    "bit flip in a gradient": False,
}
IN_SAVE = {"SIGKILL in a save", "hang in a save", "disk full", "failing disk"}
STORE = {"object store fails", "object store lies", "object store is slow"}
FLIP = "bit flip in a gradient"
CUT = "network cut"
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
    "--crash-loop-limit 0 --hang-timeout-seconds 3 "
    "--hang-timeout-save-seconds 4 --hang-timeout-first-iteration-seconds 30"
).split()
STARTS = 3  # per fault, before a run counts as one that never ends
PATIENCE = 120.0  # seconds for one attempt
# A rank does what faults.json says.
CHANGES = """
import errno, glob, json, resource, signal, subprocess, time
faults = json.load(open("faults.json"))
since = {"step": 0, "save": 0, "store": 0}
slow = [0.0]

def due(place):
    number = len(glob.glob("injected.*"))
    if number >= len(faults):
        return None
    fault = faults[number]
    if fault["rank"] != rank or fault["place"] != place:
        return None
    since[place] += 1
    if since[place] < fault["at"]:
        return None
    since.update(step=0, save=0, store=0)
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
    elif kind == "network cut":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    elif kind == "slow disk":
        slow[0] = 0.02
    elif kind.startswith("clock"):
        right, shift = time.time, 3600 if kind.endswith("ahead") else -3600
        time.time = lambda: right() + shift

import torch
from megatron.checkpoint import filesystem
from megatron.model import gpt
from megatron.training import loop, step, verify_step
from fsspec.implementations.local import LocalFileSystem

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
        places["bit flip in a gradient"] = "hash"
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

def put(self, path, there, **more):
    kind = due("store")
    if kind == "object store fails":
        raise ConnectionError("reset by peer")
    if kind == "object store is slow":
        time.sleep(3.0)
    os.makedirs(os.path.dirname(there), exist_ok=True)  # a bucket has none
    right_put(self, path, there, **more)
    if kind == "object store lies":
        with open(there, "r+b") as file:
            file.write(b"?")

def hashed(self):
    if pending and pending[0][0] == "hash":
        pending.pop()
        self._run.buffers.flat.view(torch.int32)[1000] ^= 1 << 22
    return right_hash(self)

right_put, LocalFileSystem.put_file = LocalFileSystem.put_file, put
right_hash, verify_step.StepVerification._hash = verify_step.StepVerification._hash, hashed
around(verify_step.StepVerification, "__call__", begin)
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

    def has(self, *kinds: str) -> bool:
        """Is one of the faults of these kinds?"""
        return any(one.kind in kinds for one in self.faults)

    def flags(self, folder: Path) -> list[str]:
        """The command line of the script in `folder`."""
        saved = f"file://{folder}/stored" if self.has(*STORE) else "saved"
        words = [*ranks.tiny_model(), *FLAGS, *LAYOUTS[self.layout], "--save", saved]
        words += ["--load", saved, "--staging-dir", "staged"] if self.has(*STORE) else []
        words += [] if self.has(*STORE) else ["--load", saved]
        if self.has(FLIP):
            words += ["--verify-step-interval", "1", "--verify-step-action", "majority"]
        return words


def drawn(seed: int, count: int, kinds: Sequence[str]) -> Case:
    """The case of a seed."""
    generator = random.Random(seed)
    faults = []
    layout = generator.choice(list(LAYOUTS))
    launcher = generator.choice(LAUNCHERS)
    chosen = [generator.choice(kinds) for _ in range(count)]
    if CUT in chosen:
        launcher = "loop"
    for number, kind in enumerate(chosen):
        rank = 0 if kind in STORE else generator.randrange(2)
        if kind == "launcher killed" and launcher != "torchrun loop":
            kind = "SIGKILL"
        if kind == "NaN" and FLIP in chosen:
            kind = "exception"  # a NaN would be outvoted
        if kind == "NaN" and layout == "pp 2":
            rank = 1  # the last stage has the loss
        place = "save" if kind in IN_SAVE else "store" if kind in STORE else "step"
        # after a flip the iteration must be compared first
        least = 2 if number and chosen[number - 1] == FLIP else 1
        at = generator.randint(least, {"save": 12, "store": 4, "step": 5}[place])
        faults.append(Fault(kind, rank, place, at))
    return Case(seed, layout, launcher, tuple(faults))


def launch(case: Case, folder: Path, network: namespaces.Network | None) -> ranks.Launch:
    """How the ranks of an attempt start; torchrun's agent may make all attempts."""
    again = len(case.faults) * STARTS if case.launcher.endswith("restarts") else 0
    launcher = "env" if case.launcher == "loop" else "torchrun"
    found = ranks.Launch(launcher, 2, case.flags(folder), again)
    if network:
        return replace(found, apart=True, address="10.99.0.1", enter=network.enter)
    return found


def attempt(case: Case, folder: Path, patience: float) -> tuple[bool, bool]:
    """One start of the launcher: (trained to the end, ended by itself)."""
    network = namespaces.Network() if case.has(CUT) else None
    processes = ranks.start(launch(case, folder, network), folder)
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
        if network:
            network.close()


def check_flips(case: Case, folder: Path) -> list[str]:
    """Were the ranks named whose bits flipped? Of two replicas both are suspected, and the run
    ends, where the flip was in the computation of the other's gradients."""
    text = "".join((folder / name).read_text(errors="replace") for name in ("log", "err"))
    named = re.findall(r"iteration (\d+): two computations of .*?; (.*)", text)
    found = [set(re.findall(r"rank (\d+) \(", ranks_)) for _, ranks_ in dict.fromkeys(named)]
    expected = [str(one.rank) for one in case.faults if one.kind == FLIP]
    undecided = case.layout == "dp 2"
    right = len(found) == len(expected) and (
        all(any(one in ranks_ for ranks_ in found) for one in expected)
        if undecided
        else found == [{one} for one in expected]
    )
    return [] if right else [f"flips on ranks {expected}, named {found}"]


def check_ledger(case: Case, path: Path, starts: int) -> list[str]:
    """What the ledger does not have."""
    attempts = attempts_of(read_events(path))
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
    silent = sum(one.kind == "SIGKILL of both ranks" for one in case.faults)
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
    stored = case.has(*STORE)
    injected = len(list(folder.glob("injected.*")))
    if injected < len(case.faults):  # the run ended before they came
        case = Case(case.seed, case.layout, case.launcher, case.faults[:injected])
    if ranks.checkpoint(folder, ITERATIONS, "stored" if stored else "saved") != expected:
        found.append("the final checkpoint differs")
    ledger = next(folder.glob(f"staged/**/{NAME}")) if stored else folder / "saved" / NAME
    found += check_ledger(case, ledger, starts)
    found += check_flips(case, folder)
    if left := ranks.left_behind(shared):
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
    kinds = [one for one in args.kinds if one != CUT or namespaces.available()]
    bad = 0
    counts: collections.Counter[str] = collections.Counter()
    expected: dict[str, dict[str, bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        home = Path(os.path.realpath(name))
        for seed in range(args.seed, args.seed + args.runs):
            case = drawn(seed, args.faults, kinds)
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
