"""Scalars of runs on TensorBoard: which, where, when, and read back."""

from __future__ import annotations

import errno
import functools
import math
import os
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.analysis.run_reader import read_run
from megatron.config.logging import LoggingConfig
from megatron.features.boards.feature import BoardsConfig
from megatron.features.boards.points import BoardIntervals, Boards
from megatron.features.boards.reader import read_scalars
from megatron.features.boards.tensorboard import TensorBoard
from megatron.features.registry import READERS
from megatron.training.checkpointing import save
from megatron.training.logging import output
from megatron.training.logging.iteration import IterationResult
from tests import problems
from tests.core.training.tiny_run import make_run
from tests.runs import NO_DROPOUT, SMALL, Finished, train, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 260)


def run(text: str, folder: Path, *extra: str, world: int = 1) -> Finished:
    data = ["--data-path", text, "--split", "80,10,10", "--train-iters", "6"]
    return train(folder, [*SMALL, *data, *extra], world)


def events(folder: Path):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def points(board, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in board.Scalars(tag)]


SWITCHED_ON = (
    "--log-timers-to-tensorboard --log-batch-size-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard "
    "--log-world-size-to-tensorboard --log-throughput --log-params-norm --log-num-zeros-in-grad "
    "--timing-log-level 1"
).split()


def test_tensorboard_with_everything(text, tmp_path):
    """Megatron's tags, against iterations and against samples, from the last of two ranks."""
    board = tmp_path / "board"
    done = run(
        text,
        tmp_path / "run",
        "--tensorboard-dir",
        str(board),
        *SWITCHED_ON,
        "--eval-interval",
        "3",
        "--train-range-to-skip",
        "2",
        "2",
        world=2,
    )
    assert (
        "> setting tensorboard ...\n" in done.log
        and "setting tensorboard" not in done.first_rank_log
    )
    found = events(board)
    both = [
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "world-size",
        "grad-norm",
        "num-zeros",
        "params-norm",
        "lm loss validation",
        "lm loss validation ppl",
    ]
    alone = [
        "iteration-time",
        "throughput",
        "forward-backward-time",
        "optimizer-time",
        "all-grads-sync-time",
        "optimizer-inner-step-time",
    ]
    tags = set(found.Tags()["scalars"])
    assert tags >= {*both, *(f"{tag} vs samples" for tag in both), *alone}
    # this device has no memory of its own to tell of
    assert not any(tag.startswith("mem-") for tag in tags)
    trained = [row for row in done.rows if not row["skipped"]]
    for tag, key in (("lm loss", "lm_loss"), ("grad-norm", "grad_norm")):
        got = points(found, tag)
        assert [step for step, _ in got] == [1, 3, 4, 5, 6]
        assert [value for _, value in got] == pytest.approx([row[key] for row in trained], rel=1e-6)
    assert [s for s, _ in points(found, "lm loss vs samples")] == [
        row["consumed_samples"] for row in trained
    ]
    assert points(found, "skipped") == [(2, 1.0)]
    rates = points(found, "learning-rate")
    assert [s for s, _ in rates] == list(range(1, 7))
    assert [v for _, v in rates] == pytest.approx(
        [row["learning_rate"] for row in done.rows], rel=1e-6
    )
    assert points(found, "batch-size") == [(n, 8.0) for n in range(1, 7)]
    assert points(found, "world-size") == [(n, 2.0) for n in range(1, 7)]
    losses = [float(value) for value in re.findall(r"lm loss value: (\S+)", done.log)]
    valid = points(found, "lm loss validation")
    assert [s for s, _ in valid] == [3, 6, 6, 6] and [v for _, v in valid] == pytest.approx(
        losses, rel=1e-6
    )
    perplexities = [v for _, v in points(found, "lm loss validation ppl")]
    assert perplexities == pytest.approx(list(map(math.exp, losses)), rel=1e-5)
    texts = {
        tag.removesuffix("/text_summary"): found.Tensors(tag)[0] for tag in found.Tags()["tensors"]
    }
    assert texts["num_layers"].step == 0 and texts["num_layers"].tensor_proto.string_val[0] == b"2"
    assert len(texts) > 200


def test_tensorboard_with_defaults(text, tmp_path):
    board = tmp_path / "board"
    run(
        text,
        tmp_path / "run",
        "--tensorboard-dir",
        str(board),
        "--tensorboard-log-interval",
        "2",
        "--no-log-loss-scale-to-tensorboard",
    )
    found = events(board)
    expected = {
        f"{tag}{suffix}"
        for tag in ("learning-rate", "lm loss", "grad-norm", "lm loss validation")
        for suffix in ("", " vs samples")
    }
    assert set(found.Tags()["scalars"]) == expected
    assert [s for s, _ in points(found, "lm loss")] == [2, 4, 6]


