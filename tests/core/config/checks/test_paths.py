"""What a command line says about data, tokenizer and files, and what of it is missing on this
machine."""

import json
from pathlib import Path

import pytest

from megatron.config import load_order
from megatron.config.checks import data_paths
from megatron.data.blend.blended_dataset import parse_blend
from megatron.data.blend.splits import parse_split
from tests.core.config.checks.checked_flags import BASE, checked
from tests.problems import assert_problem, codes_of


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two data sets (empty files), GPT-2's two files, text, and half a data
    set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for name in (
        "books_text_document.idx",
        "books_text_document.bin",
        "web_text_document.idx",
        "web_text_document.bin",
        "half.bin",
        "raw.jsonl",
    ):
        (tmp_path / "d" / name).touch()
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").touch()
    return tmp_path


REAL = BASE.replace(
    "--mock-data --vocab-size 100", "--vocab-file vocab.json --merge-file merges.txt"
)


def test_real_data_in_every_form(data: Path):
    (data / "blend.txt").write_text("0.3 d/books_text_document\n 0.7 d/web_text_document\n")
    (data / "splits.json").write_text(
        json.dumps(
            {"train": ["1", "d/books_text_document"], "valid": "d/web_text_document", "test": None}
        )
    )
    for flags in (
        "--data-path d/books_text_document",
        "--data-path 0.3 d/books_text_document 0.7 d/web_text_document",
        "--data-path d/books_text_document d/web_text_document",
        "--data-args-path blend.txt",
        "--per-split-data-args-path splits.json",
        "--data-path d/books_text_document --split 969,30,1",
        "--train-data-path d/books_text_document --valid-data-path 1 d/web_text_document",
    ):
        assert checked(flags, base=REAL) == ([], [])


def test_files_of_the_tokenizer(data: Path):
    flags = "--data-path d/web_text_document"
    problems, notes = checked(
        flags + " --tokenizer-type HuggingFaceTokenizer --tokenizer-model d", base=REAL
    )
    flags = [note.partition(":")[0] for note in notes]
    assert not problems and flags == ["--vocab-file vocab.json", "--merge-file merges.txt"]


def test_a_dry_run_only_notes_what_is_missing(data: Path):
    flags = (
        "--data-path d/none --dry-run --load /nowhere --ckpt-step 3 --save vocab.json "
        "--save-interval 1"
    )
    problems, notes = checked(flags, base=REAL.replace("vocab.json", "none.json"))
    assert not problems and len(notes) == 4
    assert codes_of(notes) == [
        "data-not-found",
        "tokenizer-file-missing",
        "checkpoint-directory-missing",
        "path-not-a-directory",
    ]
    assert codes_of(checked("--dry-run", base=REAL)[1]) == ["data-missing"]
    assert codes_of(
        checked("--dry-run --world-size 2 --split x --mock-data --vocab-size 9", base=REAL)[0]
    ) == ["split-malformed"]


def complete(run: Path, *iterations: int) -> None:
    for one in iterations:
        (run / f"iter_{one:07d}").mkdir(parents=True)
        (run / f"iter_{one:07d}" / "manifest.json").touch()


def test_checkpoints_that_are_there(data: Path):
    complete(data / "run", 10, 20)
    tracker = data / "run" / "latest_checkpointed_iteration.txt"
    assert load_order.newest("run") == Path("run/iter_0000020")
    tracker.write_text("10")
    assert load_order.newest("run") == Path("run/iter_0000010")
    assert load_order.newest("run", 20) == Path("run/iter_0000020")
    assert load_order.newest("run", 11) is None
    assert load_order.newest("run/iter_0000010") == Path("run/iter_0000010")
    tracker.write_text("30")
    assert load_order.newest("run") is None
    for damaged in ("release", "", "\x00"):  # as a load does
        tracker.write_text(damaged)
        assert load_order.newest("run") == Path("run/iter_0000020")
    tracker.write_text("20")
    assert checked("--load run --ckpt-step 10 --exit-on-missing-checkpoint") == ([], [])
    [line] = checked("--load run --ckpt-step 11")[0]
    assert_problem(line, "checkpoint-step-missing", "--ckpt-step 11", "10, 20")


