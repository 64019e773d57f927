"""Copies of the source, and Python in them, which does not see this checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.forkrun import ROOT

UNINSTALLED = ROOT / "tests" / "uninstalled"
PROGRAM = "import runpy, sys\nsys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
LINT = "from importlinter.cli import lint_imports\nlint_imports(cache_dir=None, no_logo=True)\n"


def copy_source(folder: Path, *names: str) -> Path:
    """A copy of these folders and files; returns `folder`."""
    useless = shutil.ignore_patterns("*.cpp")

    def skipped(parent: str, inside: list[str]) -> set[str]:
        package = {"core"} if Path(parent) == ROOT / "megatron" else set()  # another project's
        return {*useless(parent, inside), *package}

    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=skipped)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def python(tree: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program text in the tree, where it and the processes that it starts import the tree."""
    command = [sys.executable, "-c", text, *words]
    environ = {**os.environ, "PYTHONPATH": f"{tree}:{UNINSTALLED}"}
    return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)


def program(tree: Path, *words: str) -> str:
    """Run a program of the tree; what it has printed. Fails unless it exits with 0."""
    done = python(tree, PROGRAM, *words)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def lint_imports(tree: Path) -> str:
    """What import-linter reports of the tree."""
    return python(tree, LINT).stdout
