"""Scalars of runs on TensorBoard: which, where, when, and read back."""

import errno
import functools
import os
import sys
from pathlib import Path

import pytest

from megatron.analysis.run_reader import read_run
from megatron.config.logging import LoggingConfig
from megatron.features.boards.feature import BoardsConfig
from megatron.features.boards.points import BoardIntervals, Boards
from megatron.features.boards.reader import read_scalars
from megatron.features.boards.tensorboard import TensorBoard
from megatron.features.registry import READERS
from megatron.training.checkpointing import save
from megatron.training.logging import output
from megatron.training.result import IterationResult
from tests import problems
from tests.core.training.tiny_run import make_run
from tests.features.boards.event_files import events
from tests.runs import NO_DROPOUT, SMALL, Finished, train, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 260)


def run(text: str, folder: Path, *extra: str, world: int = 1) -> Finished:
    data = ["--data-path", text, "--split", "80,10,10", "--train-iters", "6"]
    return train(folder, [*SMALL, *data, *extra], world)


def points(board, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in board.Scalars(tag)]


def test_tags_of_a_run(text, tmp_path):
    """From the last of two ranks; those of trained iterations are the metrics file's. Multi-token
    prediction is not evaluated."""
    depths = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
    board = ("--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-log-interval", "2")
    done = run(text, tmp_path / "run", *board, *depths, "--train-range-to-skip", "4", "4", world=2)
    found = events(tmp_path / "board")
    tags = {"loss/train", "loss/valid", "loss/test", "train/grad_norm", "train/learning_rate"}
    assert set(found.Tags()["scalars"]) > tags
    told = {"train/mtp_1 loss": "mtp_1 loss", "train/mtp_1 acceptance": "mtp_1 acceptance"}
    assert {tag for tag in found.Tags()["scalars"] if "mtp" in tag} == told.keys()
    trained = [row for row in done.rows if row["iteration"] in (2, 6)]
    told |= {"loss/train": "lm_loss", "train/grad_norm": "grad_norm"}
    for tag, key in told.items():
        expected = [(row["iteration"], pytest.approx(row[key], rel=1e-6)) for row in trained]
        assert points(found, tag) == expected
    losses = [loss for split, _, loss in done.evaluations if split == "validation"]
    assert [value for _, value in points(found, "loss/valid")] == pytest.approx(losses, rel=1e-6)


def test_metrics_of_the_forward_step_and_memory_where_it_is_asked_for():
    scalars = []

    class Board:
        def scalar(self, tag, value, iteration, samples=None):
            scalars.append((tag, value, iteration))

    metrics = {"share": 0.5, "none": None}
    result = IterationResult(iteration=2, global_batch_size=4, seconds=0.5, metrics=metrics)
    report = {"allocated": 3, "max allocated": 4, "reserved": 8, "allocations": 17}
    for asked in (True, False):
        boards = Boards(
            [Board()],
            BoardsConfig(log_memory_to_tensorboard=asked),
            LoggingConfig(log_format="megatron"),
        )
        boards.iteration(result, None, lambda: report)
    assert scalars.count(("share", 0.5, 2)) == 2 and "none" not in {tag for tag, *_ in scalars}
    assert [point for point in scalars if point[0].startswith("mem-")] == [
        ("mem-allocated-bytes", 3, 2),
        ("mem-reserved-bytes", 8, 2),
        ("mem-allocated-count", 17, 2),
    ]


def board_of(folder: Path, log_format: str = "short") -> Boards:
    return Boards(
        [TensorBoard(str(folder), 10)], BoardsConfig(), LoggingConfig(log_format=log_format)
    )


@pytest.mark.parametrize("log_format", ["short", "megatron"])
def test_a_resumed_run_takes_its_curve_up(log_format, tmp_path):
    """As TensorBoard's own reader has it, which goes by the session and not by the order of steps.
    Points against samples keep those of the run that was given up, as Megatron's do."""
    for value, before, last in ((1.0, 0, 8), (2.0, 5, 10)):
        board = board_of(tmp_path, log_format)
        board.start(before)
        for n in range(before + 1, last + 1):
            board.scalar("lm loss", value, n, 4 * n)
        board.close()
    found = events(tmp_path)
    resumed = [(n, 1.0) for n in range(1, 6)] + [(n, 2.0) for n in range(6, 11)]
    if log_format == "short":
        assert points(found, "loss/train") == resumed
    else:
        assert [n for n, _ in points(found, "lm loss vs samples")][:8] == [*range(4, 33, 4)]


@pytest.mark.parametrize("iteration", [0, 5])
def test_a_directory_with_another_run_is_named_where_a_run_begins(iteration, tmp_path, capsys):
    run = make_run()
    run.progress.iteration = iteration
    capsys.readouterr()
    for used in (False, True):
        boards = board_of(tmp_path)
        BoardIntervals(BoardsConfig(), run, [boards]).on_start()
        boards.close()
        said = capsys.readouterr().out
        assert ("[tensorboard-directory-used]" in said) == (used and iteration == 0)
        assert str(tmp_path) in said or not said


def note_order(folder: str) -> None:
    """Write down flushes of TensorBoard and saves, in their order."""
    real = save.save_checkpoint
    flush = TensorBoard.flush
    close = TensorBoard.close

    def say(word: str) -> None:
        with open(f"{folder}/order", "a") as file:
            file.write(word)

    def noted_save(run, constants):
        say(f"save {run.progress.iteration} ")
        real(run, constants)

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
    board = board_of(tmp_path / "tb", "short" if grouped else "megatron")
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