@pytest.mark.parametrize(
    "flags",
    [
        "--save new",
        # as a first run leaves it that ended before its first checkpoint
        "--save begun --load begun",
        # a save was killed while it replaced the only checkpoint
        "--save replaced --load replaced",
    ],
)
def test_a_directory_without_a_checkpoint_that_a_run_begins_in(data: Path, flags):
    for name in ("run_events.jsonl", ".lock.000001", ".iter_0000002.tmp-0123abcd"):
        (data / "begun" / name).mkdir(parents=True)
    aside = data / "replaced" / ".iter_0000004.old-0123abcd"
    aside.mkdir(parents=True)
    (aside / "manifest.json").touch()
    (data / "replaced" / "latest_checkpointed_iteration.txt").write_text("4")
    assert checked(f"{flags} --save-interval 1")[0] == []


def test_the_parent_of_a_directory_to_write_may_be_missing(data: Path):
    assert checked("--save new/deep/run --save-interval 1") == ([], [])
    [line] = checked("--save merges.txt/run --save-interval 1")[0]
    assert_problem(line, "path-not-a-directory", "--save", f"{data}/merges.txt")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_a_directory_that_cannot_be_made_whatever_its_permissions_are(data: Path):
    [line] = checked("--save /proc/x --save-interval 1")[0]
    assert_problem(line, "path-not-writable", "--save", "/proc/x")


def test_bytes_need_no_file_and_have_their_own_number_of_ids(data: Path):
    base = BASE.replace(
        "--mock-data --vocab-size 100",
        "--data-path d/web_text_document --tokenizer-type ByteTokenizer",
    )
    assert checked("", base=base) == checked("--vocab-size 257", base=base) == ([], [])
    [line] = checked("--vocab-size 300", base=base)[0]
    assert_problem(line, "vocab-size-not-that-of-tokenizer", "--vocab-size 300", 257)


@pytest.mark.parametrize(
    "words",
    [
        "a",
        "a b",
        "a b c",
        "1 a",
        "1 a 2 b",
        "0.5 a .5 b",
        "1 a b 2",
        "a 1",
        "a 1 b 2",
        "-1 a",
        "0 a",
        "inf a",
        "nan a",
        "1e-3 a",
        "1 2",
        "1 2 3",
        "1",
        "a 1 2 b",
        "1 a 2 b 3",
        "epochs:2 a epochs:1 b",
        "epochs:2 a",
        "epochs:2 a 1 b",
        "1 a epochs:2 b",
        "epochs: a",
        "epochs:x a",
        "epochs:-1 a",
        "epochs:2",
        "epochs:2 a b",
    ],
)
def test_blends_are_accepted_as_the_data_folder_accepts_them(words):
    try:
        prefixes = list(parse_blend(words.split())[0])
    except ValueError:
        assert data_paths.blend_problem(words.split())
    else:
        assert data_paths.blend_problem(words.split()) is None
        assert list(data_paths.prefixes_in(words.split())) == prefixes


@pytest.mark.parametrize(
    "split",
    [
        "949,50,1",
        "969, 30, 1",
        "1",
        "8,2",
        "98/1/1",
        "0.5,0.5",
        "1 1 1",
        "1,2,3,4",
        "a",
        "-1,2,3",
        "0,0,0",
        "",
        "nan,1,1",
        "inf,1,1",
        "1,,1",
        "1e2,1,1",
    ],
)
def test_splits_are_accepted_as_the_data_folder_accepts_them(split):
    try:
        parse_split(split)
        expected = []
    except ValueError:
        expected = ["refused"]
    problems = checked(["--split", split])[0]
    assert bool(problems) == bool(expected), problems
