"""`spikes.py verify` says yes to ledgers of runs that skipped what they were to skip, and no to
each way of not doing it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.spikes import program as spikes
from megatron.config.skip_ranges import SkipRanges
from megatron.data.ledger import RECORD, read_ledger
from megatron.training import loop
from tests.core.training.skipping.skip_runs import argv, note_batches, watched
from tests.problems import numbers
from tests.runs import Finished, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


def run(text: str, folder: Path, *extra: str, hook=None) -> Finished:
    return watched(
        text,
        folder,
        "--data-ledger",
        str(folder / "ledger"),
        "--save-interval",
        "6",
        *extra,
        hook=hook,
    )


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Finished:
    return run(text, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def skips(text, tmp_path_factory) -> Finished:
    return run(text, tmp_path_factory.mktemp("skips") / "run", "--train-range-to-skip", "2", "3")


def verify(capsys, *words: str) -> tuple[int, str, str]:
    code = spikes.main(["verify", *map(str, words)])
    return code, *capsys.readouterr()


def changed(ledger: Path, place: Path, number: int, values: dict[str, int]) -> Path:
    """A copy with other values in the record of an iteration."""
    shutil.copy(ledger, place)
    records = np.memmap(place, RECORD, "r+")
    for name, value in values.items():
        records[name][number] = value
    records.flush()
    return place


def test_good_runs(text, whole, skips, capsys):
    code, out, err = verify(capsys, "--reference", whole.folder / "ledger", skips.save)
    assert (code, err) == (0, "")
    first, *good = out.splitlines()
    assert first.startswith(f"{skips.folder}/ledger: ") and numbers(first) == [6, 2]
    assert [line.partition(": ")[0] for line in good] == ["good"] * 3
    assert [f"{whole.folder}/ledger" in line for line in good] == [False, True, True]
    assert verify(capsys, skips.save)[0] == 0
    flags = argv(text, skips.folder, "--train-range-to-skip", "2", "3")
    assert verify(capsys, "--ledger", skips.folder / "ledger", "--", *flags)[0] == 0


def keep_position(folder: str) -> None:
    """A hook that plants a fault: skipped iterations do not move the data."""
    note_batches(folder)
    right = loop.training_samples

    def wrong(sampler, schedule, skips, first, last, shift=0):
        return right(sampler, schedule, SkipRanges(), first, last, shift)

    loop.training_samples = wrong


@pytest.mark.campaign
def test_a_data_position_that_stays(text, tmp_path, whole, capsys):
    """The first version of the seed: one ledger alone shows it."""
    mutant = run(text, tmp_path / "run", "--train-range-to-skip", "2", "3", hook=keep_position)
    code, out, _ = verify(capsys, mutant.save)
    assert code == 1
    assert [2, 4] in [numbers(line) for line in out.splitlines() if line.startswith("  iteration")]
    code, out, _ = verify(capsys, "--reference", whole.folder / "ledger", mutant.save)
    assert code == 1
    wrong = out.partition("\nwrong: ")[2].splitlines()
    assert f"{whole.folder}/ledger" in wrong[0] and wrong[1].startswith("  iteration 4: hash ")


@pytest.mark.parametrize(
    ("iteration", "values", "said"),
    [
        (2, {"flag": 0, "hash": 7}, "iteration 2 was trained"),
        (5, {"flag": 1, "hash": 0}, "iteration 5 was skipped"),
        (
            3,
            {"hash": 7},
            "hash 0000000000000007 of",
        ),
        (5, {"hash": 7}, "iteration 5: hash 0000000000000007 in"),
        (5, {"first": 41}, "iteration 5: 8 samples from 41 on in"),
        (3, {"count": 9}, "flags 8 from 16 on"),
        (4, {"iteration": 0}, "iteration 4 is"),
    ],
)
def test_every_wrong_record(tmp_path, whole, skips, capsys, iteration, values, said):
    ledger = changed(skips.folder / "ledger", tmp_path / "ledger", iteration, values)
    code, out, _ = verify(
        capsys, "--ledger", ledger, "--reference", whole.folder / "ledger", skips.save
    )
    assert code == 1 and said in out, out


def test_a_reference_that_read_something_else(tmp_path, whole, skips, capsys):
    ledger = changed(whole.folder / "ledger", tmp_path / "ledger", 3, {"hash": 7})
    code, out, _ = verify(capsys, "--reference", ledger, skips.save)
    value = read_ledger(str(whole.folder / "ledger"))[1]["hash"][2]
    assert code == 1
    assert f"hash {value:016x} now, 0000000000000007 in {ledger}" in out


def test_what_cannot_be_read(tmp_path, whole, skips, capsys):
    for words, said in (
        ((tmp_path,), "no checkpoint there"),
        (("--ledger", tmp_path / "none", skips.save), "there is no such file"),
        (("--ledger", __file__, skips.save), "not a data ledger"),
        ((), "no run: give"),
    ):
        code, out, err = verify(capsys, *words)
        assert (
            (code, out) == (2, "")
            and said in err
            and err.startswith("error: ")
            and err.count("\n") == 1
        )


@pytest.mark.campaign
def test_ranges_on_record_count_too(text, tmp_path, capsys):
    """A range that the last command line does not name, and one whose record was removed."""
    folder = tmp_path / "run"
    run(
        text,
        folder,
        "--train-range-to-skip",
        "2",
        "2",
        "5",
        "5",
        "--exit-interval",
        "3",
        "--save-interval",
        "3",
    )
    path = folder / "save/skips.jsonl"
    path.write_text(path.read_text().replace("2-2 5-5", "2-2").replace('"s1": 40', '"s1": 16'))
    done = run(text, folder)
    assert [row["skipped"] for row in done.rows] == [0, 1, 0, 0, 0, 0]
    code, out, _ = verify(capsys, done.save)
    assert code == 0 and numbers(out.splitlines()[0]) == [6, 1]
    code, out, _ = verify(
        capsys,
        "--ledger",
        folder / "ledger",
        "--",
        *argv(text, folder, "--iterations-to-skip", "5"),
    )
    assert code == 1 and "iteration 5 was trained" in out


@pytest.mark.campaign
def test_batch_sizes_that_changed(text, tmp_path, capsys):
    """The iterations of each part of the run are read by the flags of that part."""
    folder = tmp_path / "run"
    run(text, folder, "--train-range-to-skip", "2", "2", "--exit-interval", "4")
    done = run(
        text,
        folder,
        "--global-batch-size",
        "16",
        "--iterations-to-skip",
        "6",
        "--train-iters",
        "7",
        "--allow-data-order-change",
        "--override-opt_param-scheduler",
    )
    assert [row["iteration"] for row in done.rows if row["skipped"]] == [2, 6]
    code, out, _ = verify(capsys, done.save)
    assert code == 0 and numbers(out.splitlines()[0]) == [7, 2], out
