"""tools/benchmarks/generate.py on a tiny model: each side is measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forkrun import ROOT
from tests.load_tool import load_tool
from tests.runs import SMALL, train

TOOL = ROOT / "tools" / "benchmarks" / "generate.py"


@pytest.mark.sweep
@pytest.mark.peers
def test_both_sides_generate_the_same_tokens(tmp_path):
    pytest.importorskip("transformers")
    argv = [*SMALL, "--mock-data", "--train-iters", "4", "--save", str(tmp_path / "run")]
    train(tmp_path / "log", [*argv, "--save-interval", "4"])
    words = ["hf-export", str(tmp_path / "run"), str(tmp_path / "hf")]
    assert load_tool("convert_checkpoint").main(words) == 0
    flags = ["--hf", str(tmp_path / "hf"), "--batch-sizes", "2", "--new-tokens", "8"]
    done = subprocess.run(
        [sys.executable, TOOL, tmp_path / "run", *flags, "--turns", "1", "--no-far"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "same tokens" in done.stdout and "median ratio" in done.stdout
    alone = subprocess.run([sys.executable, TOOL, tmp_path / "run"], capture_output=True, text=True)
    assert alone.returncode == 2
