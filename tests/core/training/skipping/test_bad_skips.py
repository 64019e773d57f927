"""What is wrong with ranges to skip is said in one line, before anything is built."""

from pathlib import Path

import pytest

from megatron.checkpoint import skip_log
from megatron.config import command_line
from tests.core.training.skipping.skip_runs import argv, refused, watched
from tests.problems import assert_problem
from tests.runs import train, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


GOOD = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --mock-data --vocab-size 100 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 0.003 --train-iters 100 --device cpu"
).split()
ACCEPTED = {
    "7 7": ([(7, 7)], None),
    "30 31 3 4": ([(3, 4), (30, 31)], None),
    "3 4 5 6 3 4": ([(3, 6)], None),
    "2 4 3 5": ([(2, 5)], ("skip-ranges-overlap", "2 4", "3 5")),
    "99 120": ([(99, 100)], ("skip-range-cut", "99 100")),
    "1 9": ([(1, 9)], ("skip-large-share", "9 of 100", "9.0 %", "72 samples", "2304 tokens")),
}


@pytest.mark.parametrize("words", ACCEPTED)
def test_good_ranges(words):
    ranges, warning = ACCEPTED[words]
    line = command_line.read([*GOOD, "--train-range-to-skip", *words.split()], {})
    count = sum(last - first + 1 for first, last in ranges)
    said = " ".join(f"{first} {last}" for first, last in ranges)
    assert (
        f"skipping {count} iteration{'s' * (count > 1)}: --train-range-to-skip {said}" in line.notes
    )
    if warning:
        assert_problem(line.notes[0], *warning)
    assert command_line.read([*GOOD, "--train-range-to-skip", *said.split()], {}).config is not None


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> Path:
    """8 iterations of 12 without skips; checkpoints of 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(
        folder,
        argv(text, folder, "--train-iters", "12", "--save-interval", "3", "--exit-interval", "8"),
    )
    return folder


def test_iterations_that_were_trained_cannot_be_skipped(text, trained, tmp_path):
    """It says so before anything is built, names the checkpoint to go back to, and records nothing;
    on all ranks."""
    (tmp_path / "run").mkdir()
    load = ("--load", str(trained / "save"), "--train-iters", "12", "--save-interval", "100")
    said = refused(text, tmp_path / "run", *load, "--train-range-to-skip", "5", "9")
    assert "--train-range-to-skip 5 9: " in said and "--ckpt-step 3, " in said
    said = refused(text, tmp_path / "run", *load, "--train-range-to-skip", "2", "2", world=2)
    assert "--train-range-to-skip 2 2: " in said and "--ckpt-step" not in said.splitlines()[-1]
    assert not (tmp_path / "run/save" / skip_log.FILE_NAME).exists()
    back = watched(
        text, tmp_path / "back", *load, "--ckpt-step", "3", "--train-range-to-skip", "5", "9"
    )
    assert [row["iteration"] for row in back.rows if row["skipped"]] == [5, 6, 7, 8, 9]


@pytest.mark.campaign
def test_an_older_checkpoint_of_another_branch_is_not_loaded(text, tmp_path):
    """The newest, which skipped 5, is damaged, and 4 is lost; 6 is of a branch that trained 5."""
    folder = tmp_path / "run"
    words = ("--train-iters", "9")
    watched(text, folder, *words, "--save-interval", "3", "--exit-interval", "6")
    watched(
        text,
        folder,
        *words,
        "--save-interval",
        "4",
        "--exit-interval",
        "8",
        "--ckpt-step",
        "3",
        "--iterations-to-skip",
        "5",
    )
    (path,) = (folder / "save/iter_0000008").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (folder / "save/iter_0000004").rename(folder / "gone")
    done = watched(text, folder, *words, "--save-interval", "4")
    assert done.resumes[-1] == 3
    assert [row["iteration"] for row in done.rows if row["skipped"]] == [5]
