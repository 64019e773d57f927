"""The Makefile, the requirement lists and the installation: what the two commands of the README stand on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "sed", "test", "expand", "make", "rm", "touch", "env")


def make(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", *words], cwd=ROOT, env=clean | environ, capture_output=True, text=True)


def requirement_lines(name: str) -> dict[str, str]:
    """{package: the rest} of one list."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = [re.match(r"([\w.-]+)(\S*)", line.partition("#")[0].strip()) for line in lines]
    return {match[1]: match[2] for match in found if match}


def test_make_alone_lists_what_there_is():
    done = make()
    assert done.returncode == 0
    for target in ("help", "quickstart", "test", "test-peers", "test-ci", "test-all", "lint", "clean"):
        assert f"make {target} " in done.stdout


def test_an_old_python_is_refused_with_a_way_out(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make("install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0 and "is not Python 3.11 or newer; say which: make PYTHON=" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_every_direct_requirement_is_pinned_once_and_torch_within_the_supported_range():
    pins = requirement_lines("constraints")
    assert pins["torch"] == "==2.13.0" and requirement_lines("runtime")["torch"] == ">=2.11,<2.14"
    for name in ("runtime", "build", "dev", "peers"):
        for package, version in requirement_lines(name).items():
            assert package in pins or version.startswith("=="), f"{package} in {name}.txt has no tested version"
    assert all(version.startswith("==") for version in requirement_lines("files").values())


def ci(folder: Path, fails: str = "none") -> tuple[int, list[str]]:
    """Exit code of .ci/run in a copy of its own, and what it asked of a `make` that fails at the target `fails`."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    (folder / ".venv-ci").mkdir()
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"make": f'echo "$VENV $(ls -d .venv-ci 2>&-) $@" >>{folder}/asked; [ "$1" != {fails} ] || exit 5',
                       "apt-get": "exit 100"}.items():  # fmt: skip
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run([folder / ".ci" / "run"], env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"})
    return done.returncode, (folder / "asked").read_text().splitlines()


def test_ci_does_what_a_newcomer_does_and_then_the_rest(tmp_path):
    """In an environment of its own, without what an earlier run left there, and whether or not apt works."""
    targets = ["quickstart", "test", "peers", "lint test-peers", "test-ci"]
    assert ci(tmp_path) == (0, [f".venv-ci  {target}" for target in targets])


@pytest.mark.parametrize(("fails", "asked"), [("test", 2), ("peers", 3), ("test-ci", 5)])
def test_ci_ends_with_the_code_of_what_failed(fails, asked, tmp_path):
    code, found = ci(tmp_path, fails)
    assert code == 5 and len(found) == asked


def built_wheel(folder: Path, path: str) -> set[str]:
    """The files of a wheel built of a copy of the tree with `path` as PATH, beside a megatron/core that is not ours."""
    tree, out = folder / "tree", folder / "out"
    for name in ("requirements", "megatron"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", tree)
    (tree / "megatron" / "core").mkdir()
    (tree / "megatron" / "core" / "__init__.py").write_text('"""Another project\'s."""\n')
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--use-pep517"]
    environ = {**os.environ, "PATH": path}
    subprocess.run([*command, "-w", str(out), str(tree)], env=environ, check=True, capture_output=True, timeout=300)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


@pytest.mark.campaign
def test_it_installs_with_and_without_a_compiler(tmp_path):
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in TOOLS:
        (bare / tool).symlink_to(shutil.which(tool))
    for compiler, path in ((True, os.environ["PATH"]), (False, str(bare))):
        names = built_wheel(tmp_path / f"compiler_{compiler}", path)
        assert {"megatron/arguments.py", "megatron/config/tree.py", "megatron/data/index_helpers.py"} <= names
        assert not [name for name in names if name.startswith("megatron/core") or name.endswith("megatron/__init__.py")]
        for helper in ("helpers_cpp", "read_sums_cpp", "rows_v3", "rows_v4", "tiles_cpp"):
            assert any(helper in name for name in names) is compiler
