"""examples/gpu: what its page says of memory is the plan's, and its script trains, on CPUs and
small."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from tests.forkrun import ROOT
from tests.runs import plot

FOLDER = ROOT / "examples/gpu"
ROW = re.compile(r"^\| (?:`(\w+)` )?\|([ \d,]*)\| (\d) \| (\d+) \| ([\d.]+) GiB \|", re.M)
TINY = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 "
    "--num-query-groups 2 --ffn-hidden-size 128 --lr-warmup-iters 1 --eval-iters 0 "
    "--log-interval 1 --num-workers 0 --device cpu"
).split()


def rows() -> list[tuple[str, str, str, str, str]]:
    """Model, parameters, GPUs, micro-batches and GiB of each row of the page's table."""
    found = ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    filled = []
    for model, parameters, *rest in found:
        first = (model, parameters.strip()) if model else filled[-1][:2]
        filled.append((*first, *rest))
    return filled


@pytest.mark.parametrize("model, parameters, gpus, micro_batches, memory", rows())
def test_the_page_has_the_numbers_of_the_plan(
    model, parameters, gpus, micro_batches, memory, monkeypatch, capsys
):
    vocabulary = "50257" if model == "gpt_124m" else "32000"
    words = [f"@{FOLDER / model}.args", "--mock-data", "--vocab-size", vocabulary]
    plot().main([*words, "--device", "cuda", "--dry-run", "--world-size", gpus])
    plan = capsys.readouterr().out
    assert re.search(rf"^  0 .* {parameters} .* {memory}$", plan, re.M)
    assert re.search(rf" {gpus} ranks?\b", plan) and f"x accumulation {micro_batches}" in plan


def test_the_page_has_every_model_on_one_and_on_eight():
    models = {path.stem for path in FOLDER.glob("*.args")}
    assert {(row[0], row[2]) for row in rows()} == {(m, n) for m in models for n in "18"}


@pytest.mark.parametrize(
    "compiled",  # takes a minute
    [pytest.param(False, marks=pytest.mark.campaign), pytest.param(True, marks=pytest.mark.sweep)],
)
def test_the_script_trains(tmp_path, compiled):
    metrics = tmp_path / "metrics.jsonl"
    kept = {k: v for k, v in os.environ.items() if not k.endswith("_CACHE_DIR")}
    environ = {**kept, "NPROC": "1", "CACHE": str(tmp_path), "PYTHON": sys.executable}
    environ["TORCH_COMPILE_DISABLE"] = str(int(not compiled))
    command = ["sh", str(FOLDER / "run.sh"), "llama_1b", *TINY, "--metrics-file", str(metrics)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    losses = [json.loads(line)["lm_loss"] for line in metrics.read_text().splitlines()]
    assert losses == pytest.approx([math.log(128)] * 3, abs=0.1)
    assert not compiled or (tmp_path / "inductor").is_dir()
