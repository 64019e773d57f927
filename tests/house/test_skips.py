"""The rule about skipped tests: a missing GPU or optional library, and in CI only what no such machine can have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import is_allowed

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
RUNS = "def test_runs():\n    assert True\n"
SKIPS = "import pytest\n\n\ndef test_skips():\n    pytest.skip({reason!r})\n\n\n" + RUNS
WHOLE_FILE = "import pytest\n\npytest.importorskip('no_such_peer')\n\n\n" + RUNS


def run_pytest(folder: Path, text: str, ci: bool) -> subprocess.CompletedProcess[str]:
    """One pytest session over one test file under our conftest."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environ = {**os.environ, "CI": "true" if ci else ""}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("reason", "here", "in_ci"),
    [
        ("needs a GPU", True, True),
        ("needs 2 GPUs", True, True),
        ("could not import 'transformer_engine': No module named 'transformer_engine'", True, True),
        ("could not import 'transformers': No module named 'transformers'", True, False),
        ("could not import 'megatron.core': No module named 'megatron.core'", True, False),
        ("slow", False, False),
        ("a GPU would be nice", False, False),
        ("unconditional skip", False, False),
    ],
)
def test_which_reasons_count(reason, here, in_ci):
    assert is_allowed(reason, in_ci=False) is here
    assert is_allowed(reason, in_ci=True) is in_ci


def test_an_unexplained_skip_fails_the_session_anywhere(tmp_path):
    done = run_pytest(tmp_path, SKIPS.format(reason="slow"), ci=False)
    assert done.returncode == 1, done.stdout
    assert "skip not allowed here: test_it.py::test_skips: slow" in done.stdout
    assert "ran 1 tests, skipped 1" in done.stdout


def test_a_missing_gpu_is_an_explanation(tmp_path):
    done = run_pytest(tmp_path, SKIPS.format(reason="needs a GPU"), ci=True)
    assert done.returncode == 0 and "ran 1 tests, skipped 1" in done.stdout, done.stdout


def test_a_file_that_skips_for_a_missing_peer_fails_only_in_ci(tmp_path):
    text = {"test_it.py": WHOLE_FILE, "test_other.py": RUNS}
    (tmp_path / "test_other.py").write_text(text["test_other.py"])
    assert run_pytest(tmp_path, WHOLE_FILE, ci=False).returncode == 0
    done = run_pytest(tmp_path, WHOLE_FILE, ci=True)
    assert done.returncode == 1 and "skip not allowed here: test_it.py" in done.stdout, done.stdout
