"""Faults of many kinds in runs that are started again until they are done: is the result that of an
undisturbed run, and does the run's ledger say what happened.

A run of two ranks trains a tiny model. --seed draws layout, launcher, the kind of checkpoints and a
list of faults: kind, place, rank, and in which call of the place it comes. After each failure the
same command starts again: by torchrun (one node, or two agents), or by a loop that gives its
variables or those of srun. Wrong is a final checkpoint that is not byte for byte
that of an undisturbed run (with a fault of an object store: the one in the store), a checkpoint
that is refused or older than the one that the tracker named, a failure without a fault, ranks that
do not end by themselves, an attempt or a failure that run_events.jsonl lacks, and what is left in
/dev/shm.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.faults import inject, ranks
from bench.faults.inject import ANY_TIME, Fault
from megatron.addons.ops.goodput.run_events_file import NAME, attempts_of, failure_of, read_events
from megatron.checkpoint import reading

EARLY = ("meeting", "groups", "start-up", "load")
TRAINING = ("data", "forward", "backward", "reduction", "optimizer", "evaluation")
STORE = ("object store fails", "object store lies", "object store is slow")
CUT = "network cut"
ALL = "SIGKILL of all ranks"
LAUNCHER = "SIGKILL of the launcher"
# kind: where it comes
KINDS = {
    "SIGKILL": (*EARLY, *TRAINING, *4 * ("write",), ANY_TIME, "end"),
    ALL: ("step",),
    LAUNCHER: ("step",),
    "SIGSTOP": ("step",),
    "exception": ("step", "write"),
    "abort": ("step",),
    "out of memory": ("step",),
    "NaN": ("forward",),
    "hang": ("data", "backward", "write"),
    "disk full": ("write",),
    "failing disk": ("write",),
    "slow disk": ("step",),
    "clock one hour ahead": ("step",),
    "clock one hour back": ("step",),
    CUT: ("step",),
    **dict.fromkeys(STORE, ("upload",)),
}
# in which call at most
CALLS = {**dict.fromkeys((*EARLY, "end"), 1), "write": 40, "upload": 4, "evaluation": 2}
LAYOUTS = {
    "dp 2": ("--use-distributed-optimizer",),
    "dp 2, overlap": ("--use-distributed-optimizer", "--overlap-grad-reduce")
    + ("--overlap-param-gather",),
    "tp 2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp 2": ("--pipeline-model-parallel-size", "2"),
}
RESTARTS = " --max-restarts"
TWO_NODES = "torchrun, 2 nodes"
LAUNCHERS = ("env", "srun", "torchrun", "torchrun" + RESTARTS, TWO_NODES + RESTARTS)
CHECKPOINTS = {
    "plain": (),
    "async": ("--async-save",),
    "snapshots": ("--snapshot-interval", "1"),
    "keep 1": ("--keep-last", "1", "--async-save", "--snapshot-interval", "2"),
}
ITERATIONS = 30
FLAGS = (
    f"--lr 0.003 --global-batch-size 4 --train-iters {ITERATIONS} --save-interval 3 "
    "--eval-interval 4 --eval-iters 1 --run-events --crash-loop-limit 0 --hang-timeout-seconds 3 "
    "--hang-timeout-save-seconds 4 --hang-timeout-evaluation-seconds 4 "
    "--hang-timeout-first-iteration-seconds 30"
).split()
STARTS = 3  # per fault, before a run counts as one that never ends
PATIENCE = 120.0  # seconds for one attempt
GRACE = 20.0  # seconds that the other ranks have after the first has failed


@dataclass(frozen=True)
class Case:
    """A run with its faults."""

    seed: int
    layout: str
    launcher: str
    checkpoints: str
    faults: tuple[Fault, ...]

    def has(self, *kinds: str) -> bool:
        """Is one of the faults of these kinds?"""
        return any(fault.kind in kinds for fault in self.faults)

    @property
    def restarts(self) -> int:
        """How often torchrun's agent starts the ranks again."""
        return STARTS * len(self.faults) * self.launcher.endswith(RESTARTS)

    def launch(self, folder: Path) -> ranks.Launch:
        """How the ranks of an attempt start in `folder`."""
        saved = f"file://{folder}/stored" if self.has(*STORE) else "saved"
        words = [*ranks.tiny_model(), *FLAGS, *LAYOUTS[self.layout]]
        words += ["--save", saved, "--load", saved, *CHECKPOINTS[self.checkpoints]]
        words += ["--staging-dir", "staged"] if self.has(*STORE) else []
        launcher = self.launcher.removesuffix(RESTARTS)
        cut_off = 1 if self.has(CUT) else None
        return ranks.Launch(launcher, 2, words, self.restarts, cut_off=cut_off)


