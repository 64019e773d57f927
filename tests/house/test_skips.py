"""The rule about skipped tests: a missing GPU or package, and where the peers are required only
what a GPU is for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PEERS, is_allowed

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
RUNS = "def test_runs():\n    assert True\n"
SKIPS = "import pytest\n\n\ndef test_skips():\n    pytest.skip({reason!r})\n\n\n" + RUNS
WHOLE_FILE = "import pytest\n\npytest.importorskip('no_such_peer')\n\n\n" + RUNS


MARKED = "import pytest\n\n\n@pytest.mark.peers\ndef test_it():\n    {body}\n"


def run_pytest(folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """One pytest session over one test file under our conftest."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = peers\n")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
        *flags,
    ]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("reason", "here", "required"),
    [
        ("needs a GPU", True, True),
        ("needs 2 GPUs", True, True),
        ("needs SLURM installed: no srun", True, True),
        ("needs Chromium installed: no chromium", True, True),
        ("needs a CPU with AVX512", True, True),
        ("needs a CPU with AVX512_BF16 and without AMX", True, True),
        ("needs root, to be another user", True, True),
        ("needs a C++ compiler", True, True),
        ("megatron.kernels.cpu.rows_v4 is not built (no module)", True, True),
        ("megatron.kernels.cpu.rows_v4 is of another version", False, False),
        ("could not import 'transformer_engine': No module named 'transformer_engine'", True, True),
        ("could not import 'transformers': No module named 'transformers'", True, False),
        ("could not import 'megatron.core': No module named 'megatron.core'", True, False),
        ("could not import 'tiktoken': No module named 'tiktoken'", True, False),
        ("slow", False, False),
        ("a GPU would be nice", False, False),
        ("unconditional skip", False, False),
    ],
)
def test_which_reasons_count(reason, here, required):
    assert is_allowed(reason, peers_required=False, marked=True) is here
    assert is_allowed(reason, peers_required=True, marked=True) is required


def test_only_a_marked_test_may_lack_a_peer():
    for library, allowed in (
        ("transformers", False),
        ("megatron.core.utils", False),
        ("tiktoken", True),
        ("apex", True),
    ):
        assert (
            is_allowed(
                f"could not import '{library}': No module", peers_required=False, marked=False
            )
            is allowed
        )


def test_an_unexplained_skip_fails_the_session_anywhere(tmp_path):
    done = run_pytest(tmp_path, SKIPS.format(reason="slow"))
    assert done.returncode == 1, done.stdout
    assert "skip not allowed here: test_it.py::test_skips: slow" in done.stdout
    assert "ran 1 tests, skipped 1" in done.stdout


def test_a_missing_gpu_is_an_explanation(tmp_path):
    done = run_pytest(tmp_path, SKIPS.format(reason="needs a GPU"), "--require-peers")
    assert done.returncode == 0 and "ran 1 tests, skipped 1" in done.stdout, done.stdout


def test_a_file_that_skips_for_a_missing_package_fails_only_where_it_is_required(tmp_path):
    (tmp_path / "test_other.py").write_text(RUNS)
    assert run_pytest(tmp_path, WHOLE_FILE).returncode == 0
    done = run_pytest(tmp_path, WHOLE_FILE, "--require-peers")
    assert done.returncode == 1 and "skip not allowed here: test_it.py" in done.stdout, done.stdout


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without any peer, as the sessions of this test see it."""
    hook = tmp_path / "path" / "sitecustomize.py"
    hook.parent.mkdir()
    hook.write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n\nfind = "
        "PathFinder.find_spec\n\n\n"
        "class Bare:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        return None if name in {sorted(PEERS)} else find(name, path, target)\n\n\n"
        "sys.meta_path[:] = [Bare if one is PathFinder else one for one in sys.meta_path]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(hook.parent))


def test_the_mark_is_for_tests_that_need_a_peer_and_for_all_of_these(bare, tmp_path):
    done = run_pytest(tmp_path, MARKED.format(body="pytest.importorskip('orjson')"))
    assert done.returncode == 0 and "ran 0 tests, skipped 1" in done.stdout, done.stdout
    done = run_pytest(tmp_path, MARKED.format(body="assert True"))
    assert (
        done.returncode == 1 and "marked peers, but needs none: test_it.py::test_it" in done.stdout
    ), done.stdout
    done = run_pytest(
        tmp_path,
        MARKED.format(body="pytest.importorskip('orjson')").replace("@pytest.mark.peers\n", ""),
    )
    assert done.returncode == 1 and "(it lacks the mark peers)" in done.stdout, done.stdout
