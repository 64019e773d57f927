"""Whole training runs for tests: the real `pretrain_gpt.main` on forked ranks, and what such a run
leaves behind."""

import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron.checkpoint import reading
from megatron.training import loop
from megatron.training.run import Services
from tests.forkrun import ROOT, RanksFailed, run_ranks
from tests.pairs import PairWriter

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 211 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 8 --lr 0.003 "
    "--lr-decay-style cosine --lr-warmup-iters 3 --log-interval 1 --eval-interval 10 --eval-iters "
    "1 --num-workers 0 --device cpu"
).split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
# of each row of the metrics file: what is equal to the bit in equal runs
EXACT = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples")


def with_flags(words: Sequence[str], *more: str) -> list[str]:
    """A command line in which the flags of `more` replace those of the same name, so that none
    stands twice."""
    new = {word for word in more if word.startswith("--")}
    kept = []
    drop = False
    for word in words:
        drop = word in new if word.startswith("--") else drop
        kept += [] if drop else [word]
    return [*kept, *more]


def write_text(prefix: Path, documents: int, seed: int = 0, vocab: int = 210) -> str:
    """A corpus of random documents, each ended by token `vocab`; returns the prefix for
    --data-path."""
    random = np.random.default_rng(seed)
    with PairWriter(prefix, np.uint16) as builder:
        for _ in range(documents):
            tokens = np.append(random.integers(0, 40, int(random.integers(5, 60))), vocab)
            builder.add_document(tokens.astype(np.uint16), [len(tokens)])
    return str(prefix)


