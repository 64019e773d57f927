#!/usr/bin/env python
"""Ranks killed again and again, under every launcher, in every phase, with every kind of
checkpoint: does the run go on each time, and end as one that was never killed.

A run trains a tiny model on CPUs. --seed draws layout, launcher, the kind of checkpoints and a list
of kills: a rank, and a phase (before the ranks have met, while groups or the model are built, while
a checkpoint is loaded, data, forward and backward pass, reduction of gradients, update, the n-th
step of a save, evaluation, after the last iteration, or some time) in which it kills itself by
SIGKILL. After each failure the same command starts again: by torchrun (one node, or two agents with
--nnodes 2:3), or by a loop that gives the variables of torchrun, srun, mpirun or mpiexec. Checked:
what is loaded is never older than the checkpoint that the tracker named, none is refused, and the
weights and optimizer states at the end equal those of an undisturbed run byte for byte; no process
is left. Exit code 1 if not.

So that a start costs little, ranks and torchrun's agents are forked from this process, which has
torch loaded; all else is as in separate processes. Needs Linux.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import glob
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron import launcher
from megatron.checkpoint import store
from megatron.training.logging.run_events_file import NAME, read_events
from tools.shared import ranks

ITERATIONS = 24
# of two ranks but for the first
LAYOUTS = {
    "1 rank": (),
    "dp 2": (),
    "dp 2, shards": ("--use-distributed-optimizer", "--overlap-grad-reduce")
    + ("--overlap-param-gather",),
    "tp 2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp 2": ("--pipeline-model-parallel-size", "2"),
}
LAUNCHERS = ("env", "srun", "mpirun", "mpiexec", "torchrun", "torchrun, 2 nodes")
CHECKPOINTS = {
    "plain": (),
    "async": ("--async-save",),
    "snapshots": ("--snapshot-interval", "1"),
    "keep 1": ("--keep-last", "1", "--async-save", "--snapshot-interval", "2"),
}
FLAGS = (
    f"--lr 0.003 --global-batch-size 2 --train-iters {ITERATIONS} --save-interval 3 --save saved "
    "--load saved --eval-interval 4 --eval-iters 1 --crash-loop-limit 0"
).split()
# phase: where a rank dies (module, function), and in which call at most
PHASES = {
    "meeting": ("megatron.training.launch.initialize", "connect", 1),
    "groups": ("megatron.training.launch.initialize", "initialize", 1),
    "model": ("megatron.training.build", "build_run", 1),
    "load": ("megatron.training.checkpointing.load", "load_checkpoint", 1),
    "data": ("megatron.training.step", "make_batch", 8),
    "forward": ("megatron.model.gpt", "GPTModel.forward", 8),
    "backward": ("torch.autograd", "backward", 8),
    "reduction": ("megatron.parallel.ddp", "GradBuffers.reduce", 8),
    "update": ("megatron.optimizer.optimizer", "MixedPrecisionOptimizer.step", 8),
    "save": ("megatron.checkpoint.filesystem", "Disk.step", 80),
    "evaluation": ("megatron.training.evaluation", "evaluate", 2),
    "end": ("megatron.training.launch.initialize", "finish", 1),
    "some time": ("", "", 0),
}
LAST = 1.0  # seconds: the latest kill at some time
PATIENCE = 180.0  # seconds for one attempt
GRACE = 3.0  # seconds that the other ranks have after the first has ended with an error


class Kill(NamedTuple):
    """`rank` dies in its `at`-th call of the phase's function in this attempt."""

    rank: int
    phase: str
    at: float


