"""Imports keep the contracts of .importlinter and run in no circle; a planted violation of each rule
of .importlinter and .ruff.toml is seen."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tests.copies import copy_source, lint_imports
from tests.forkrun import ROOT

TOPS = ("megatron", "tools")
ROOMS = sorted(path.parent.name for path in ROOT.glob("megatron/features/*/feature.py"))
CONTRACTS = {  # a file, and an import that breaks the contract
    "lower layers": (
        "megatron/training/logging/flops.py",
        "def f():\n    import megatron.analysis.plots",
    ),
    "no other feature": (
        f"megatron/features/{ROOMS[0]}/feature.py",
        f"import megatron.features.{ROOMS[1]}.feature",
    ),
    "nothing of tools/": ("megatron/training/loop.py", "from tools.convert import links"),
    "without torch": ("megatron/config/tree.py", "from megatron.checksums import x\nimport torch"),
    "in one place": ("megatron/analysis/run_reader.py", "import matplotlib.figure"),
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


def test_the_contracts_are_kept() -> None:
    report = lint_imports(ROOT)
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in report, report


def test_a_broken_contract_is_seen(tmp_path: Path) -> None:
    copy_source(tmp_path, "megatron", "tools", ".importlinter")
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


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*TOPS, cache_dir=None)


def test_every_file_is_seen(graph: grimp.ImportGraph) -> None:
    """A folder in a package has to be one, too: grimp and import-linter pass over it otherwise."""
    files = [file.relative_to(ROOT) for top in TOPS for file in (ROOT / top).rglob("*.py")]
    names = {".".join(file.with_suffix("").parts) for file in files if file.parts[1] != "core"}
    assert {name.removesuffix(".__init__") for name in names} - graph.modules == set()


def test_no_modules_import_each_other(graph: grimp.ImportGraph) -> None:
    """Not even for types."""
    ours = {name for name in graph.modules if not name.startswith("megatron.core")}
    order = graphlib.TopologicalSorter(
        {name: graph.find_modules_directly_imported_by(name) - {name} for name in ours}
    )
    order.prepare()  # raises CycleError


def test_the_namespace_is_shared_with_megatron_core() -> None:
    """An __init__.py in megatron/ would hide megatron.core of PyPI's megatron-core. The one of
    training has the names that scripts import."""
    files = (file.relative_to(ROOT) for file in (ROOT / "megatron").rglob("__init__.py"))
    assert {file.parts[:2] for file in files} - {("megatron", "core")} == {("megatron", "training")}