def plot():
    """pretrain_gpt.py as a module."""
    spec = importlib.util.spec_from_file_location("pretrain_gpt", ROOT / "pretrain_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RequestAt:
    """Signals of a run, of which SIGTERM is there from the n-th time on that the run looks: once in
    each iteration."""

    def __init__(self, look: int):
        self.look = look
        self.looks = 0
        self.advice = ""

    @property
    def received(self) -> signal.Signals | None:
        self.looks += 1
        return signal.SIGTERM if self.looks >= self.look else None

    def remember_requests(self) -> None:
        """Real signals are not caught."""


def stop_in(iteration: int) -> Services:
    """A hook: SIGTERM is received in this iteration of the process."""
    return Services(signals=RequestAt(iteration))


def late_from(reading: int, *ranks: int, minutes: float = 1000.0) -> Services:
    """A hook: the clock (of these ranks, or all) is ahead from its n-th reading on. With
    --exit-duration-in-mins it is read once in each iteration and once for each global batch of an
    evaluation."""
    readings = itertools.count(1)

    def clock() -> float:
        late = next(readings) >= reading and (not ranks or int(os.environ["RANK"]) in ranks)
        return time.time() + (60.0 * minutes if late else 0.0)

    return Services(clock=clock)


def kill_in(iteration: int) -> None:
    """Let this process die by SIGKILL in the n-th iteration that it begins, when the sums of the
    step are summed over the ranks."""
    count = itertools.count(1)
    step = loop.train_step

    def all_reduce(x, axis, op="sum"):
        os.kill(os.getpid(), signal.SIGKILL)

    def train_step(run, *args, **kwargs):
        if next(count) == iteration:
            run.services = replace(run.services, all_reduce=all_reduce)
        return step(run, *args, **kwargs)

    loop.train_step = train_step


def _rank(
    rank: int,
    world: int,
    argv: list[str],
    output: str,
    kill_at: int | None,
    hook: Callable[[], Services | None] | None = None,
) -> int:
    """One rank of a run; its output goes to `output`.RANK. With `kill_at` it dies by SIGKILL inside
    that iteration.

    `hook` is called first; it may change what is imported, and return services for the run.
    """
    services = (hook() if hook else None) or Services()
    if kill_at is not None:
        kill_in(kill_at)
    with (
        open(f"{output}.{rank}", "a") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            plot().main(argv, services=services)
        except SystemExit as leave:
            return leave.code if isinstance(leave.code, int) else 0
        finally:
            sys.stdout.flush()
    return 0


class Finished:
    """What a run left: its log, its metrics by iteration, its checkpoints."""

    def __init__(self, folder: Path, world: int):
        self.folder = folder
        self.save = folder / "save"
        self.log = (folder / f"log.{world - 1}").read_text()
        self.first_rank_log = (folder / "log.0").read_text()

    @property
    def rows(self) -> list[dict]:
        """The metrics file, one row an iteration; of repeated iterations the last."""
        rows = [row for row in self._written() if "split" not in row]
        return list({row["iteration"]: row for row in rows}.values())

    @property
    def evaluations(self) -> list[tuple[str, int, float]]:
        """(set, iteration, loss) of every evaluation in the metrics file."""
        rows = [row for row in self._written() if "lm_loss" in row and "split" in row]
        return [(row["split"], row["iteration"], row["lm_loss"]) for row in rows]

    def _written(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def lines(self) -> list[dict[str, str]]:
        """The iteration lines of the log, each with its numbers by name."""
        whole = self.log.replace("\n      ", " | ")  # a long one is folded
        number = re.compile(r"\| ([a-zA-Z][\w -]*?) (-?[\d.]+(?:e-?\d+)?)\b")
        found = re.findall(r"^ iter +(\d+)/\d+ (.*)$", whole, re.M)
        return [{"iteration": n} | dict(number.findall(rest)) for n, rest in found]

    @property
    def ending(self) -> str:
        """Why the run ended, as its log says last."""
        return re.findall(r"^ (stopped .*?|training finished) \|", self.log, re.M)[-1]

    @property
    def saved(self) -> list[int]:
        """The iterations of which the log says that a checkpoint was written."""
        said = re.findall(r"^ checkpoint of iteration (\d+) saved", self.first_rank_log, re.M)
        return [int(iteration) for iteration in said]

    @property
    def resumes(self) -> list[int]:
        """The iterations that its processes went on from, as the log says."""
        said = " ".join(self.first_rank_log.split())
        return [int(n) for n in re.findall(r" resumed from iteration (\d+) ", said)]

    def series(self, *keys: str) -> list[tuple]:
        """These keys of every row, exactly."""
        return [tuple(row[key] for key in keys) for row in self.rows]

    def tensors(self, iteration: int | None = None) -> dict[str, torch.Tensor]:
        """Every tensor of a checkpoint (the newest without `iteration`)."""
        with reading.load(self.save, iteration).reader() as reader:
            return {name: reader.read(name) for name in reader.names()}


def train(
    folder: Path,
    argv: list[str],
    world: int = 1,
    kill_at: int | None = None,
    seconds: float = 200.0,
    hook: Callable[[], Services | None] | None = None,
) -> Finished:
    """Run to the end (or to the kill, in the step of the `kill_at`-th iteration of this process).

    `hook`, a function of a module, is called on every rank before the run; it may return services
    for it.
    """
    folder.mkdir(exist_ok=True)
    argv = [*argv, "--metrics-file", str(folder / "metrics.jsonl")]
    try:
        codes = run_ranks(world, _rank, argv, str(folder / "log"), kill_at, hook, seconds=seconds)
        if codes != [0] * world:
            raise RanksFailed(f"exit codes {codes}\n{(folder / 'log.0').read_text()[-2000:]}")
        assert kill_at is None, "the run ended before it could be killed"
    except RanksFailed as failure:
        if kill_at is None or "exit code -9" not in str(failure):
            raise
    return Finished(folder, world)


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Assert bitwise equality, name by name."""
    assert a.keys() == b.keys()
    different = [
        name for name in a if not torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
    ]
    assert not different, f"{len(different)} tensors differ: {different[:5]}"


def allow_workers() -> None:
    """A hook: this rank, a daemon, may start the processes of a DataLoader."""
    multiprocessing.process.current_process()._config["daemon"] = False
