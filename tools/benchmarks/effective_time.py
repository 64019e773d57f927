#!/usr/bin/env python
"""Effective share of the time of a run whose ranks are killed at a rate.

Four ranks on CPUs train a small model whose iterations are padded by a sleep to --step-seconds, so
that other work on the machine changes little. In each period of --every seconds one rank, drawn
with --seed as is the time within the period, is killed by SIGKILL, wherever it is (training,
saving, starting). The same command starts again until all iterations are done, as many as fit into
--minutes without failure: by torchrun --max-restarts, or by a shell loop that ends the other ranks
2 s after an error, as srun --kill-on-bad-exit does.

Printed for each combination of launcher and saves: kills, starts, the effective share by the run's
ledger (as tools/goodput.py prints it), and by a stop-watch: iterations times the duration of an
iteration of an undisturbed run, both seen from outside, over the seconds from the first start of
the launcher to its end. `checkpoints` saves nothing but the checkpoints, `snapshots` also with
--snapshot-interval into --snapshot-dir in /dev/shm, and `local` with --non-persistent-ckpt-type
local there: each rank's part, mirrored by another rank (--replication-jump 1). Exit code 1 if a run
does not come to its end. Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.analysis.goodput import Goodput, read_goodput, table
from tools.shared import ranks

RANKS = 4
GRACE = 2.0  # seconds that the other ranks have to end by themselves
CLEAN = 30  # iterations of the undisturbed run, of which the last 20 are timed
LAUNCHERS = ("loop", "torchrun")
SAVES = ("local", "snapshots", "checkpoints")
FLAGS = (
    "--lr 0.003 --global-batch-size 4 --eval-iters 0 --use-distributed-optimizer "
    "--save saved --load saved --keep-last 2 --crash-loop-limit 0 --metrics-file metrics.jsonl"
).split()
# A rank notes its process, and its iterations are padded.
CHANGES = """
import time
with open(f"rank.{rank}", "w") as file:
    file.write(str(os.getpid()))
seconds = float(os.environ["STEP_SECONDS"])
from megatron.training import loop
right = loop.train_step

def padded(*args, **kwargs):
    begun = time.perf_counter()
    outcome = right(*args, **kwargs)
    time.sleep(max(0.0, seconds - (time.perf_counter() - begun)))
    return outcome._replace(seconds=time.perf_counter() - begun)

