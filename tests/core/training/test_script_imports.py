"""The table of docs/own_scripts.md of what Megatron's scripts import is true."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron import training
from tests.forkrun import ROOT

PAGE = (ROOT / "docs/own_scripts.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| \d+ \| (works|no) \| (.+) \|$", PAGE, re.M)
OF_TORCH = ("GPTModel",)  # a class of modules
WORKING = {name: write for name, here, write in ROWS if here == "works"}


def test_the_table_has_40_names():
    assert len({name for name, *_ in ROWS}) == len(ROWS) == 40 and len(WORKING) >= 7


@pytest.mark.parametrize("name", WORKING)
def test_an_import_that_works_does(name):
    line = re.match(r"`(from megatron\.\S+ import (\w+))`", WORKING[name])
    assert line[2] == name
    code = f"{line[1]}; import sys; assert {name}"
    if name not in OF_TORCH:
        code += " and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_others_are_not_there():
    assert not [name for name, here, _ in ROWS if here == "no" and hasattr(training, name)]