def drawn(seed: int, count: int, kinds: Sequence[str]) -> Case:
    """The case of a seed."""
    generator = random.Random(seed)
    layout = generator.choice(list(LAYOUTS))
    launcher = generator.choice(LAUNCHERS)
    checkpoints = generator.choice(list(CHECKPOINTS))
    chosen = generator.choices(kinds, [len(KINDS[kind]) for kind in kinds], k=count)
    if CUT in chosen:
        launcher = "env"
    if set(STORE) & set(chosen):
        checkpoints = "plain"
    faults: list[Fault] = []
    for number, kind in enumerate(chosen):
        if kind == LAUNCHER and launcher != "torchrun":
            kind = "SIGKILL"
        sites = KINDS[kind]
        if number < count - 1 or launcher.startswith(TWO_NODES):
            sites = tuple(site for site in sites if site != "end")  # its ranks start no more
        site = generator.choice(sites)
        rank = 0 if kind in STORE else generator.randrange(2)
        if kind == "NaN" and layout == "pp 2":
            rank = 1  # the last stage has the loss
        at: float = generator.randint(1, CALLS.get(site, 5))
        at = generator.uniform(0.0, 6.0) if site == ANY_TIME else at
        faults.append(Fault(kind, site, rank, at))
    return Case(seed, layout, launcher, checkpoints, tuple(faults))


def starts_of(folder: Path) -> list[int]:
    """The iteration that each attempt so far has loaded."""
    path = folder / "saved" / NAME
    events = read_events(path) if path.exists() else []
    return [event["iteration"] for event in events if event["event"] == "start"]


