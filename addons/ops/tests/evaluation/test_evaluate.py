"""tools/evaluate.py on a checkpoint: its numbers, its inputs and what it refuses."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch

from megatron.inference.load_model import open_trained_model
from tests.load_tool import exit_code, load_tool
from tests.runs import NO_DROPOUT, SMALL, train

TOOL = load_tool("evaluate")
TEXTS = ["Hello", "a second text, which is longer than one window of 32 tokens", "é"]
END = 256


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two tensor-parallel ranks on mock data."""
    folder = tmp_path_factory.mktemp("run")
    at = SMALL.index("--tokenizer-type")
    words = [*SMALL[:at], "--tokenizer-type", "ByteTokenizer", *SMALL[at + 4 :], *NO_DROPOUT]
    words += "--mock-data --train-iters 4 --save-interval 4 --eval-iters 0".split()
    words += "--tensor-model-parallel-size 2".split()
    train(folder / "log", [*words, "--save", str(folder / "run")], 2)
    return folder / "run"


def ask(capsys, *words: object) -> dict:
    assert exit_code(TOOL.main, *words, "--json", "--device", "cpu") == 0
    return json.loads(capsys.readouterr().out)


def by_hand(model, texts: list[str]) -> list[list[float]]:
    """Losses of the tokens of each text in windows of 32 tokens without overlap."""
    found = []
    for text in texts:
        ids = [END, *text.encode()]
        losses = []
        for place in range(1, len(ids)):
            first = 0 if place <= 32 else len(ids) - 1 - 32  # the last window is full, too
            with torch.no_grad():
                logits = model(torch.tensor([ids[first:place]]))[0, -1].double()
            losses.append(float(torch.logsumexp(logits, 0) - logits[ids[place]]))
        found.append(losses)
    return found


def test_perplexity_and_bits_per_byte(run, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    found = ask(capsys, run, tmp_path / "a.jsonl")
    losses = by_hand(open_trained_model(str(run), device="cpu").model, TEXTS)
    tokens = sum(map(len, losses))
    nats = math.fsum(map(math.fsum, losses))
    assert (found["documents"], found["tokens"], found["text_bytes"]) == (3, tokens, tokens)
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / tokens, rel=1e-5)
    for one, mine in zip(found["per_document"], losses, strict=True):
        assert one["loss"] == pytest.approx(math.fsum(mine) / len(mine), rel=1e-5)


def test_inputs_windows_and_documents(run, tmp_path, capsys):
    lines = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt").write_text("\n".join(TEXTS))
    packed = ask(capsys, run, tmp_path / "b.jsonl.gz", "--json-keys", "body")
    plain = ask(capsys, run, tmp_path / "c.txt", "--txt-lines", "--micro-batch-size", 1)
    assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    one = ask(capsys, run, tmp_path / "c.txt")
    assert one["documents"] == 1 and one["tokens"] == plain["tokens"] + 2
    first = ask(capsys, run, tmp_path / "c.txt", "--txt-lines", "--max-documents", 1)
    assert first["per_document"] == [pytest.approx(plain["per_document"][0])]
    joined = ask(capsys, run, tmp_path / "c.txt", "--txt-lines", "--join-documents")
    assert joined["tokens"] == plain["tokens"] + 3 and "per_document" not in joined
    strided = ask(capsys, run, tmp_path / "c.txt", "--stride", 8, "--seq-length", 16)
    assert (strided["seq_length"], strided["stride"]) == (16, 8)
    assert strided["loss"] != one["loss"]
    assert exit_code(TOOL.main, run, tmp_path / "c.txt", "--device", "cpu") == 0
    assert f"byte {one['bits_per_byte']:.6f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["no_run", "c.txt"], 2, "CHECKPOINT: no_run: "),
        (["run", "no.txt"], 2, "FILE: no.txt: "),
        (["run", "c.txt", "--stride", "0"], 2, "--stride 0: "),
        (["run", "c.txt", "--stride", "33"], 1, "--stride 33: "),
        (["run", "c.txt", "--seq-length", "64"], 1, "--seq-length 64: "),
        (["run", "empty.jsonl"], 1, "empty.jsonl: "),
        (["run", "bad.jsonl"], 1, "bad.jsonl, line 1: "),
        (["run", "c.txt", "--ckpt-step", "7"], 1, "complete here: 4"),
    ],
)
def test_what_cannot_be_done(run, tmp_path, capsys, monkeypatch, words, code, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(run)
    (tmp_path / "c.txt").write_text("some text")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "bad.jsonl").write_text('{"body": 3}\n')
    assert exit_code(TOOL.main, *words) == code
    errors = capsys.readouterr().err
    assert what in errors and "Traceback" not in errors
