"""tools/draw_schedule.py: the timeline, the numbers beside it, and how it says no."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forkrun import ROOT
from tests.load_tool import exit_code, load_tool
from tests.problems import numbers

TOOL = ROOT / "tools" / "draw_schedule.py"
FOUR = ["--pipeline-model-parallel-size", "4"]


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    return load_tool("draw_schedule")


@pytest.fixture
def draw(tool, capsys):
    """Call the tool as its command line would; returns (exit code, stdout, stderr)."""

    def call(*words: object) -> tuple[int, str, str]:
        code = exit_code(tool.main, *words)
        return code, *capsys.readouterr()

    return call


def test_1f1b_from_any_folder_without_torch(tmp_path):
    code = (
        f"import runpy, sys; sys.argv = ['x', *{FOUR}, '--num-microbatches', '8']; "
        "sys.modules['torch'] = None\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *drawn, times, alive = done.stdout.splitlines()
    assert drawn == [
        "1F1B: 4 stages, 8 micro-batches",
        "stage 0|0 1 2 3 ............(0) 4 (1) 5 (2) 6 (3) 7 (4) ..(5) ..(6) ..(7) |",
        "stage 1|..0 1 2 ........(0) 3 (1) 4 (2) 5 (3) 6 (4) 7 (5) ..(6) ..(7) ....|",
        "stage 2|....0 1 ....(0) 2 (1) 3 (2) 4 (3) 5 (4) 6 (5) 7 (6) ..(7) ........|",
        "stage 3|......0 (0) 1 (1) 2 (2) 3 (3) 4 (4) 5 (5) 6 (6) 7 (7) ............|",
    ]
    assert numbers(times) == [33, 24, 37.5, 37.5] and numbers(alive) == [4, 3, 2, 1]


def test_interleaved(draw):
    code, text, _ = draw(
        *FOUR, "--num-virtual-stages-per-pipeline-rank", 2, "--num-microbatches", 8
    )
    lines = text.splitlines()
    assert code == 0 and lines[1].startswith("stage 0|0a 1a 2a 3a 0b 1b 2b 3b 4a 5a 6a ....")
    assert len({len(line) for line in lines[1:5]}) == 1
    times, alive = lines[5:]
    assert numbers(times) == [57, 48, 18.75, 18.75] and numbers(alive) == [11, 9, 7, 5]


def test_other_costs(draw):
    _, text, _ = draw(*FOUR, "--num-microbatches", 2, "--forward-time", 2, "--backward-time", 3)
    assert [25, 10, 150, 150] in [numbers(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--num-microbatches", "6", "--num-virtual-stages-per-pipeline-rank", "2"],
            "--pipeline-model-parallel-size 4",
        ),
        (["--num-microbatches", "0"], "--num-microbatches 0: "),
        (["--num-microbatches", "8", "--num-virtual-stages-per-pipeline-rank", "27"], "at most 26"),
        (
            ["--num-microbatches", "8", "--backward-time", "-1"],
            "--backward-time -1: ",
        ),
    ],
)
def test_a_wrong_command_line_is_one_message(draw, words, message):
    code, text, errors = draw(*FOUR, *words)
    assert (
        (code, text) == (2, "")
        and errors.startswith("error: ")
        and message in errors
        and errors.count("\n") == 1
    )


def test_one_stage(draw):
    code, text, _ = draw("--pipeline-model-parallel-size", 1, "--num-microbatches", 2)
    assert code == 0 and "stage 0|0 (0) 1 (1) |" in text and "bubble 0.00%" in text
    code, _, errors = draw(
        "--pipeline-model-parallel-size",
        1,
        "--num-microbatches",
        2,
        "--num-virtual-stages-per-pipeline-rank",
        2,
    )
    assert code == 2 and "--num-virtual-stages-per-pipeline-rank 2: " in errors