@dataclass(frozen=True)
class Case:
    """A run with its kills."""

    seed: int
    layout: str
    launcher: str
    checkpoints: str
    kills: tuple[Kill, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return 1 if self.layout == "1 rank" else 2

    @property
    def flags(self) -> list[str]:
        """The command line."""
        more = (*LAYOUTS[self.layout], *CHECKPOINTS[self.checkpoints])
        return [*ranks.tiny_model(2, 16), *FLAGS, *more]


def drawn(seed: int, count: int) -> Case:
    """The case of a seed."""
    generator = random.Random(seed)
    layout = generator.choice(list(LAYOUTS))
    by = generator.choice(LAUNCHERS[:-1] if layout == "1 rank" else LAUNCHERS)
    checkpoints = generator.choice(list(CHECKPOINTS))
    phases = [name for name in PHASES if name != "end"] + 4 * ["save"]
    kills = []
    for number in range(count):
        last = number == count - 1 and generator.random() < 0.5
        # an agent of torchrun whose ranks have ended starts none again
        phase = "end" if last and "nodes" not in by else generator.choice(phases)
        at = generator.randint(1, PHASES[phase][2] or 1)
        seconds = generator.random() * LAST
        rank = 0 if layout == "1 rank" else generator.randrange(2)
        kills.append(Kill(rank, phase, seconds if phase == "some time" else at))
    return Case(seed, layout, by, checkpoints, tuple(kills))


def die(number: int) -> NoReturn:
    """Leave word of the kill, and kill this process."""
    Path(f"killed.{number}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def arm(case: Case) -> None:
    """This rank dies as the next kill of the list says, if it is the one."""
    number = len(glob.glob("killed.*"))
    if number >= len(case.kills) or case.kills[number].rank != launcher.info().rank:
        return
    _, phase, at = case.kills[number]
    module, name, most = PHASES[phase]
    if not most:
        timer = threading.Timer(at, die, [number])
        timer.daemon = True
        timer.start()
        return
    owner = importlib.import_module(module)
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    right = getattr(owner, name)
    calls = []

    def deadly(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == at:
            die(number)
        return right(*args, **kwargs)

    setattr(owner, name, deadly)


def rank_main(case: Case) -> None:
    """Run the script as a rank."""
    for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arm(case)
    sys.argv = [ranks.SCRIPT, *case.flags]
    runpy.run_path(ranks.SCRIPT, run_name="__main__")


def agent_main(case: Case, words: Sequence[str]) -> None:
    """Run torchrun, which forks its ranks."""
    run = importlib.import_module("torch.distributed.run")
    launch = run.elastic_launch

    def forking(config: object, entrypoint: object) -> Callable[[], object]:
        config.start_method = "fork"
        return lambda *words: launch(config, rank_main)(case)

    run.elastic_launch = forking
    run.main([*words, "--max-restarts", str(10 * len(case.kills)), "rank.py"])


def fork(folder: Path, environ: Mapping[str, str], body: Callable[[], None]) -> int:
    """A process, leader of a session, that works in `folder` and calls `body`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        for stream, name in ((1, "log"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
        kept = ranks.surroundings() | environ
        os.environ.clear()
        os.environ.update(kept)
        body()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def start(case: Case, folder: Path) -> list[int]:
    """The processes of an attempt, or torchrun's agents."""
    if case.launcher == "torchrun":
        words = ["--standalone", f"--nproc-per-node={case.world}"]
        return [fork(folder, {}, functools.partial(agent_main, case, words))]
    port = ranks.free_port()
    if case.launcher == "torchrun, 2 nodes":
        words = "--nnodes=2:3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=run".split()
        words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1"]
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [fork(folder, environ, functools.partial(agent_main, case, words)) for _ in "12"]
    launch = ranks.Launch(case.launcher, case.world, case.flags)
    body = functools.partial(rank_main, case)
    return [fork(folder, ranks.variables(launch, rank, port), body) for rank in range(case.world)]


def attempt(case: Case, folder: Path) -> list[int] | None:
    """One start of the launcher: the exit codes, or None if it did not end by itself."""
    pids = start(case, folder)
    codes: dict[int, int] = {}
    patience = PATIENCE * (1 + len(case.kills) * case.launcher.startswith("torchrun"))
    deadline = time.monotonic() + patience
    failed = 0.0
    while len(codes) < len(pids) or ranks.living(folder):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            failed = failed or time.monotonic()
            if time.monotonic() > failed + GRACE:  # as srun --kill-on-bad-exit
                for pid in ranks.living(folder):
                    ranks.kill(pid)
        if time.monotonic() > deadline:
            for pid in ranks.living(folder):
                ranks.kill(pid)
            for pid in set(pids) - codes.keys():
                os.waitpid(pid, 0)
            return None
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def starts(folder: Path) -> list[int]:
    """The iteration that each attempt so far has loaded."""
    path = folder / "saved" / NAME
    events = read_events(path) if path.exists() else []
    return [one["iteration"] for one in events if one["event"] == "start"]


def run(case: Case, folder: Path) -> tuple[list[str], int]:
    """(what is not as it must be, kills) of a case."""
    folder.mkdir()
    problems: list[str] = []
    while True:
        kills = len(list(folder.glob("killed.*")))
        known = len(starts(folder))
        saved = (store.latest(folder / "saved") or 0) if (folder / "saved").exists() else 0
        codes = attempt(case, folder)
        if codes is None:
            problems.append("did not end by itself")
            break
        resumed = starts(folder)[known : known + 1]
        if resumed and resumed[0] < saved:
            problems.append(f"iteration {saved} was saved, {resumed[0]} was loaded")
        if not any(codes):
            break
        if kills == len(list(folder.glob("killed.*"))):
            problems.append(f"exit codes {codes} without a kill")
            break
    if "cannot load" in (folder / "log").read_text() + (folder / "err").read_text():
        problems.append("a checkpoint was refused")
    return problems, len(list(folder.glob("killed.*")))


def preload() -> None:
    """Load what every rank needs, before the first fork."""
    for name in (
        "torch._dynamo",
        "torch.distributed.run",
        "megatron.training.loop",
        "megatron.config.command_line",
        "megatron.checkpoint.async_writer",
        "megatron.checkpoint.lock",
        "megatron.checkpoint.retention",
        "megatron.training.checkpointing.local_copies",
        "megatron.training.checkpointing.snapshots",
        "megatron.training.launch.rendezvous",
        "megatron.training.logging.run_events",
    ):
        importlib.import_module(name)
    torch.set_num_threads(1)  # the variable of the ranks comes too late
    gc.collect()
    gc.freeze()


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per run and the counts; 1 if a run is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="at least so many (default: 100)")
    parser.add_argument("--per-run", type=int, default=20, help="kills of a run (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run (default: 1)")
    parser.add_argument("--minutes", type=float, help="begin no run after this time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folders of runs that are wrong")
    args = parser.parse_args(argv)
    preload()
    done = bad = 0
    counts: collections.Counter[str] = collections.Counter()
    expected: dict[str, dict[str, bytes]] = {}
    begun = time.monotonic()
    seed = args.seed
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        home = Path(name).resolve()
        while done < args.kills and not (
            args.minutes and time.monotonic() - begun > 60.0 * args.minutes
        ):
            case = drawn(seed, args.per_run)
            if case.layout not in expected:
                folder = home / f"undisturbed {case.layout}"
                problems, _ = run(Case(0, case.layout, "env", "plain", ()), folder)
                assert not problems, (problems, (folder / "err").read_text()[-3000:])
                expected[case.layout] = ranks.checkpoint(folder, ITERATIONS)
            folder = home / str(seed)
            problems, kills = run(case, folder)
            if ranks.checkpoint(folder, ITERATIONS) != expected[case.layout]:
                problems.append("the final checkpoint differs")
            done += kills
            bad += bool(problems)
            counts.update([case.layout, case.launcher, case.checkpoints])
            counts.update(f"killed: {one.phase}" for one in case.kills[:kills])
            print(
                f"seed {seed:<5d} {case.layout:13s} {case.launcher:18s} {case.checkpoints:10s} "
                f"{kills:2d} kills, {done:4d} in all, {time.monotonic() - begun:6.0f} s  "
                f"{'; '.join(problems) or 'right'}",
                flush=True,
            )
            if problems and args.keep:
                (args.keep / str(seed)).mkdir(parents=True, exist_ok=True)
                (args.keep / str(seed) / "case").write_text(json.dumps(case.kills))
                shutil.copytree(folder, args.keep / str(seed), dirs_exist_ok=True)
            shutil.rmtree(folder)
            seed += 1
    for key, count in sorted(counts.items()):
        print(f"  {key:26s}{count:4d}")
    print(f"{seed - args.seed - bad} of {seed - args.seed} runs as they must be, {done} kills")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
