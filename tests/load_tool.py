"""A program of tools/ as a module, for tests that call its main()."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from types import ModuleType

from tests.forkrun import ROOT


def load_tool(name: str) -> ModuleType:
    """tools/`name`.py, loaded by path as its users run it."""
    spec = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their module
    spec.loader.exec_module(module)
    return module


def exit_code(main: Callable[[list[str]], int], *words: object) -> int:
    """What the process of a tool would end with."""
    try:
        return main([str(word) for word in words])
    except SystemExit as end:
        return end.code


def programs() -> list[str]:
    """The programs of tools/ by name; of features those that are installed."""
    found = []
    for path in sorted((ROOT / "tools").glob("*.py")):
        feature = re.search(r'feature_program\.run\("(\w+)"', path.read_text("utf-8"))
        if not feature or (ROOT / "megatron" / "features" / feature[1]).is_dir():
            found.append(path.stem)
    return found
