"""examples/policy_gradient.py, as docs/engine.md starts it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.forkrun import ROOT

SCRIPT = ROOT / "examples" / "policy_gradient.py"


@pytest.mark.peers
@pytest.mark.campaign
def test_answers_become_better():
    """The reward of a model that knows nothing is 1/4; what is sampled is of streamed weights."""
    pytest.importorskip("transformers")
    assert len(SCRIPT.read_text().splitlines()) <= 80
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(x) for x in re.findall(r"^step \d+ reward ([\d.]+)", done.stdout, re.M)]
    assert len(rewards) == 20 and 0.15 < rewards[0] < 0.35 and min(rewards[-3:]) > 0.6
