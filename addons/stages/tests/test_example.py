"""examples/stages as it stands, on small data: three stages in one run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.runs import write_text

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.campaign
def test_the_example(tmp_path, warm_python):
    (tmp_path / "data").mkdir()
    for seed, name in enumerate(("web", "code", "books")):
        write_text(tmp_path / "data" / name, 200, seed)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [warm_python, str(ROOT / "pretrain_gpt.py"), "@examples/stages/cpu.args"]
        + ["--stages", "examples/stages/three.toml"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.findall(r"checkpoint of iteration (\d+) saved", done.stdout) == ["12", "24", "30"]
    assert len(re.findall(r"^ iter ", done.stdout, re.M)) == 30
