"""tools/generate.py on a checkpoint of a short run: which one it takes, what it prints, and how it
says no."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.inference.load_model import open_trained_model
from tests.data.vocabularies import write_tiktoken
from tests.load_tool import exit_code, load_tool
from tests.runs import train, with_flags

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "generate.py"
TRAIN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --train-iters 4 --lr 1e-2 --save-interval "
    "2 --eval-iters 0 --mock-data --vocab-size 50 --device cpu --num-workers 0"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run directory with the iterations 2 and 4 of a model of numbers below 50."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder / "log", [*TRAIN, "--save", str(folder / "run")])
    return folder / "run"


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    return load_tool("generate")


@pytest.fixture
def talk(tool, capfd):
    """Call the tool as its command line would; returns (exit code, stdout, stderr)."""

    def call(*words: object) -> tuple[int, str, str]:
        code = exit_code(tool.main, *words)
        return code, *capfd.readouterr()

    return call


def test_it_continues_the_prompt_with_the_newest_checkpoint_from_any_folder(run, tmp_path):
    command = [
        sys.executable,
        str(TOOL),
        str(run),
        "1 2 3",
        "--max-new-tokens",
        "5",
        "--temperature",
        "0",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert (
        words[:3] == ["1", "2", "3"]
        and 4 <= len(words) <= 8
        and all(int(word) < 50 for word in words)
    )
    assert "iter_0000004 (iteration 4)" in done.stderr


def test_an_iteration_can_be_named_in_two_ways(run, talk):
    code, text, said = talk(run / "iter_0000002", "7", "--max-new-tokens", 3, "--seed", 5)
    assert code == 0 and "(iteration 2)" in said
    assert text == talk(run, "7", "--max-new-tokens", 3, "--seed", 5, "--ckpt-step", 2)[1]
    assert text != talk(run / "iter_0000002", "7", "--max-new-tokens", 3, "--seed", 6)[1]


def test_without_a_prompt_it_starts_a_document(run, talk):
    code, text, said = talk(run, "--max-new-tokens", 4)
    assert code == 0 and text.strip(), said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "1", "--ckpt-step", "3"], "complete here: 2, 4"),
        (["run", "one"], "'one'"),
        (["run", "50"], "'50'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(run, talk, monkeypatch, words, said):
    monkeypatch.chdir(run.parent)
    code, text, errors = talk(*words)
    assert (
        code == 1
        and text == ""
        and said in errors
        and errors.splitlines()[-1].startswith("error: ")
    )


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing"], ["CHECKPOINT: missing: no such directory"]),
        (["empty"], ["CHECKPOINT: empty: no checkpoint there"]),
        (
            ["run", "1", "--temperature", "-1", "--top-p", "0"],
            ["--temperature -1.0: must be", "--top-p 0.0: must be"],
        ),
        (["run", "1", "--max-new-tokens", "0"], ["--max-new-tokens 0: must be at least 1"]),
        (["run", "1", "--vocab-file", "none.json"], ["--vocab-file none.json: no such file"]),
        ([], ["CHECKPOINT is missing"]),
    ],
)
def test_a_wrong_command_line_is_refused_before_torch_is_loaded(run, words, said):
    (run.parent / "empty").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(TOOL), *words],
        cwd=run.parent,
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and len(lines) == len(said)
    for line, text in zip(lines, said, strict=True):
        assert line.startswith("error: ") and text in line


def test_the_vocabulary_is_that_of_the_training_flags(tmp_path, talk):
    """Settings of a tokenizer travel with the checkpoint; its file may lie elsewhere now."""
    pytest.importorskip("tiktoken")
    path = write_tiktoken(tmp_path / "v.json", [b"aB"])
    flags = [word if word != "50" else "265" for word in TRAIN] + [
        "--tokenizer-type",
        "TikTokenizer",
    ]
    flags += [
        "--tokenizer-model",
        path,
        "--tiktoken-num-special-tokens",
        "8",
        "--tiktoken-pattern",
        "v1",
    ]
    train(tmp_path / "log", [*flags, "--save", str(tmp_path / "run")])
    there = shutil.move(path, tmp_path / "moved.json")
    code, text, errors = talk(
        tmp_path / "run", "aBa", "--tokenizer-model", there, "--max-new-tokens", 2
    )
    assert code == 0 and text.startswith("aBa"), errors
    trained = open_trained_model(
        str(tmp_path / "run"), None, {"tokenizer_model": str(there)}, "cpu"
    )
    assert trained.tokenizer.tokenize("aBa") == [264, ord("a") + 8]


def test_bytes_are_tokenized_trained_and_generated_without_a_vocabulary_file(tmp_path, talk):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "to be or not to be, " * 20}) + "\n")
    command = [
        sys.executable,
        str(ROOT / "tools" / "preprocess_data.py"),
        "--input",
        str(tmp_path / "x.jsonl"),
        "--output-prefix",
        str(tmp_path / "x"),
        "--tokenizer-type",
        "ByteTokenizer",
        "--append-eod",
    ]
    subprocess.run([*command, "--workers", "1"], check=True, capture_output=True)
    assert IndexedDataset(str(tmp_path / "x_text_document"))[0].tolist()[-4:] == [*b"e, ", 256]
    flags = with_flags(
        [word for word in TRAIN if word != "--mock-data"],
        "--tokenizer-type",
        "ByteTokenizer",
        "--vocab-size",
        "257",
        "--data-path",
        str(tmp_path / "x_text_document"),
        "--split",
        "1",
    )
    train(tmp_path / "log", [*flags, "--save", str(tmp_path / "run")])
    code, text, errors = talk(tmp_path / "run", "to be", "--max-new-tokens", 4)
    assert code == 0 and text.startswith("to be"), errors


def test_a_changed_args_file_is_noticed(run, talk, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    args = tmp_path / "run" / "iter_0000004" / "args"
    args.write_text(args.read_text().replace("--vocab-size 50", "--vocab-size 51"))
    code, _, errors = talk(tmp_path / "run", "1")
    assert code == 1 and str(args) in errors


def test_a_character_waits_until_all_its_bytes_are_there(tool):
    text = "aé日🙂!"
    pieces = list(
        tool.readable(
            [ord("a")], text.encode()[1:], lambda ids: bytes(ids).decode(errors="replace")
        )
    )
    assert "".join(pieces) == text[1:] and all("\ufffd" not in piece for piece in pieces)
    torn = list(
        tool.readable([], text.encode()[:-2], lambda ids: bytes(ids).decode(errors="replace"))
    )
    assert "".join(torn) == "aé日\ufffd"
