"""tools/benchmarks/serve.py on a tiny model: every answer is counted, and a wrong one is noticed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forkrun import ROOT
from tests.load_tool import load_tool
from tests.tools.server import trained_run

pytestmark = [pytest.mark.peers, pytest.mark.sweep]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    pytest.importorskip("httpx")
    return trained_run(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("flags", [[], ["--stream"]], ids=["whole", "streamed"])
def test_no_answer_is_wrong_or_lost(run, flags):
    words = "--clients 16 --seconds 1 --turns 1 --requests 96 --max-tokens 12".split()
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "benchmarks" / "serve.py", run, *words, *flags],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "median ratio" in done.stdout and " 0 wrong, 0 lost" in done.stdout


@pytest.mark.parametrize(("given", "found"), [("wrong", "wrong"), (OSError, "lost")])
def test_a_bad_answer_is_counted(monkeypatch, given, found):
    tool = load_tool("benchmarks/serve")
    load = tool.Load(None, 4, False)
    answers = [("right", 4)] * len(tool.PROMPTS) + [(given, 4), ("right", 4)]

    class Connection:
        def close(self):
            pass

    def ask(connection, prompt):
        answer = answers.pop(0)
        if answer[0] is OSError:
            raise OSError
        return answer

    monkeypatch.setattr(load, "_connect", Connection)
    monkeypatch.setattr(load, "_ask", ask)
    load.learn()
    tokens, _ = load.run(1, lambda number: number < 2)
    assert load.counts == {found: 1, "right": 1}
    assert tokens == (8 if found == "wrong" else 4)
