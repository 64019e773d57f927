"""--crash-loop-limit under torchrun."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.faults import inject
from bench.faults.inject import Fault
from megatron.addons.ops.goodput.run_events_file import NAME, attempts_of, failure_of, read_events
from tests.campaigns.e2e.launched import argv
from tests.campaigns.e2e.programs import spawn_program
from tests.runs import write_text


@pytest.mark.campaign
def test_a_crash_loop_ends(tmp_path):
    """A rank fails in the same iteration of each attempt: a restart is refused after two in a row
    that were reported as such. On a busy host torchrun may kill the other rank before it has done
    so, or that rank is told while it is an iteration behind, and reports that one."""
    write_text(tmp_path / "text", 260)
    inject.write(tmp_path, [Fault("SIGKILL", "step", 1, 3)] * 9)
    words = [
        *"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 6".split(),
        inject.__file__,
        *argv(14, "--save-interval", "100", "--run-events", "--crash-loop-limit", "2"),
    ]
    program = spawn_program(words, tmp_path)
    assert program.end(400) == 1
    assert "[crash-loop]" in program.err
    attempts = attempts_of(read_events(tmp_path / "save" / NAME))
    assert len(attempts) == len(inject.injected(tmp_path))
    failures = [failure_of(attempt) or {} for attempt in attempts]
    kinds = [
        None if failure.get("recovered", not failure) else (failure["iteration"], failure["rank"])
        for failure in failures
    ]
    alike = [before == after is not None for before, after in pairwise(kinds)]
    assert alike.index(True) == len(alike) - 1
