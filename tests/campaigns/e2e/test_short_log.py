"""What whole runs print with --log-format short: which lines, by which rank, how wide, without
control characters."""

import functools
import re
from pathlib import Path

import pytest

from megatron.analysis.log_reader import read_text
from tests.problems import numbers
from tests.runs import SMALL, Finished, stop_in, train, with_flags, write_text

LABELS = (
    "run model tokenizer batch training optimizer learning rate memory kernels data checkpoints"
)


def job(folder: Path, *more: str, world: int = 1, hook=None) -> Finished:
    words = [
        "--data-path",
        str(folder.parent / "text"),
        "--split",
        "80,10,10",
        "--log-interval",
        "5",
    ]
    words += ["--train-iters", "12", "--save", str(folder / "save"), "--save-interval", "8"]
    return train(
        folder, with_flags(SMALL, "--log-format", "short", *words, *more), world, hook=hook
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Finished:
    """A straight run of 12 iterations."""
    folder = tmp_path_factory.mktemp("short")
    write_text(folder / "text", 260)
    return job(folder / "run")


def test_one_screen_says_what_will_be_trained(first):
    preamble = first.log.split("\n\n")[0]
    assert (
        " ".join(re.findall(r"(?m)^ (learning rate|[a-z]+) ", preamble))
        .replace("arguments ", "")
        .replace("validation test ", "")
        == LABELS
    )
    assert len(preamble.splitlines()) < 30
    assert "8 samples = micro-batch 2 x accumulation 4 x data-parallel 1; 256 tokens" in preamble


def test_the_end(first):
    tail = first.log.split("\n iter 12/12")[1].splitlines()
    assert first.saved[-1] == 12 and numbers(tail[1])[0] == 12
    assert [line.split(" at ")[0] for line in tail[2:4]] == [" final validation", " test"]
    assert tail[4].startswith(" training finished | 12 of 12 iterations | elapsed 0:00:")
    assert f"iteration 12 in {first.save}" in first.log.splitlines()[-1]


def test_a_resumed_run_says_from_where(first, tmp_path):
    write_text(tmp_path / "text", 260)
    load = ["--load", str(first.save), "--ckpt-step", "8", "--exit-interval", "11"]
    done = job(tmp_path / "run", *load, "--data-path", str(first.folder.parent / "text"))
    assert done.resumes == [8] and f"({first.save})" in " ".join(done.log.split())  # wrapped
    assert [r.iteration for r in read_text(done.log).records] == [9, 10, 11]
    assert numbers(done.ending) == [11] and "iteration 11 in" in done.log


def test_the_last_iteration_before_a_signal_has_a_line(tmp_path):
    write_text(tmp_path / "text", 260)
    done = job(tmp_path / "run", "--exit-signal-handler", hook=functools.partial(stop_in, 3))
    assert [r.iteration for r in read_text(done.log).records] == [1, 3]
    ends = [line.split()[0] for line in done.log.split("\n iter  3/12 ")[1].splitlines()[1:]]
    assert ends == ["checkpoint", "stopped", "last"]


def test_two_pipeline_stages_say_everything_once(first, tmp_path):
    """Rank 0 says what will be trained and where it is saved, the last rank what was measured."""
    write_text(tmp_path / "text", 260)
    done = job(tmp_path / "run", "--pipeline-model-parallel-size", "2", world=2)
    assert "2 ranks = pipeline 2" in done.first_rank_log and " run  " not in done.log
    assert " iter " not in done.first_rank_log and [
        r.iteration for r in read_text(done.log).records
    ] == [
        1,
        5,
        10,
        12,
    ]
    assert len(re.findall(r" checkpoint of .* saved", done.first_rank_log + done.log)) == 2
    assert len(re.findall(" training finished ", done.first_rank_log + done.log)) == 1


@pytest.mark.parametrize(
    ("asked", "header", "dump"), [("none", 0, 0), ("all", 0, 1), ("changed", 1, 0)]
)
def test_print_arguments(first, tmp_path, asked, header, dump):
    write_text(tmp_path / "text", 260)
    done = job(
        tmp_path / "run", "--print-arguments", asked, "--train-iters", "4", "--eval-iters", "0"
    )
    assert done.log.count(" arguments that differ from their defaults\n") == header
    assert done.log.count(" end of arguments ") == dump
    if header:
        text = done.log.split(" arguments that differ from their defaults\n")[1].split("\n data ")[
            0
        ]
        assert "--num-layers 2" in text and "--seed" not in text
