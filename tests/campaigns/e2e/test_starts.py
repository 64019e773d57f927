"""A rank, or torchrun, that dies while ranks import: within seconds every process has ended, and
the one that died is named. Real interpreters, for their imports are the matter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.campaigns.e2e.programs import SCRIPT, environment, free_port, ranks_of, session
from tests.forkrun import ROOT
from tests.runs import SMALL

WORDS = [*SMALL, "--mock-data", "--train-iters", "100000"]
ENDS_WITHIN = 15.0
# The ranks named in SLOW stand still where they import torch.
HOOK = """
import os, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and os.environ.get("RANK", "") in os.environ["SLOW"].split():
            open(f"slow.{os.environ['RANK']}", "w").close()
            time.sleep(600)

sys.meta_path.insert(0, Slow())
"""


class Started:
    """Two ranks, plainly or under torchrun."""

    def __init__(self, folder: Path, torchrun: bool, slow: str):
        (folder / "sitecustomize.py").write_text(HOOK)
        self.folder = folder
        port = str(free_port())
        common = {"PYTHONPATH": f"{folder}:{ROOT}", "SLOW": slow}
        if torchrun:
            words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
            self.programs = [self._start([*words, SCRIPT, *WORDS], common)]
        else:
            common |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.programs = [
                self._start([SCRIPT, *WORDS], {**common, "RANK": rank, "LOCAL_RANK": rank})
                for rank in "01"
            ]
        self._wait(lambda: all((folder / f"slow.{rank}").exists() for rank in slow.split()))
        self.ranks = (
            ranks_of(self.programs[0]) if torchrun else [program.pid for program in self.programs]
        )

    def _start(self, words: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder,
                env=environment(environ),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, done, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def all_end(self, seconds: float = ENDS_WITHIN) -> str:
        """Wait until nothing of it lives; what it printed."""
        leaders = {*(program.pid for program in self.programs), *self.ranks}

        def ended() -> bool:
            polled = [program.poll() is not None for program in self.programs]
            return all(polled) and not any(map(session, leaders))

        try:
            self._wait(ended, seconds)
        finally:
            for pid in [one for leader in leaders for one in session(leader)]:
                os.kill(pid, signal.SIGKILL)
        return (self.folder / "log").read_text()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("rank", "torchrun", "waits"),
    [(1, False, False), *((rank, run, True) for rank in (0, 1) for run in (False, True))],
)
def test_a_rank_that_is_killed(tmp_path, rank, torchrun, waits):
    started = Started(tmp_path, torchrun, str(rank) if waits else "0 1")
    time.sleep(8.0 if waits else 1.0)  # until the other is at the rendezvous
    os.kill(started.ranks[rank], signal.SIGKILL)
    text = started.all_end()
    pid = started.ranks[rank]
    assert re.search(rf"rank {rank} \(process {pid} on |exitcode  : -9 \(pid: {pid}\)", text), text


@pytest.mark.campaign
@pytest.mark.parametrize("slow", ["0 1", "1"], ids=["all import", "rank 0 waits"])
def test_torchrun_is_killed(tmp_path, slow):
    started = Started(tmp_path, True, slow)
    time.sleep(8.0 if slow == "1" else 1.0)
    started.programs[0].kill()
    assert "[launcher-killed]" in started.all_end()
