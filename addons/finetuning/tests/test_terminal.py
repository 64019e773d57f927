"""tools/generate.py --chat."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkrun import ROOT
from tests.problems import assert_reported
from tests.runs import SMALL, train, with_flags, write_text

TOOL = ROOT / "tools" / "generate.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    flags = with_flags(SMALL, "--tokenizer-type", "ByteTokenizer", "--vocab-size", "257")
    flags = with_flags(flags, "--seq-length", "64", "--max-position-embeddings", "64")
    data = ["--data-path", write_text(folder / "text", 100), "--split", "1,0,0"]
    words = [*flags, *data, "--train-iters", "4", "--eval-iters", "0"]
    train(folder / "log", [*words, "--save", str(folder / "run")])
    return folder / "run"


def test_it_answers_each_line_of_stdin(run, warm_python):
    command = [warm_python, str(TOOL), str(run), "--chat", "--max-new-tokens", "5"]
    done = subprocess.run(command, input=b"Hello\n\nand you?\n", capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(b"\n> > > > \n") == 1  # two answers, an empty line, the end
    assert done.stdout.count(b"\n") >= 2


@pytest.mark.parametrize("other", ["1", "--prompt-file p.txt", "--json"])
def test_what_also_says_what_to_do_is_refused(run, other, tmp_path):
    (tmp_path / "p.txt").write_text("1\n")
    command = [sys.executable, str(TOOL), str(run), *other.split(), "--chat"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    named = other.split()[0] if other != "1" else "PROMPT"
    assert_reported(done.stderr, "flags-exclude-each-other", named, "--chat")
