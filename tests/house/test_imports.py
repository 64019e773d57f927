"""Imports keep the contracts of .importlinter and run in no circle; a planted violation of each rule
of .importlinter and .ruff.toml is seen."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tests.copies import copy_source, lint_imports
from tests.forkrun import ROOT

TOPS = ("megatron", "addons", "tools")
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
    "no other one": ("addons/convert/links.py", "from ..internlm import config"),
    "nothing of tools/": ("megatron/training/loop.py", "from tools.shared import progress"),
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
    copy_source(tmp_path, "megatron", "addons", "tools", ".importlinter")
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
    assert len(names) > 400
    assert {name.removesuffix(".__init__") for name in names} - graph.modules == set()


def test_no_modules_import_each_other(graph: grimp.ImportGraph) -> None:
    """Not even for types."""
    ours = {name for name in graph.modules if not name.startswith("megatron.core")}
    order = graphlib.TopologicalSorter(
        {name: graph.find_modules_directly_imported_by(name) - {name} for name in ours}
    )
    order.prepare()  # raises CycleError


def add_ons_imported(text: str) -> list[str]:
    """The add-ons that a file outside of their folders imports."""
    names = []
    for node in ast.walk(ast.parse(text)) if "addons" in text else ():
        match node:
            case ast.Import(found):
                names += [name.name for name in found]
            case ast.ImportFrom(module=str(module), names=found):
                names += [f"{module}.{name.name}" for name in found]
    inside = {path.name for path in (ROOT / "addons").iterdir()}
    parts = [name.removeprefix("megatron.").split(".") for name in names]
    return [
        words[1] for words in parts if words[0] == "addons" and words[1:2] and words[1] in inside
    ]


def test_the_core_imports_no_add_on() -> None:
    """Its tests neither; .importlinter knows add-ons by their paths, not by the names of a run."""
    files = [ROOT / "pretrain_gpt.py"]
    for top in ("megatron", "tools", "tests/core", "tests/features", "tests/tools"):
        files += (ROOT / top).rglob("*.py")
    found = {file.relative_to(ROOT): add_ons_imported(file.read_text("utf-8")) for file in files}
    assert len(found) > 400 and {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from megatron.addons.convert.links import Shape",
        "from megatron.addons import convert",
        "import addons.convert.links",
    ],
)
def test_an_import_of_an_add_on_is_seen(text: str) -> None:
    assert add_ons_imported(text) == ["convert"]


def test_the_namespace_is_shared_with_megatron_core() -> None:
    """An __init__.py in megatron/ would hide megatron.core of PyPI's megatron-core, which core.py
    loads. The one of training has the names that scripts import."""
    files = (file.relative_to(ROOT) for file in (ROOT / "megatron").rglob("__init__.py"))
    ours = {("megatron", "addons"), ("megatron", "training")}
    assert {file.parts[:2] for file in files} - {("megatron", "core")} == ours
