"""The example of Lagent: a model trained to call a tool is served, and Lagent's agent answers with what
the tool says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.campaigns.documents import walk
from tests.forkrun import ROOT

FOLDER = ROOT / "examples" / "lagent"


@pytest.mark.peers
@pytest.mark.sweep
def test_the_agent_calls_the_tool_and_answers(tmp_path):
    for name in ("fastapi", "uvicorn", "tokenizers"):
        pytest.importorskip(name)
    pytest.importorskip("class_registry")  # which comes with Lagent
    for name, text in walk.STAND_INS.items():
        (tmp_path / name).write_text(text)
    environ = {"PYTHON": sys.executable, "LAGENT_DIR": str(tmp_path / "out")}
    done = subprocess.run(
        ["sh", str(FOLDER / "run.sh")],
        env={**os.environ, **environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    talks = done.stdout.partition("== 5. ")[2].split("question: ")[1:]
    assert len(talks) == 4 and "I am a small model with a tool." in talks[3]
    assert "tool call" not in talks[3]
    for item, talk in zip(("lemons", "clocks", "eggs"), talks[:3], strict=True):
        (called, told), *more = re.findall(r"tool call: Stock\((.*)\):  We have (\d+)", talk)
        assert called == str({"item": item}) and not more
        assert f"answer: We have {told} {item}." in talk


def test_without_lagent_it_says_what_to_install(tmp_path):
    for name in ("lagent.py", "requests.py"):
        (tmp_path / name).write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "agent.py"), "ask", "http://127.0.0.1:9"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "pip install lagent" in done.stderr