def test_metrics_of_the_forward_step_and_memory_where_it_is_asked_for():
    scalars = []

    class Board:
        def scalar(self, tag, value, iteration, samples=None):
            scalars.append((tag, value, iteration))

    result = IterationResult(2, 4, 8, 0.1, 1.0, 0.5, metrics={"share": 0.5, "none": None})
    report = {"allocated": 3, "max allocated": 4, "reserved": 8, "allocations": 17}
    for asked in (True, False):
        boards = Boards(
            [Board()],
            BoardsConfig(log_memory_to_tensorboard=asked),
            LoggingConfig(log_format="megatron"),
        )
        boards.iteration(result, None, {}, lambda: report)
    assert scalars.count(("share", 0.5, 2)) == 2 and "none" not in {tag for tag, *_ in scalars}
    assert [point for point in scalars if point[0].startswith("mem-")] == [
        ("mem-allocated-bytes", 3, 2),
        ("mem-reserved-bytes", 8, 2),
        ("mem-allocated-count", 17, 2),
    ]


def test_no_device_memory_on_a_machine_without_accelerator(capsys):
    run = make_run(device="auto")
    for asked in (True, False):
        BoardIntervals(BoardsConfig(log_memory_to_tensorboard=asked), run).on_start()
        said = "--log-memory-to-tensorboard: no effect" in capsys.readouterr().out
        assert said == asked


def note_order(folder: str) -> None:
    """Write down flushes of TensorBoard and saves, in their order."""
    real = save.save_checkpoint
    flush = TensorBoard.flush
    close = TensorBoard.close

    def say(word: str) -> None:
        with open(f"{folder}/order", "a") as file:
            file.write(word)

    def noted_save(run):
        say(f"save {run.progress.iteration} ")
        real(run)

    def noted_flush(self):
        flush(self)
        say("flush ")

    def noted_close(self):
        close(self)
        say("close ")

    save.save_checkpoint = noted_save
    TensorBoard.flush = noted_flush
    TensorBoard.close = noted_close


def test_points_are_on_the_disk_before_a_checkpoint(text, tmp_path):
    """What a checkpoint has behind it will not be computed again, so its points must not be lost
    with the process."""
    words = [
        *SMALL,
        *NO_DROPOUT,
        "--data-path",
        text,
        "--split",
        "100,0,0",
        "--train-iters",
        "4",
        "--tensorboard-dir",
        str(tmp_path / "board"),
        "--save",
        str(tmp_path / "run/save"),
        "--save-interval",
        "2",
    ]
    train(tmp_path / "run", words, hook=functools.partial(note_order, str(tmp_path)))
    assert (tmp_path / "order").read_text() == "flush save 2 flush save 4 close "


def test_a_missing_package_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with problems.raises(ValueError, "package-missing", "--tensorboard-dir"):
        TensorBoard(str(tmp_path), 10)


def no_write(file: int, data: bytes) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failing_disk(tmp_path, monkeypatch, capsys):
    """Events of the failure are lost, those before and after it are there; a close does not wait
    for anything."""
    board = TensorBoard(str(tmp_path / "board"), 2)
    board.scalar("loss", 1.0, 1)
    board.flush()
    with monkeypatch.context() as failing:
        failing.setattr(output.os, "write", no_write)
        for n in range(2, 9):
            board.scalar("loss", 1.0, n)
        board.flush()
    board.scalar("loss", 1.0, 9)
    board.close()
    assert [step for _, step, _ in read_scalars(str(tmp_path / "board"))] == [1, 9]
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1 and f"--tensorboard-dir {tmp_path}/board/events.out.tfevents." in err
    )


@pytest.mark.parametrize("grouped", [True, False])
def test_what_is_written_is_read_back(grouped, tmp_path):
    board = Boards(
        [TensorBoard(str(tmp_path / "tb"), 10)],
        BoardsConfig(),
        LoggingConfig(log_format="short" if grouped else "megatron"),
    )
    for n, loss in enumerate([5.0, 4.0, 3.0, 2.5], 1):
        for tag, value in (("lm loss", loss), ("grad-norm", 1.5), ("learning-rate", 1e-3)):
            board.scalar(tag, value, n, 8 * n)
    values = {"loss": 2.25, "perplexity": 9.4, "bits_per_byte": None}
    board.evaluation("lm loss", "validation", 4, 32, values)
    board.evaluation("lm loss", "validation-en", 4, 32, {"loss": 2.75})
    board.close()
    run = read_run(str(tmp_path), readers=READERS)
    assert (
        run.panels["loss"] == ([1, 2, 3, 4], [5.0, 4.0, 3.0, 2.5])
        and run.panels["grad_norm"][1] == [1.5] * 4
    )
    assert run.evaluations == {"validation": ([4], [2.25]), "validation-en": ([4], [2.75])}
