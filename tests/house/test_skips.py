"""The rule about skipped tests: a missing GPU or package, and where the peers are required only
what a GPU is for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin import PEERS, is_allowed

CONFTEST = Path(__file__).resolve().parents[1] / "plugin.py"
RUNS = "def test_runs():\n    assert True\n"
SKIPS = "import pytest\n\n\ndef test_skips():\n    pytest.skip({!r})\n\n\n" + RUNS
WHOLE_FILE = "import pytest\n\npytest.importorskip('no_such_peer')\n\n\n" + RUNS
UNMARKED = "import pytest\n\n\ndef test_it():\n    {}\n"
MARKED = UNMARKED.replace("def", "@pytest.mark.peers\ndef")
NEEDS_A_PEER = "pytest.importorskip('orjson')"


def run_pytest(folder: Path, text: str, *flags: str) -> tuple[int, str]:
    """Exit code and output of a pytest session over one test file under our conftest."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = peers\n")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder), *flags]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("reason", "here", "required"),
    [
        ("needs 2 GPUs", True, True),
        ("needs SLURM installed: no srun", True, True),
        ("needs a CPU with AVX512_BF16 and without AMX", True, True),
        ("needs root, to be another user", True, True),
        ("needs a C++ compiler", True, True),
        ("megatron.kernels.cpu.rows_v4 is not built (no module)", True, True),
        ("megatron.kernels.cpu.rows_v4 is of another version", False, False),
        ("could not import 'transformer_engine': No module named 'transformer_engine'", True, True),
        ("could not import 'megatron.core': No module named 'megatron.core'", True, False),
        ("could not import 'tiktoken': No module named 'tiktoken'", True, False),
        ("slow", False, False),
        ("a GPU would be nice", False, False),
    ],
)
def test_which_reasons_count(reason, here, required):
    assert is_allowed(reason, peers_required=False, marked=True) is here
    assert is_allowed(reason, peers_required=True, marked=True) is required


@pytest.mark.parametrize(
    ("library", "allowed"), [("megatron.core.utils", False), ("tiktoken", True), ("apex", True)]
)
def test_only_a_marked_test_may_lack_a_peer(library, allowed):
    reason = f"could not import '{library}': No module"
    assert is_allowed(reason, peers_required=False, marked=False) is allowed


def test_a_skip_needs_an_explanation(tmp_path):
    code, output = run_pytest(tmp_path, SKIPS.format("slow"))
    assert code == 1 and "test_it.py::test_skips: slow" in output, output
    code, output = run_pytest(tmp_path, SKIPS.format("needs a GPU"), "--require-peers")
    assert code == 0 and "ran 1 tests, skipped 1" in output, output


def test_a_file_that_skips_for_a_missing_package_fails_only_where_it_is_required(tmp_path):
    (tmp_path / "test_other.py").write_text(RUNS)
    assert run_pytest(tmp_path, WHOLE_FILE)[0] == 0
    code, output = run_pytest(tmp_path, WHOLE_FILE, "--require-peers")
    assert code == 1 and "skip not allowed here: test_it.py" in output, output


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        (MARKED.format(NEEDS_A_PEER), 0),
        (MARKED.format("assert True"), 1),
        (UNMARKED.format(NEEDS_A_PEER), 1),
    ],
)
def test_the_mark_is_for_tests_that_need_a_peer_and_for_all_of_these(
    text, exit_code, tmp_path, monkeypatch
):
    """On a machine without any peer, which a hook on imports makes of this one."""
    hook = tmp_path / "path" / "sitecustomize.py"
    hook.parent.mkdir()
    hook.write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n\nfind = PathFinder.find_spec\n\n\n"
        "class Bare:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        return None if name in {sorted(PEERS)} else find(name, path, target)\n\n\n"
        "sys.meta_path[:] = [Bare if one is PathFinder else one for one in sys.meta_path]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(hook.parent))
    code, output = run_pytest(tmp_path, text)
    assert code == exit_code, output
