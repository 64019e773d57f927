"""tools/completion.py: bash completes flags and their values by what it prints."""

import subprocess
import sys

import pytest

from megatron.addons.lab import completion
from tests.forkrun import ROOT
from tests.load_tool import exit_code
from tests.problems import codes_of

# What bash does when a word is completed: the function that `complete` has set, with the words.
ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/') "$1" "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.peers
def test_flags_and_values_are_completed(tmp_path):
    pytest.importorskip("shtab")
    words = [sys.executable, str(ROOT / "tools" / "completion.py"), "bash"]
    script = tmp_path / "completion.sh"
    script.write_bytes(subprocess.run(words, capture_output=True, check=True).stdout)

    def completed(*typed: str) -> list[str]:
        asked = ["bash", "-c", ASK, "bash", str(script), *typed]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()

    assert completed("megatron-pretrain", "--hidden-s") == ["--hidden-size"]
    assert completed("megatron-pretrain", "--lr-decay-style", "cos") == ["cosine"]
    assert "--lr" in completed("megatron-pretrain", "--lr")


def test_without_shtab(monkeypatch, capfd):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert exit_code(completion.main, "bash") == 2
    assert codes_of(capfd.readouterr().err.splitlines()) == ["package-missing"]
