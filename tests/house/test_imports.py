"""Imports keep the contracts of .importlinter and run in no circle; a planted violation of each rule
of .importlinter and .ruff.toml is seen."""

from __future__ import annotations

import graphlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import grimp
import pytest

from tests.forkrun import ROOT

# Without site, which would put this checkout into the namespace megatron of a copy, too.
LINT = """
import os, sys
sys.path += [os.getcwd(), sys.argv.pop()]
from importlinter.cli import lint_imports
sys.exit(lint_imports(cache_dir=None, no_logo=True))
"""
CONTRACTS = {  # a file, and an import that breaks the contract
    "lower layers": ("megatron/data/request.py", "def f():\n    import megatron.training.loop"),
    "nothing of tools/": ("megatron/training/loop.py", "from tools.convert import links"),
    "without torch": ("megatron/config/tree.py", "from megatron.checksums import x\nimport torch"),
    "in one place": ("megatron/analysis/goodput.py", "import matplotlib.figure"),
}
PROBES = {  # what ruff reports of a file of megatron/
    "def f():\n    from torch import cuda": "TID251",
    "import torch\n\ntorch.backends.cudnn.benchmark = True": "TID251",
    "import torch.distributed as dist": "TID251",
    "import torch\n\nX = torch.load('x', weights_only=True)": "TID251",
    "from pickle import loads": "TID251",
    "import json\n\nX = json.load(open('x'))": "TID251",
    "X = eval('1')": "S307",
    "from . import gpt": "TID252",
    "X = 1\n\n\ndef f():\n    global X\n    X = 2": "PLW0603",
}


def lint_imports(root: Path) -> str:
    """What import-linter reports of the tree in `root`."""
    words = [sys.executable, "-S", "-c", LINT, sysconfig.get_path("purelib")]
    return subprocess.run(words, cwd=root, capture_output=True, text=True).stdout


def test_the_contracts_are_kept() -> None:
    report = lint_imports(ROOT)
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in report, report


def test_a_broken_contract_is_seen(tmp_path: Path) -> None:
    only_sources = shutil.ignore_patterns("core", "*.so", "*.cpp", "*.json", "__pycache__")
    for folder in ("megatron", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=only_sources)
    shutil.copy(ROOT / ".importlinter", tmp_path)
    for file, text in CONTRACTS.values():
        with open(tmp_path / file, "a") as opened:
            opened.write(f"\n{text}\n")
    (tmp_path / "megatron" / "attic").mkdir()
    (tmp_path / "megatron" / "attic" / "x.py").touch()
    report = lint_imports(tmp_path)
    assert "attic" in report, "a folder that no layer names"
    broken = [line for line in report.splitlines() if "BROKEN" in line]
    for contract in CONTRACTS:
        assert any(contract in line for line in broken), report


@pytest.mark.parametrize(("text", "code"), PROBES.items())
def test_ruff_sees_what_is_banned(text: str, code: str) -> None:
    words = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"]
    words += ["--stdin-filename", "megatron/model/probe.py", "-"]
    done = subprocess.run(
        words, cwd=ROOT, input=f'"""X."""\n\n{text}\n', capture_output=True, text=True
    )
    assert f": {code} " in done.stdout, done.stdout


def test_no_modules_import_each_other() -> None:
    graph = grimp.build_graph(
        "megatron", "tools", cache_dir=None, exclude_type_checking_imports=True
    )
    ours = {name for name in graph.modules if not name.startswith("megatron.core")}
    order = graphlib.TopologicalSorter(
        {name: graph.find_modules_directly_imported_by(name) - {name} for name in ours}
    )
    order.prepare()  # raises CycleError


def test_the_namespace_is_shared_with_megatron_core() -> None:
    """An __init__.py in megatron/ would hide megatron.core of PyPI's megatron-core."""
    files = (ROOT / "megatron").rglob("__init__.py")
    assert [file for file in files if "core" not in file.relative_to(ROOT).parts] == []
