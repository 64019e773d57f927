"""The quickstart, every step of it, with a smaller model: it learns, stops, goes on where it stopped, and talks."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
    "--train-iters 30 --save-interval 5 --eval-interval 10 --eval-iters 2 --lr-warmup-iters 2 --log-interval 1"
).split()
FIRST = re.compile(r"^learned +validation loss ([\d.]+) before training, ([\d.]+) now$", re.M)


def rows(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "split" not in row]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> tuple[Path, str]:
    """Where a small quickstart left its files, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    environ = {**os.environ, "PYTHON": sys.executable, "QUICKSTART_DIR": str(folder), "QUICKSTART_STOP": "15"}
    command = ["sh", str(ROOT / "examples" / "quickstart" / "run.sh"), *SMALL]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, done.stdout


@pytest.mark.campaign
def test_it_learns_from_knowing_nothing(quickstart):
    before, after = map(float, FIRST.search(quickstart[1]).groups())
    assert abs(before - math.log(50257)) < 0.1
    assert after < before - 1.0


@pytest.mark.campaign
def test_every_iteration_runs_once_and_the_second_part_goes_on_where_the_first_stopped(quickstart):
    folder, printed = quickstart
    assert [row["iteration"] for row in rows(folder)] == list(range(1, 31))
    assert [row["consumed_samples"] for row in rows(folder)] == [2 * n for n in range(1, 31)]
    assert " stopped at iteration 15 " in printed and "resumed from iteration 15 " in printed
    assert "end of arguments" not in printed and (folder / "log.txt").read_text() in printed.replace("\n\n==", "==")


def train(folder: Path, metrics: Path, *more: str) -> list[dict]:
    """The quickstart's training command on its data with other places to write to; the rows of its metrics file."""
    data = folder / "data"
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), f"@{ROOT / 'examples' / 'quickstart' / 'gpt.args'}"]
    command += ["--data-path", str(data / "shakespeare_text_document"), "--vocab-file", str(data / "gpt2-vocab.json")]
    command += ["--merge-file", str(data / "gpt2-merges.txt"), "--metrics-file", str(metrics), *SMALL, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return rows(metrics.parent)


@pytest.mark.campaign
def test_the_two_parts_are_bit_for_bit_one_straight_run(quickstart, tmp_path):
    straight = train(quickstart[0], tmp_path / "metrics.jsonl", "--save", str(tmp_path / "checkpoints"))
    for key in ("lm_loss", "grad_norm", "learning_rate"):
        assert [row[key] for row in straight] == [row[key] for row in rows(quickstart[0])]


@pytest.mark.campaign
def test_training_on_works_as_it_says(quickstart, tmp_path):
    folder, printed = quickstart
    flags = ["--train-iters", "1000", "--override-opt_param-scheduler"]
    assert " ".join(flags) in printed
    flags[1] = "35"
    more = train(folder, tmp_path / "metrics.jsonl", "--load", str(folder / "checkpoints"), "--save",
                 str(tmp_path / "checkpoints"), *flags)
    assert [row["iteration"] for row in more] == [31, 32, 33, 34, 35]


@pytest.mark.campaign
def test_it_ends_with_a_sample_and_what_to_do_next(quickstart):
    folder, printed = quickstart
    sample, _, ending = printed.partition("== What now")
    assert len(sample[sample.rindex("\nROMEO") :]) > 50
    for word in ("checkpoints", "metrics.jsonl", "tensorboard", "torchrun", "iteration 30"):
        assert word in ending
    assert any((folder / "tensorboard").iterdir())


@pytest.mark.campaign
def test_a_step_that_fails_ends_it_with_its_exit_code(tmp_path, quickstart):
    environ = {**os.environ, "PYTHON": sys.executable, "QUICKSTART_DIR": str(quickstart[0])}
    command = ["sh", str(ROOT / "examples" / "quickstart" / "run.sh"), "--no-such-flag"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "unknown flag --no-such-flag" in done.stdout and "== 4." not in done.stdout
