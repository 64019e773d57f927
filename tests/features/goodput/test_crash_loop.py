"""--crash-loop-limit under torchrun."""

from __future__ import annotations

import pytest

from tests.campaigns.e2e.launched import argv
from tests.campaigns.e2e.programs import spawn_program
from tests.runs import write_text
from tools.benchmarks.faults import inject
from tools.benchmarks.faults.inject import Fault


@pytest.mark.campaign
def test_a_crash_loop_ends(tmp_path):
    """A rank fails in the same iteration of each attempt: restarts after the second are refused."""
    write_text(tmp_path / "text", 260)
    inject.write(tmp_path, [Fault("SIGKILL", "step", 1, 3)] * 9)
    words = [
        *"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3".split(),
        inject.__file__,
        *argv(14, "--save-interval", "100", "--crash-loop-limit", "2"),
    ]
    program = spawn_program(words, tmp_path)
    assert program.end(400) == 1
    assert "[crash-loop]" in program.err and len(inject.injected(tmp_path)) == 2
