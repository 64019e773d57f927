"""Runs that leave out iterations, watched from outside: what they fetch, what they train on, and a
fault."""

import functools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from megatron.checkpoint import skip_log
from megatron.data import gpt_dataset, token_bytes
from megatron.training import build, build_data, loop, step
from megatron.training.logging import training_log
from tests.forkrun import RanksFailed
from tests.runs import SMALL, Finished, train, with_flags

ITERATIONS = 6
COLUMNS = ("learning_rate", "consumed_samples", "consumed_tokens")
EXACT = (
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "consumed_samples",
    "skipped",
    "skipped_iterations_total",
    "skipped_samples",
)


def argv(text: str, folder: Path, *extra: str) -> list[str]:
    save = str(folder / "save")
    mine = [
        "--data-path",
        text,
        "--split",
        "90,10,0",
        "--train-iters",
        str(ITERATIONS),
        "--save",
        save,
        "--load",
        save,
        "--save-interval",
        "1",
        "--eval-iters",
        "0",
    ]
    return with_flags(with_flags(SMALL, *mine), *extra)


def watched(text: str, folder: Path, *extra: str, world: int = 1, hook=None) -> Finished:
    folder.mkdir(exist_ok=True)
    return train(
        folder,
        argv(text, folder, *extra),
        world,
        hook=functools.partial(hook or note_batches, str(folder)),
    )


def killed(text: str, folder: Path, hook, *extra: str) -> None:
    """A run that its hook kills."""
    with pytest.raises(RanksFailed, match="exit code -9"):
        watched(text, folder, *extra, hook=hook)


def refused(text: str, folder: Path, *extra: str, world: int = 1) -> str:
    """What a run says that is refused before model and data are built."""
    with pytest.raises(RanksFailed, match=r"exit codes \[2") as failure:
        watched(text, folder, *extra, world=world, hook=note_set_up)
    assert not (folder / "set-up").exists()
    return str(failure.value)


# --- what is seen from outside


def note_reads(folder: str) -> None:
    """Every process of the run, data workers too, writes down each training sample it fetches."""
    fetch = gpt_dataset.GPTDataset.__getitem__

    def noted(self, index):
        if self.index_split == "train":
            with open(f"{folder}/reads", "a") as file:
                file.write(f"{index}\n")
        return fetch(self, index)

    gpt_dataset.GPTDataset.__getitem__ = noted


def note_bytes(folder: str) -> None:
    """... and how many bytes of token files it reads."""
    note_reads(folder)
    read_at = token_bytes.read_at

    def noted(file, path, start, count):
        if path.endswith(".bin"):
            with open(f"{folder}/bytes", "a") as notes:
                notes.write(f"{count}\n")
        return read_at(file, path, start, count)

    token_bytes.read_at = noted


def note_batches(folder: str) -> None:
    """Each sample fetched, and of each iteration the sums and heads of the rows it trains on.
    Forked ranks may have data workers."""
    multiprocessing.process.current_process()._config["daemon"] = False
    note_reads(folder)
    make = step.make_batch
    train_step = loop.train_step
    now = []

    def noted_step(run, forward_step, samples, iteration, own):
        now[:] = [iteration]
        return train_step(run, forward_step, samples, iteration, own)

    def noted_batch(samples, rules, device, dropout_seeds=None, *rest):
        if dropout_seeds is not None:
            with open(f"{folder}/batches", "a") as file:
                file.write(
                    json.dumps([now[0], samples.rows.sum(1).tolist(), samples.rows[:, :3].tolist()])
                    + "\n"
                )
        return make(samples, rules, device, dropout_seeds, *rest)

    step.make_batch = noted_batch
    loop.train_step = noted_step


def note_seconds(folder: str) -> None:
    """The CPU seconds of this thread in the loop, training apart, and which samples and bytes were
    fetched."""
    note_bytes(folder)
    train_all = loop.Trainer.train
    train_one = loop.Trainer.train_one
    trained = []

    def timed_one(self, *args):
        start = time.thread_time()
        result = train_one(self, *args)
        trained.append(time.thread_time() - start)
        return result

    def timed(self):
        Path(folder, "bytes").unlink(missing_ok=True)  # what a start looks at
        start = time.thread_time()
        result = train_all(self)
        Path(folder, "seconds").write_text(f"{time.thread_time() - start - sum(trained)}")
        return result

    loop.Trainer.train = timed
    loop.Trainer.train_one = timed_one


def note_set_up(folder: str) -> None:
    """Whether a model or data sets were begun to be built."""
    for module, name in ((build, "build_model"), (build_data, "build_data")):
        right = getattr(module, name)

        def noted(*args, right=right):
            Path(folder, "set-up").touch()
            return right(*args)

        setattr(module, name, noted)


def kill_after(iteration: int, folder: str) -> None:
    """Die when that iteration is done and told, before a save of it."""
    add = training_log.TrainingLog.add

    def adding(self, result):
        add(self, result)
        if result.iteration >= iteration:
            os.kill(os.getpid(), signal.SIGKILL)

    training_log.TrainingLog.add = adding


def records(save: Path) -> list[skip_log.SkipRecord]:
    """The records in `skips.jsonl` of a run directory."""
    return skip_log.parse(skip_log.read(save)[0], str(save))


def reads(folder: Path) -> list[int]:
    path = folder / "reads"
    return sorted(map(int, path.read_text().split())) if path.exists() else []


def batches(folder: Path) -> dict[int, list]:
    """The rows that each iteration trained on, in whatever order ranks and micro-batches came."""
    found: dict[int, list] = {}
    for line in (folder / "batches").read_text().splitlines():
        iteration, sums, heads = json.loads(line)
        found.setdefault(iteration, []).extend(zip(sums, map(tuple, heads), strict=True))
    return {iteration: sorted(rows) for iteration, rows in found.items()}
