"""tools/benchmarks/moe.py on a tiny model: it runs and prints each side."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forkrun import ROOT

TOOL = ROOT / "tools" / "benchmarks" / "moe.py"


@pytest.mark.sweep
@pytest.mark.peers
def test_each_side_has_its_line():
    pytest.importorskip("transformers")
    argv = [sys.executable, TOOL, "--small", "--rounds", "1"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for side in ("ours", "transformers, eager", "transformers, grouped_mm", "GEMMs by themselves"):
        assert any(line.startswith(side) for line in done.stdout.splitlines()), done.stdout
