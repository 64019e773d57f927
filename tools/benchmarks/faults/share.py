"""Effective share of the time of a run whose ranks are killed at a rate.

Four ranks train a small model whose iterations are padded by a sleep to --step-seconds, so that
other work on the machine changes little. About every --every seconds one rank is killed by SIGKILL
wherever it is (training, saving, starting); seconds and rank are drawn with --seed. torchrun
--max-restarts, or a loop that ends the other ranks 2 s after an error as srun --kill-on-bad-exit
does, starts the same command again until all iterations are done, as many as fit into --minutes
without failure.

Printed for each launcher and kind of saves: kills, starts, the effective share by the run's ledger
(as tools/goodput.py prints it), and by a stop-watch: iterations times the duration of an iteration
of an undisturbed run over the seconds from the first start of the launcher to its end.
`checkpoints` saves nothing else, `snapshots` also with --snapshot-interval into --snapshot-dir in
/dev/shm, and `local` with --non-persistent-ckpt-type local there, mirrored by another rank.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.features.goodput.accounting import read_goodput, table
from tools.benchmarks.faults import inject, ranks
from tools.benchmarks.faults.inject import ANY_TIME, Fault

RANKS = 4
GRACE = 2.0  # seconds that the other ranks have to end by themselves
CLEAN = 30  # iterations of the undisturbed run, of which the last 20 are timed
LAUNCHERS = ("loop", "torchrun")
SAVES = ("local", "snapshots", "checkpoints")
FLAGS = (
    "--lr 0.003 --global-batch-size 4 --eval-iters 0 --use-distributed-optimizer "
    "--save saved --load saved --keep-last 2 --crash-loop-limit 0 --metrics-file metrics.jsonl"
).split()


def launch(launcher: str, iterations: int, flags: Sequence[str], seconds: float) -> ranks.Launch:
    """The four ranks, or torchrun."""
    words = [*ranks.tiny_model(4, 64), *FLAGS, *flags, "--train-iters", str(iterations)]
    environ = {"STEP_SECONDS": str(seconds)}
    if launcher == "torchrun":
        return ranks.Launch("torchrun", RANKS, words, 100000, environ)
    return ranks.Launch("env", RANKS, words, environ=environ)


def kills(seed: int, every: float, count: int) -> list[Fault]:
    """One in each period of `every` seconds, if none is late."""
    generator = random.Random(seed)
    seconds = [every * (period + generator.random()) for period in range(count)]
    gaps = [after - before for before, after in zip([0.0, *seconds], seconds, strict=False)]
    return [Fault("SIGKILL", ANY_TIME, generator.randrange(RANKS), gap) for gap in gaps]


def run(launched: ranks.Launch, folder: Path, faults: Sequence[Fault], most: float) -> float:
    """Seconds from the first start to the end of a run that is started again until it is done.
    Raises RuntimeError after `most` seconds."""
    folder.mkdir()
    inject.write(folder, faults)
    begun = time.monotonic()
    while True:
        rest = most - (time.monotonic() - begun)
        codes, _ = ranks.attempt(launched, folder, rest, GRACE)
        seconds = time.monotonic() - begun
        if not any(codes):
            return seconds
        if seconds > most or launched.restarts:
            raise RuntimeError(f"not done after {seconds:.0f} s, see {folder / 'err'}")


def seconds_per_iteration(step_seconds: float, folder: Path) -> float:
    """Of an undisturbed run that saves nothing: from the iteration CLEAN - 20 to the last, seen in
    its metrics file."""
    launched = launch("loop", CLEAN, ("--save-interval", "1000000"), step_seconds)
    folder.mkdir()
    inject.write(folder, [])
    metrics = folder / "metrics.jsonl"
    seen: dict[int, float] = {}

    def watch(processes: Sequence[subprocess.Popen]) -> None:
        count = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        seen.setdefault(count, time.monotonic())

    codes, _ = ranks.attempt(launched, folder, watch=watch)
    if any(codes):
        raise RuntimeError((folder / "err").read_text()[-2000:])
    return (seen[CLEAN] - seen[CLEAN - 20]) / 20


def saving(saves: str, args: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """The flags of what is saved."""
    flags = ["--save-interval", str(args.save_interval)]
    if saves != "checkpoints":
        flags += ["--snapshot-interval", str(args.snapshot_interval)]
    if saves == "snapshots":
        flags += ["--snapshot-dir", str(folder)]
    if saves == "local":
        flags += ["--non-persistent-ckpt-type", "local", "--replication", "--replication-jump", "1"]
        flags += ["--non-persistent-local-ckpt-dir", str(folder)]
    return (*flags, *(["--async-save"] if args.async_save else []))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
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


def check(args: argparse.Namespace, home: Path) -> bool:
    """Print a line for each run; False if one does not come to its end."""
    iterations = max(1, round(60.0 * args.minutes / args.step_seconds))
    most = 600.0 + 300.0 * args.minutes
    faults = kills(args.seed, args.every, int(most / args.every) + 1)
    memory = Path(tempfile.mkdtemp(prefix="effective-share-", dir="/dev/shm"))
    try:
        measured = seconds_per_iteration(args.step_seconds, home / "undisturbed")
        print(f"an iteration takes {measured:.3f} s in an undisturbed run", flush=True)
        for launcher in args.launchers:
            for saves in args.saves:
                folder = home / f"{launcher}, {saves}"
                flags = saving(saves, args, memory / folder.name)
                launched = launch(launcher, iterations, flags, args.step_seconds)
                seconds = run(launched, folder, faults, most)
                goodput = read_goodput(str(folder / "saved"))
                print(
                    f"{folder.name:22s} {len(inject.injected(folder)):3d} kills, "
                    f"{goodput.attempts:3d} starts, {goodput.iterations} iterations, "
                    f"{seconds:6.1f} s; effective share: ledger {goodput.share:.1%}, "
                    f"stop-watch {goodput.iterations * measured / seconds:.1%}",
                    flush=True,
                )
                if args.details:
                    print("\n".join(f"  {text}" for text in table(goodput)), flush=True)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    finally:
        shutil.rmtree(memory)
    return True
