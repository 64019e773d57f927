"""The speedrun at its CPU size: the validation loss is reached, and the row of the table in
docs/benchmarks.md says so."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "speedrun"


def row_of(path: Path, target: float) -> tuple[list[str], bool]:
    spec = importlib.util.spec_from_file_location("row", FOLDER / "row.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    line, reached = module.row(path, "cpu", target, 0.5)
    return [cell.strip() for cell in line.strip("|").split("|")], reached


def test_a_row(tmp_path):
    steps = [
        {"elapsed_ms": 500.0, "consumed_tokens": 1000 * number, "tflops": 0.1} for number in (1, 2)
    ]
    last = {"split": "validation", "lm_loss": 4.5}
    text = "\n".join(map(json.dumps, [*steps, {**last, "lm_loss": 9.0}, last]))
    (tmp_path / "m").write_text(text)
    cells, reached = row_of(tmp_path / "m", 4.8)
    assert reached and cells[1:3] == ["1 s", "0.0 M"] and cells[4:] == ["2,000", "0.1", "20.0%"]
    assert not row_of(tmp_path / "m", 4.4)[1]


SHORT = "--train-iters 12 --lr-warmup-iters 2 --eval-interval 12 --eval-iters 2".split()


@pytest.mark.parametrize(
    ("words", "environ", "low", "target"),
    [
        pytest.param([], {}, 4.6, 4.8, id="the CPU size", marks=pytest.mark.sweep),
        pytest.param(
            [*SHORT, *"--micro-batch-size 2 --global-batch-size 8".split()],
            {"TEXT": str(ROOT / "docs"), "TARGET": "7.5"},
            *(4.6, 7.5),
            id="a few iterations",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_it_says_that_the_loss_is_reached(tmp_path, warm_python, words, environ, low, target):
    pytest.importorskip("tokenizers")
    done = subprocess.run(
        ["sh", str(FOLDER / "run.sh"), "cpu", *words],
        env={**os.environ, "PYTHON": warm_python, "SPEEDRUN_DIR": str(tmp_path), **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    cells = done.stdout.splitlines()[-1].split("|")
    assert low < float(cells[4].split()[0]) <= target
    assert not row_of(tmp_path / "metrics.jsonl", 4.0)[1]
