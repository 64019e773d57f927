"""The chat example on a base model of a few iterations: it trains on answers alone, learns them, and
answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.addons.finetuning.messages import conversation_of
from tests.load_tool import exit_code, load_tool
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

ROOT = Path(__file__).resolve().parents[3]
CHATS = ROOT / "examples" / "chat" / "conversations.jsonl"


def conversations() -> list[list[dict]]:
    return [conversation_of(json.loads(line)) for line in CHATS.read_text().splitlines()]


def example(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "examples" / "chat" / "run.sh"), *words],
        env={**os.environ, "PYTHON": sys.executable, **environ},
        capture_output=True,
        text=True,
        timeout=170,
    )


def test_the_conversations_are_whole():
    found = conversations()
    assert len(found) > 100
    for messages in found:
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles


def test_without_the_quickstart_it_says_what_to_run(tmp_path):
    done = example(QUICKSTART_DIR=str(tmp_path / "none"), CHAT_DIR=str(tmp_path))
    assert done.returncode == 2 and "examples/quickstart/run.sh" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """What the quickstart leaves, in small: data/vocab.json, data/merges.txt, checkpoints."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("base")
    text = folder / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": message["content"]}) + "\n"
            for messages in conversations()
            for message in messages
        )
    )
    words = ["--input", text, "--vocab-size", 450, "--output-dir", folder / "data"]
    assert exit_code(load_tool("train_tokenizer").main, *words) == 0
    tokenizer = [
        *"--tokenizer-type GPT2BPETokenizer --vocab-file".split(),
        str(folder / "data" / "vocab.json"),
        "--merge-file",
        str(folder / "data" / "merges.txt"),
    ]
    words = ["--input", text, "--output-prefix", folder / "x", "--append-eod", *tokenizer]
    assert exit_code(load_tool("preprocess_data").main, *words) == 0
    at = SMALL.index("--tokenizer-type")
    flags = with_flags(
        [*SMALL[:at], *SMALL[at + 4 :], *NO_DROPOUT, *tokenizer],
        *"--seq-length 128 --max-position-embeddings 128 --hidden-size 64".split(),
    )
    flags += f"--data-path {folder / 'x_text_document'} --split 100,0,0 --eval-iters 0".split()
    flags += f"--train-iters 4 --save {folder / 'checkpoints'} --save-interval 4".split()
    train(folder / "log", flags)
    return folder


@pytest.mark.campaign
def test_it_learns_to_answer(base, tmp_path, warm_python):
    flags = "--train-iters 150 --save-interval 150 --lr 5e-3 --micro-batch-size 8".split()
    flags += "--global-batch-size 16 --log-format short".split()
    places = {"QUICKSTART_DIR": str(base), "CHAT_DIR": str(tmp_path / "out")}
    done = example(*flags, PYTHON=warm_python, **places)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "[[Hamlet is a tragedy.<|endoftext|>]]" in done.stdout
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["lm_loss"] for line in lines]
    assert losses[-1] < 0.3 * losses[0]
    answer = done.stdout.partition("== 4. ")[2].partition("== What next")[0]
    assert "Hamlet is a " in answer
