"""A program of tools/ or bench/ as a module, for tests that call its main()."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.forkrun import ROOT


def load_tool(name: str) -> ModuleType:
    """tools/`name`.py, loaded by path as its users run it, or `name`.py of another folder; of a
    room's program the module with its main()."""
    path = ROOT / ("" if "/" in name else "tools") / f"{name}.py"
    if module := room_program(path):
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(f"{name}_tool", path)
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


def room_program(path: Path) -> str:
    """The module that a file of tools/ starts, if it is one of a feature or an add-on."""
    match = re.search(r'room_program\.run\("([\w.]+)"', path.read_text("utf-8"))
    return match[1] if match else ""


def is_installed(path: Path) -> bool:
    """Whether the room is there that a file of tools/ starts a program of."""
    try:
        return not (module := room_program(path)) or bool(importlib.util.find_spec(module))
    except ModuleNotFoundError:
        return False


def programs() -> list[str]:
    """The programs of tools/ by name; of features and add-ons those that are installed."""
    return [path.stem for path in sorted((ROOT / "tools").glob("*.py")) if is_installed(path)]
