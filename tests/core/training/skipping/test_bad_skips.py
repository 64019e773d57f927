"""What is wrong with ranges to skip is said in one line, before anything is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint import skip_log
from megatron.config import command_line
from tests.core.training.skipping import skip_runs
from tests.core.training.skipping.skip_runs import argv, refused, watched
from tests.forkrun import ROOT, RanksFailed
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
REFUSED = {
    "": ("value-missing", ""),
    "5": ("skip-range-incomplete", "5 5"),
    "1 2 7": ("skip-range-incomplete", "7"),
    "ten 20": ("value-malformed", "ten"),
    "10-20": ("value-malformed", "--train-range-to-skip 10 20"),
    "1e1 20": ("value-malformed", "10"),
    "20 10": ("skip-range-reversed", "10 20"),
    "0 5": ("skip-before-first-iteration", "1 5"),
    "-3 5": ("skip-before-first-iteration", "1 5"),
    "101 120": ("skip-after-last-iteration", "101 120"),
    "1 100": ("skip-leaves-nothing-to-train", "100"),
    "1 60 61 100": ("skip-leaves-nothing-to-train", "100"),
}
ACCEPTED = {
    "7 7": ([(7, 7)], None),
    "30 31 3 4": ([(3, 4), (30, 31)], None),
    "3 4 5 6 3 4": ([(3, 6)], None),
    "2 4 3 5": ([(2, 5)], ("skip-ranges-overlap", "2 4", "3 5")),
    "99 120": ([(99, 100)], ("skip-range-cut", "99 100")),
    "1 9": ([(1, 9)], ("skip-large-share", "9 of 100", "9.0 %", "72 samples", "2304 tokens")),
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_ranges(capsys, words):
    """Exit code 2 and one line that names flag, values and remedy; nothing was built or opened."""
    with pytest.raises(SystemExit) as leave:
        command_line.read([*GOOD, "--train-range-to-skip", *words.split()], {})
    out, err = capsys.readouterr()
    assert leave.value.code == 2 and out == ""
    assert err.startswith("error: --train-range-to-skip") and err.count("\n") == 1
    code, remedy = REFUSED[words]
    assert_problem(err.rstrip("\n"), code, remedy)


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


def test_single_iterations_are_ranges_too():
    line = command_line.read(
        [*GOOD, "--iterations-to-skip", "9", "4", "--train-range-to-skip", "5", "6"], {}
    )
    assert "skipping 4 iterations: --train-range-to-skip 4 6 9 9" in line.notes


def test_refused_before_any_set_up():
    """In a new interpreter: not even torch or numpy is loaded."""
    code = (
        "import runpy, sys, atexit\n"
        "atexit.register(lambda: print(*(name for name in sys.modules if name in ('torch', "
        "'numpy', 'megatron.training.build', 'megatron.data.build'))))\n"
        f"sys.argv = ['x', *{[*GOOD, '--train-range-to-skip', '20', '10']!r}]\n"
        f"runpy.run_path({str(ROOT / 'pretrain_gpt.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (2, [])


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
def test_the_exit_code_of_a_refused_resume(text, trained, tmp_path):
    words = argv(
        text,
        tmp_path,
        "--load",
        str(trained / "save"),
        "--train-iters",
        "12",
        "--train-range-to-skip",
        "4",
        "4",
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: --train-range-to-skip 4 4: "), (
        done.stderr
    )
    assert done.stderr.count("\n") == 1 and "building" not in done.stdout, done


@pytest.mark.campaign
def test_changed_batch_sizes(text, tmp_path):
    """A recorded range that would be other samples is an error before anything is built; without
    its line, the ranges are as they are given."""
    folder = tmp_path / "run"
    words = (
        "--train-iters",
        "12",
        "--allow-data-order-change",
        "--save-interval",
        "2",
        "--override-opt_param-scheduler",
    )
    watched(text, folder, *words, "--train-range-to-skip", "7", "8", "--exit-interval", "4")
    said = refused(text, folder, *words, "--global-batch-size", "32")
    assert "7-8 are samples 48 to 63" in said and "[skip-record-not-applicable]" in said
    (folder / "save" / skip_log.FILE_NAME).write_text("")
    words += ("--global-batch-size", "16", "--train-range-to-skip", "6", "6")
    done = watched(text, folder, *words)
    assert [(row["iteration"], row["consumed_samples"]) for row in done.rows if row["skipped"]] == [
        (6, 64)
    ]
    [record] = skip_runs.records(done.save)
    assert (record.ranges, record.s0, record.s1) == ("6-6", 48, 64)


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


@pytest.mark.campaign
def test_damage_of_the_file(text, trained, tmp_path):
    """A line cut off is said and dropped; another one that is none is one error."""
    folder = tmp_path / "run"
    words = (
        "--load",
        str(trained / "save"),
        "--train-iters",
        "12",
        "--save-interval",
        "100",
        "--exit-interval",
        "9",
    )
    watched(text, folder, *words, "--train-range-to-skip", "9", "10")
    path = folder / "save" / skip_log.FILE_NAME
    whole = path.read_text()
    path.write_text(whole + whole[:50])
    said = watched(text, folder, *words, "--iterations-to-skip", "12").first_rank_log
    assert f"WARNING: {path}: " in said
    assert path.read_text().startswith(whole)
    assert [one.ranges for one in skip_runs.records(folder / "save")] == ["9-10", "12-12"]
    path.write_text("x" + path.read_text())
    with pytest.raises(
        RanksFailed,
        match=r"skips.jsonl, line 1: .*\[skip-record-malformed\]",
    ):
        watched(text, folder, *words, world=2)
