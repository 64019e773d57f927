"""What --packed-samples accepts, and what it finds in folders before anything is loaded (the rest:
cases.txt)."""

from pathlib import Path

import pytest

from megatron.config import command_line
from megatron.config.script import Script
from megatron.features.registry import RunConfig
from tests.core.config.checks.checked_flags import BASE, checked
from tests.problems import assert_problem, codes_of
from tests.runs import SMALL, plot, train, with_flags, write_text

PACKED = BASE.replace("--mock-data", "--packed-samples")


def test_flags_of_packing_alone_have_no_effect():
    notes = checked("--pack-into-one --pad-samples --min-sample-length 5")[1]
    assert codes_of(notes) == ["flag-has-no-effect"] * 3
    assert [note.split()[0].rstrip(":") for note in notes] == [
        "--pack-into-one",
        "--pad-samples",
        "--min-sample-length",
    ]


def test_folders_are_looked_at_before_the_start(tmp_path: Path):
    (tmp_path / "en").mkdir()
    flags = f"--tokenizer-type NullTokenizer --train-data-path {tmp_path}"
    assert codes_of(checked(flags, base=PACKED)[0]) == ["packed-folder-without-data"]
    (tmp_path / "en/a.bin").touch()
    [line] = checked(flags, base=PACKED)[0]
    assert_problem(line, "packed-meta-missing", f"{tmp_path}/en/a.bin", ".idx")
    (tmp_path / "en/a.idx").touch()
    assert checked(flags, base=PACKED)[0] == []
    assert checked(f"{flags}/en/a", base=PACKED)[0] == []
    assert codes_of(checked(f"{flags}/en/b", base=PACKED)[0]) == ["data-not-found"]


def test_they_are_refused_beside_data_of_a_scripts_own(capsys):
    script = Script(datasets_provider=lambda sizes: None)
    words = "--packed-samples --data-path x --train-iters 4".split()
    with pytest.raises(SystemExit) as leave:
        command_line.read([*SMALL, *words], {}, script, RunConfig)
    said = capsys.readouterr().err.splitlines()
    assert leave.value.code == 2 and codes_of(said) == ["two-data-sources"]
    assert said[0].startswith("error: --packed-samples: ")


def test_a_dry_run_compares_the_order_of_the_rows_with_the_checkpoints(tmp_path: Path, capsys):
    save = ["--save", f"{tmp_path}/run", "--load", f"{tmp_path}/run", "--save-interval", "2"]
    words = ["--train-data-path", write_text(tmp_path / "a", 100), "--packed-samples"]
    words = [*SMALL, *save, *words, "--train-iters", "4", "--eval-iters", "0"]
    train(tmp_path / "first", [*words, "--exit-interval", "2"])
    plot().main([*words, "--dry-run"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as leave:
        plot().main([*with_flags(words, "--min-sample-length", "9"), "--dry-run"])
    assert leave.value.code == 2
    assert codes_of(capsys.readouterr().err.splitlines()) == ["data-order-differs"]
