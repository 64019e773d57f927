"""The quickstart, every step of it, with a smaller model: it learns, is killed, resumes bit for bit
and generates."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 64 "
    "--max-position-embeddings 64 --train-iters 240 --save-interval 40 --eval-interval 60 "
    "--eval-iters 2 --lr-warmup-iters 2 --log-interval 20"
).split()
KILL = 110


def rows(folder: Path) -> list[dict]:
    """The rows of the iterations in a metrics file."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "split" not in line]


def resumed_at(trained: list[dict]) -> int:
    """The place of the first row after the resume."""
    steps = [row["iteration"] for row in trained]
    return next(place for place in range(1, len(steps)) if steps[place] <= steps[place - 1])


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> tuple[Path, str]:
    """Where a small quickstart left its files, and what it printed."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("quickstart")
    environ = {
        **os.environ,
        "PYTHON": sys.executable,
        "QUICKSTART_DIR": str(folder),
        "QUICKSTART_KILL": str(KILL),
    }
    command = ["sh", str(ROOT / "examples" / "quickstart" / "run.sh"), *SMALL]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, done.stdout


def check_learning(quickstart: tuple[Path, str]) -> None:
    """Validation falls, and bits per byte are those of the text."""
    folder, printed = quickstart
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line.get("split") == "validation"]
    said = json.loads((folder / "data" / "shakespeare_text_document.json").read_text())
    texts = [
        json.loads(line)["text"]
        for line in (folder / "data" / "shakespeare.jsonl").open(encoding="utf-8")
    ]
    assert said["text_bytes"] == sum(len(text.encode("utf-8")) for text in texts)
    for line in found:
        expected = line["lm_loss"] / math.log(2) * said["tokens"] / said["text_bytes"]
        assert line["bits_per_byte"] == pytest.approx(expected, rel=1e-9)
    assert found[-1]["iteration"] == 240 and found[-1]["bits_per_byte"] < found[0][
        "bits_per_byte"
    ] < math.log2(2048)
    assert f"byte {found[-1]['bits_per_byte']:.4f}" in printed.partition("== What next")[2]


def check_the_kill(quickstart: tuple[Path, str]) -> None:
    """The iterations since the last checkpoint are trained again."""
    folder, printed = quickstart
    trained = rows(folder)
    cut = resumed_at(trained)
    killed = trained[cut - 1]["iteration"]
    resumed = trained[cut]["iteration"]
    assert [row["iteration"] for row in trained] == [*range(1, killed + 1), *range(resumed, 241)]
    assert KILL <= killed < 240 and resumed % 40 == 1 and 0 < killed - resumed + 1 < 80
    assert (
        f"(kill -9) after iteration {killed}; " in printed
        and f" iteration {resumed - 1}\n" in printed
    )


def train(folder: Path, metrics: Path, *more: str) -> list[dict]:
    """The quickstart's training command on its data with other places to write to; the rows of its
    metrics file."""
    data = folder / "data"
    command = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        f"@{ROOT / 'examples' / 'quickstart' / 'muon.args'}",
    ]
    command += [
        "--data-path",
        str(data / "shakespeare_text_document"),
        "--vocab-file",
        str(data / "vocab.json"),
    ]
    command += [
        "--merge-file",
        str(data / "merges.txt"),
        "--metrics-file",
        str(metrics),
        *SMALL,
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return rows(metrics.parent)


def check_a_straight_run(quickstart: tuple[Path, str], tmp_path: Path) -> None:
    """The two parts are bit for bit one run."""
    straight = train(
        quickstart[0], tmp_path / "metrics.jsonl", "--save", str(tmp_path / "checkpoints")
    )
    by_iteration = {row["iteration"]: row for row in straight}
    assert len(by_iteration) == len(straight) == 240
    for row in rows(quickstart[0]):  # those that were trained twice, too
        same = by_iteration[row["iteration"]]
        assert all(
            row[key] == same[key]
            for key in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples")
        )


def check_what_it_shows(quickstart: tuple[Path, str]) -> None:
    """Samples on the way, a sample and a picture at the end, and what next."""
    folder, printed = quickstart
    before, _, ending = printed.partition("== What next")
    training, _, sample = before.partition("== 6. ")
    assert "\nROMEO" in training
    assert len(sample[sample.rindex("\nHAMLET") :]) > 50
    for word in ("checkpoints", "metrics.jsonl", "tensorboard", "torchrun", "iteration 240"):
        assert word in ending
    assert any((folder / "tensorboard").iterdir()) and not (folder / "training").exists()
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sweep
def test_it_learns_is_killed_and_resumes_bit_for_bit(quickstart, tmp_path):
    check_learning(quickstart)
    check_the_kill(quickstart)
    check_what_it_shows(quickstart)
    check_a_straight_run(quickstart, tmp_path)


STAND_IN = """#!/bin/sh
echo "$@" >>"$QUICKSTART_DIR/commands"
case $1 in -) exec "$REAL" "$@" ;; tools/fetch_quickstart_data.py) exit 1 ;; esac
"""


@pytest.mark.parametrize("given", [None, "my.jsonl"])
def test_without_a_network_the_text_is_the_clone_or_a_file_that_was_given(tmp_path, given):
    """With a Python that only notes what it is asked for, and whose download fails."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(stand_in), "REAL": sys.executable}
    environ |= {"QUICKSTART_DIR": str(tmp_path)} | ({"QUICKSTART_TEXT": given} if given else {})
    script = ROOT / "examples" / "quickstart" / "run.sh"
    subprocess.run(["sh", str(script)], env=environ, capture_output=True, timeout=60, check=True)
    commands = (tmp_path / "commands").read_text().splitlines()
    inputs = [line.split()[2] for line in commands if " --input " in line]
    made = tmp_path / "data" / "source.jsonl"
    assert inputs == [given or str(made)] * 2
    assert any("fetch" in line for line in commands) == (given is None)
    if given is None:
        texts = [json.loads(line)["text"] for line in made.read_text().splitlines()]
        assert sum(map(len, texts)) > 4_000_000