def attempt(case: Case, folder: Path) -> tuple[bool, list[str]]:
    """One start of the launcher: (trained to the end, what is not as it must be)."""
    before = len(inject.injected(folder))
    struck = before

    def watch(processes: Sequence[subprocess.Popen]) -> None:
        nonlocal struck
        for fault in case.faults[struck : len(inject.injected(folder))]:
            struck += 1
            if fault.kind == ALL:
                agents = [process.pid for process in processes if case.launcher.startswith("torch")]
                for pid in set(ranks.living(folder)).difference(agents):
                    ranks.kill(pid)
            if fault.kind == LAUNCHER:
                processes[0].kill()

    saved = folder / "saved"
    newest = (reading.latest(saved) or 0) if saved.exists() else 0
    known = len(starts_of(folder))
    patience = PATIENCE * (case.restarts // STARTS + 1)
    grace = float("inf") if case.restarts else GRACE
    codes, by_themselves = ranks.attempt(case.launch(folder), folder, patience, grace, watch)
    problems = []
    arrived = case.faults[before : len(inject.injected(folder))]
    # whoever is not known to the others yet is waited for
    before_meeting = arrived and arrived[-1].site in ("meeting", "groups", ANY_TIME)
    if not by_themselves and not before_meeting:
        problems.append("ranks did not end by themselves")
    if any(codes) and not arrived:
        problems.append(f"exit codes {codes} without a fault")
    for loaded in starts_of(folder)[known : known + 1]:
        if loaded < newest:
            problems.append(f"iteration {newest} was saved, {loaded} was loaded")
    return not any(codes), problems


def run(case: Case, folder: Path) -> tuple[list[str], int]:
    """(what is not as it must be, starts) of a case, but for the weights."""
    folder.mkdir()
    inject.write(folder, case.faults)
    shared = ranks.shared_files()
    problems: list[str] = []
    for starts in itertools.count(1):
        is_done, more = attempt(case, folder)
        problems += more
        if is_done:
            break
        if starts > STARTS * (len(case.faults) + 1):
            return [*problems, "never done"], starts
    case = replace(case, faults=case.faults[: len(inject.injected(folder))])
    output = "".join((folder / name).read_text(errors="replace") for name in ("log", "err"))
    if "cannot load" in output:
        problems.append("a checkpoint was refused")
    stored = next(folder.glob(f"staged/**/{NAME}"), folder / "saved" / NAME)
    problems += check_ledger(case, stored, starts)
    if files := ranks.left_behind(shared):
        problems.append(f"left in /dev/shm: {' '.join(files)}")
    return problems, starts


def check_ledger(case: Case, path: Path, starts: int) -> list[str]:
    """What the ledger does not have."""
    attempts = attempts_of(read_events(path))
    *before, last = [any(event["event"] == "end" for event in one) for one in attempts] or [False]
    problems = [] if last else ["the ledger has no end"]
    if not case.restarts and len(attempts) > starts:
        problems.append(f"the ledger has {len(attempts)} attempts of {starts}")
    # of an attempt of which every process was killed, the next start says so
    pairs = zip(attempts, before, strict=False)
    failures = [failure_of(events) for events, ended in pairs if not ended]
    if None in failures:
        problems.append("an attempt has neither an end nor a failure in the ledger")
    unexplained = sum(bool(failure and failure.get("recovered")) for failure in failures)
    if unexplained > sum(fault.kind == ALL for fault in case.faults):
        problems.append(f"{unexplained} attempts had nobody to report their failure")
    return problems


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--runs", type=int, default=6, help="number of runs (default: 6)")
    parser.add_argument("--faults", type=int, default=5, help="faults per run (default: 5)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))


def check(args: argparse.Namespace, home: Path) -> bool:
    """Print a line per run and the counts; True if all runs are as they must be."""
    kinds = [kind for kind in args.kinds if kind != CUT or ranks.can_cut_networks()]
    bad = 0
    counts: collections.Counter[str] = collections.Counter()
    expected: dict[str, dict[str, bytes]] = {}
    for seed in range(args.seed, args.seed + args.runs):
        case = drawn(seed, args.faults, kinds)
        if case.layout not in expected:
            folder = home / f"undisturbed {case.layout}"
            problems, _ = run(Case(0, case.layout, "env", "plain", ()), folder)
            expected[case.layout] = ranks.checkpoint(folder, ITERATIONS)
            assert not problems and expected[case.layout], problems
        folder = home / str(seed)
        begun = time.monotonic()
        problems, starts = run(case, folder)
        saved = "stored" if case.has(*STORE) else "saved"
        if ranks.checkpoint(folder, ITERATIONS, saved) != expected[case.layout]:
            problems.append("the final checkpoint differs")
        arrived = case.faults[: len(inject.injected(folder))]
        counts.update(f"{fault.kind}, {fault.site}" for fault in arrived)
        print(
            f"seed {seed:<4d} {case.layout:14s} {case.launcher:32s} {case.checkpoints:10s} "
            f"{len(arrived)} faults, {starts:2d} starts, {time.monotonic() - begun:5.1f} s  "
            f"{'; '.join(problems) or 'right'}",
            flush=True,
        )
        if problems:
            bad += 1
        else:
            shutil.rmtree(folder)
    for kind, count in sorted(counts.items()):
        print(f"  {kind:36s}{count:4d}")
    print(f"{args.runs - bad} of {args.runs} runs as they must be, {counts.total()} faults")
    return not bad
