"""The example of experts on a small text: both runs, on two ranks, and their picture."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.load_tool import exit_code, load_tool

ROOT = Path(__file__).resolve().parents[3]
CHATS = ROOT / "examples" / "chat" / "conversations.jsonl"
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --log-interval 1 "
    "--max-position-embeddings 32 --train-iters 12 --eval-interval 6 --eval-iters 1 --lr 1e-2 "
    "--save-interval 12 --lr-warmup-iters 2"
).split()


def write_data(folder: Path) -> None:
    """The files of the quickstart's text, of another text."""
    text = folder / "text.jsonl"
    folder.mkdir(parents=True)
    messages = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    lines = [json.dumps({"text": one["content"]}) for talk in messages for one in talk]
    text.write_text("\n".join(lines) + "\n")
    words = ["--input", text, "--vocab-size", 300, "--output-dir", folder]
    assert exit_code(load_tool("train_tokenizer").main, *words) == 0
    files = ["--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt"]
    words = ["--input", text, "--output-prefix", folder / "shakespeare", "--append-eod"]
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", *files]
    assert exit_code(load_tool("preprocess_data").main, *words, *tokenizer) == 0


@pytest.mark.campaign
def test_both_models_are_trained_and_drawn(tmp_path, warm_python):
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    write_data(tmp_path / "data")
    done = subprocess.run(
        ["sh", str(ROOT / "examples" / "moe" / "run.sh"), *SMALL],
        env={**os.environ, "PYTHON": warm_python, "MOE_DIR": str(tmp_path), "NPROC": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "moe.png").read_bytes().startswith(b"\x89PNG")
    tables = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("dense", "moe")
    ]
    for rows in tables:
        steps = [row for row in rows if "split" not in row]
        assert len(steps) == 12 and steps[-1]["lm_loss"] < steps[0]["lm_loss"]
        last = [row for row in rows if row.get("split") == "validation"][-1]
        assert f"{last['lm_loss']:.4f}" in done.stdout.partition("== 4. ")[2]
    dense, moe = (rows[0] for rows in tables)
    assert moe["lm_loss"] != dense["lm_loss"]
    assert "moe/max_expert_load_layer_1" in moe and "max_expert_load" not in dense
