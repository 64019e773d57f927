"""The scripts of examples/own_script/ train, resume bit for bit, and run on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint import store
from tests.runs import same_tensors

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "own_script"
FLAGS = (
    "@examples/quickstart/gpt.args --num-layers 1 --hidden-size 64 --seq-length 32 --device cpu "
    "--max-position-embeddings 32 --train-iters 8 --lr 1e-2 --lr-warmup-iters 1 --log-interval 1 "
    "--eval-interval 4 --eval-iters 1"
).split()
OWN = {
    "own_loss": "--mock-data --vocab-size 100 --entropy-coeff 0.1".split(),
    "own_dataset": "--tokenizer-type ByteTokenizer --texts docs --num-workers 1".split(),
    "own_model": "--mock-data --vocab-size 100".split(),
    "changed_layer": "--mock-data --vocab-size 100".split(),
}


def run(script: str, folder: Path, *flags: str, ranks: int = 1) -> tuple[list[dict], dict]:
    """All rows of the metrics file, without what differs from run to run, and the tensors of the
    last checkpoint."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    files = ["--save", folder / "save", "--load", folder / "save", "--metrics-file", folder / "m"]
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLE / f"{script}.py", *FLAGS, *OWN[script], *files, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    kept = ("iteration", "split", "lm_loss", "grad_norm", "entropy", "consumed_samples")
    rows = [json.loads(line) for line in (folder / "m").read_text().splitlines()]
    with store.load(folder / "save").reader() as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
    return [{key: row.get(key) for key in kept} for row in rows], tensors


@pytest.mark.campaign
@pytest.mark.parametrize("script", OWN)
def test_it_trains_resumes_and_runs_on_two_ranks(script, tmp_path):
    whole, tensors = run(script, tmp_path / "whole")
    steps = [row for row in whole if row["split"] is None]
    falls = 0.99 if script == "own_model" else 0.9  # its gradients are small at first
    assert len(steps) == 8 and steps[-1]["lm_loss"] < falls * steps[0]["lm_loss"]

    run(script, tmp_path / "resumed", "--exit-interval", "3")
    resumed, again = run(script, tmp_path / "resumed")
    assert resumed == whole
    same_tensors(tensors, again)

    for name, flags in {
        "data": ["--use-distributed-optimizer"],
        "tensor": ["--tensor-model-parallel-size", "2"],
    }.items():
        if (script, name) == ("own_model", "tensor"):  # refused: no layer of it is split
            continue
        rows, _ = run(script, tmp_path / name, *flags, ranks=2)
        # ranks draw other dropout masks
        tolerance = 0.05 if script == "own_model" else 1e-4
        for row, other in zip(rows, whole, strict=True):
            assert row["lm_loss"] == pytest.approx(other["lm_loss"], rel=tolerance)


@pytest.mark.campaign
def test_the_entropy_is_trained_on(tmp_path):
    weak, _ = run("own_loss", tmp_path / "weak", "--entropy-coeff", "0")
    strong, _ = run("own_loss", tmp_path / "strong", "--entropy-coeff", "0.9")
    assert weak[0]["lm_loss"] == strong[0]["lm_loss"]
    of_steps = [[row["entropy"] for row in rows if row["entropy"]] for rows in (weak, strong)]
    assert of_steps[0][0] == of_steps[1][0] and of_steps[1][-1] > of_steps[0][-1] + 0.02


@pytest.mark.parametrize("script", OWN)
def test_it_is_short(script):
    assert len((EXAMPLE / f"{script}.py").read_text().splitlines()) <= 60