loop.train_step = padded
"""


@dataclass(frozen=True)
class Case:
    """A run: its launcher, what it saves, and its iterations."""

    launcher: str
    iterations: int
    flags: tuple[str, ...]
    step_seconds: float


def launch(case: Case) -> ranks.Launch:
    """The four ranks, or torchrun."""
    flags = [*ranks.tiny_model(4, 64), *FLAGS, *case.flags, "--train-iters", str(case.iterations)]
    environ = {"STEP_SECONDS": str(case.step_seconds)}
    if case.launcher == "torchrun":
        return ranks.Launch("torchrun", RANKS, flags, 100000, environ)
    return ranks.Launch("env", RANKS, flags, environ=environ)


def rank_process(folder: Path, rank: int) -> int | None:
    """The living process of a rank; None while there is none."""
    try:
        pid = int((folder / f"rank.{rank}").read_text() or 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        return pid if os.readlink(f"/proc/{pid}/cwd") == str(folder) and state not in "ZX" else None
    except OSError:
        return None


def kill_times(seed: int, every: float) -> Iterator[tuple[float, int]]:
    """An endless list of (second, rank): one in each period of `every` seconds."""
    random_numbers = random.Random(seed)
    period = 0
    while True:
        yield every * (period + random_numbers.random()), random_numbers.randrange(RANKS)
        period += 1


def run(case: Case, folder: Path, every: float, seed: int, most: float) -> tuple[float, int]:
    """(seconds from the first start to the end, kills) of a run that is started again until it is
    done. Raises RuntimeError after `most` seconds."""
    folder.mkdir()
    ranks.write_rank(folder, CHANGES)
    kills = 0
    failed = 0.0  # when the first rank of this start was seen to have ended by an error
    due = kill_times(seed, every)
    at, rank = next(due)
    begun = time.monotonic()
    processes = ranks.start(launch(case), folder)
    try:
        while True:
            now = time.monotonic() - begun
            if now > most:
                raise RuntimeError(f"not done after {most:.0f} s, see {folder / 'err'}")
            codes = [one.poll() for one in processes]
            failed = (failed or now) if any(codes) else 0.0
            if failed and now > failed + GRACE:
                for one in processes:
                    one.kill()  # as srun --kill-on-bad-exit; torchrun has ended its ranks itself
            if None not in codes:
                if not any(codes):
                    return now, kills
                if case.launcher == "torchrun":
                    raise RuntimeError(f"torchrun ended, see {folder / 'err'}")
                processes = ranks.start(launch(case), folder)
            if now >= at and (pid := rank_process(folder, rank)):
                ranks.kill(pid)
                kills += 1
                at, rank = next(due)
            time.sleep(0.02)
    finally:
        ranks.end(folder, processes)


def seconds_per_iteration(step_seconds: float, home: Path) -> float:
    """Of an undisturbed run that saves nothing: from the iteration CLEAN - 20 to the last, seen in
    its metrics file."""
    folder = home / "undisturbed"
    folder.mkdir()
    ranks.write_rank(folder, CHANGES)
    flags = ("--save-interval", "1000000")
    case = Case("loop", CLEAN, flags, step_seconds)
    processes = ranks.start(launch(case), folder)
    seen: dict[int, float] = {}
    metrics = folder / "metrics.jsonl"
    while CLEAN not in seen:
        count = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        seen.setdefault(count, time.monotonic())
        if all(one.poll() is not None for one in processes) and count < CLEAN:
            raise RuntimeError((folder / "err").read_text()[-2000:])
        time.sleep(0.005)
    for one in processes:
        one.wait()
    return (seen[CLEAN] - seen[CLEAN - 20]) / 20


def flags_of(saves: str, args: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """The flags of what is saved."""
    found = ["--save-interval", str(args.save_interval)]
    if saves != "checkpoints":
        found += ["--snapshot-interval", str(args.snapshot_interval)]
    if saves == "snapshots":
        found += ["--snapshot-dir", str(folder)]
    if saves == "local":
        found += ["--non-persistent-ckpt-type", "local", "--replication", "--replication-jump", "1"]
        found += ["--non-persistent-local-ckpt-dir", str(folder)]
    if args.async_save:
        found.append("--async-save")
    return tuple(found)


def line(args: argparse.Namespace, name: str, kills: int, seconds: float, run_: Goodput) -> str:
    """A row of the table. The stop-watch's share is the last."""
    return (
        f"{name:22s} {kills:3d} kills, {run_.attempts:3d} starts, {run_.iterations} iterations, "
        f"{seconds:6.1f} s; effective share: ledger {run_.share:.1%}, stop-watch "
        f"{run_.iterations * args.measured / seconds:.1%}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--every", type=float, default=60.0, help="seconds, in each of which a rank is killed once"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="length without failures")
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--saves", nargs="+", choices=SAVES, default=SAVES)
    parser.add_argument("--save-interval", type=int, default=40, help="iterations (default: 40)")
    parser.add_argument(
        "--snapshot-interval", type=int, default=8, help="of local copies too (default: 8)"
    )
    parser.add_argument("--async-save", action="store_true", help="of all that is saved")
    parser.add_argument("--details", action="store_true", help="print where the time went as well")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each run; 1 if one does not come to its end."""
    args = parse(argv)
    iterations = max(1, round(60.0 * args.minutes / args.step_seconds))
    memory = Path(tempfile.mkdtemp(prefix="effective-time-", dir="/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="effective-time-") as name:
        home = Path(os.path.realpath(name))
        try:
            args.measured = seconds_per_iteration(args.step_seconds, home)
            print(f"an iteration takes {args.measured:.3f} s in an undisturbed run", flush=True)
            for number, launcher in enumerate(args.launchers):
                for saves in args.saves:
                    key = f"{launcher}, {saves}"
                    flags = flags_of(saves, args, memory / f"{number}-{saves}")
                    case = Case(launcher, iterations, flags, args.step_seconds)
                    most = 600.0 + 300.0 * args.minutes
                    seconds, kills = run(case, home / key, args.every, args.seed, most)
                    goodput = read_goodput(str(home / key / "saved"))
                    print(line(args, key, kills, seconds, goodput), flush=True)
                    if args.details:
                        print("\n".join(f"  {text}" for text in table(goodput)), flush=True)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            shutil.rmtree(memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
