"""What --packed-samples refuses before anything is loaded, each in one line."""
from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import command_line
from tests.config.checked_flags import BASE, checked

PACKED = BASE.replace("--mock-data", "--packed-samples")


def test_packed_rows_of_made_up_samples_need_nothing_else():
    assert checked("--dummy-data internlm", base=PACKED)[0] == []
    assert checked("", base=BASE.replace("--mock-data", "--dummy-data internlm"))[0] == [
        "--dummy-data internlm: makes samples of many lengths, which are packed; add --packed-samples"]
    assert checked("--tokenizer-type NullTokenizer", base=PACKED)[0] == [
        "no data: give --train-data-path FOLDER, or --dummy-data internlm"]
    assert checked("--dummy-data internlm", base=PACKED.replace("--vocab-size 100", ""))[0] == [
        "--vocab-size is missing: the synthetic text of --dummy-data needs the number of ids, as in --vocab-size 50257"]
    assert command_line.read(f"{PACKED} --dummy-data internlm".split(), {}).config.data.tokenizer == "NullTokenizer"


@pytest.mark.parametrize(("flags", "problem"), [
    ("--data-path x", "--data-path: cannot stand beside --packed-samples: it would be split"),
    ("--data-args-path x", "--data-args-path: cannot stand beside --packed-samples: it would be split"),
    ("--dummy-data internlm --data-order epoch", "--data-order: cannot stand beside --packed-samples: packed rows have"),
    ("--dummy-data internlm --reset-position-ids", "--reset-position-ids: cannot stand beside --packed-samples"),
    ("--dummy-data internlm --reset-attention-mask", "--reset-attention-mask: cannot stand beside --packed-samples"),
    ("--dummy-data internlm --eod-mask-loss", "--eod-mask-loss: cannot stand beside --packed-samples"),
    ("--dummy-data internlm --dataloader-type cyclic", "--dataloader-type cyclic: packed rows are shuffled"),
    ("--dummy-data internlm --pack-into-one --pad-samples", "--pack-into-one and --pad-samples: two ways"),
    ("--dummy-data internlm --min-sample-length -1", "--min-sample-length -1: must not be negative"),
    ("--dummy-data internlm --train-data-path x", "--train-data-path and --dummy-data: each names the data of the run"),
    ("--mock-data", "--mock-data: cannot stand beside --packed-samples: it is one long text"),
    ("--train-data-path 1 x 2 y", "--train-data-path 1: with --packed-samples each file is drawn from"),
])  # fmt: skip
def test_what_cannot_stand_beside_it(flags, problem):
    found = checked(f"{flags} --dry-run --world-size 1", base=PACKED)[0]
    assert len(found) == 1 and found[0].startswith(problem), found


def test_flags_of_packing_alone_have_no_effect():
    notes = checked("--pack-into-one --pad-samples --min-sample-length 5")[1]
    assert [line for line in notes if "no effect without --packed-samples" in line] == [
        f"{flag}: no effect without --packed-samples" for flag in ("--pack-into-one", "--pad-samples",
                                                                   "--min-sample-length 5")]  # fmt: skip


def test_made_up_samples_are_never_left_out():
    assert checked("--dummy-data internlm --min-sample-length 50", base=PACKED) == (
        [], ["--min-sample-length 50: no effect without files of data (--dummy-data has all its samples)"])


def test_folders_are_looked_at_before_the_start(tmp_path: Path):
    (tmp_path / "en").mkdir()
    flags = f"--tokenizer-type NullTokenizer --train-data-path {tmp_path}"
    assert checked(flags, base=PACKED)[0][0].startswith(f"--train-data-path: {tmp_path} holds no .bin; give a folder")
    (tmp_path / "en/a.bin").touch()
    assert checked(flags, base=PACKED)[0] == [f"--train-data-path: {tmp_path}/en/a.bin has no a.bin.meta beside it (nor an "
                                              ".idx); copy it too, or make both anew"]
    (tmp_path / "en/a.bin.meta").touch()
    assert checked(flags, base=PACKED)[0] == []
    assert checked(f"{flags}/en/a", base=PACKED)[0] == []
    assert "there is no" in checked(f"{flags}/en/b", base=PACKED)[0][0]
