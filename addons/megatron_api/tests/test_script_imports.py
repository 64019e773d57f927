"""The tables of megatron_api.md of what Megatron's scripts import are true."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron import training
from megatron.addons.megatron_api import script_imports
from tests.forkrun import ROOT

PAGE = (ROOT / "addons/megatron_api/megatron_api.md").read_text(encoding="utf-8")
WORKING, ABSENT = (
    re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?) \|", table, re.M)))
    for table in PAGE.partition("Of the 40 names")[2].split("The others are not here")
)
OF_TORCH = ("GPTModel",)  # a class of modules


def test_the_tables_have_40_names():
    assert len({*WORKING, *ABSENT}) == len(WORKING + ABSENT) == 40 and len(WORKING) >= 20


@pytest.mark.campaign
def test_an_import_that_works_does():
    """All in one process; those that need no torch come first, and none of them loads it."""
    lines = ["import sys"]
    for name in sorted(WORKING, key=OF_TORCH.__contains__):
        lines += [f"from megatron.training import {name}", f"assert {name}"]
        lines += ["assert 'torch' not in sys.modules"] if name not in OF_TORCH else []
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT)


def test_the_others_are_not_there():
    assert not [name for name in ABSENT if training.has(name)]
    assert {*ABSENT} <= {*script_imports.ABSENT}
