"""Names of Megatron-LM's modules for scripts that were written for it: an import finder, which is
asked before Python looks into folders.

It answers in a process whose main file imports `pretrain` from megatron.training, and this suite's
comes first on Python's path. For any other program `megatron.core` is PyPI's, where it is
installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from megatron.small_files import read_text

from .module_names import MODULES, NEIGHBOURS

MAX_BYTES = 1 << 20  # of a script
FOLDER = Path(sys.modules["megatron.addons"].__file__ or "").parents[1]  # megatron/


class Finder:
    """See above; for `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an alias; None for what Python finds by itself."""
        top = name.partition(".")[0]
        if not (top == "megatron" or top in NEIGHBOURS) or name == "megatron.training":
            return None
        if not (top in NEIGHBOURS or name in MODULES) or not is_of_a_script():
            return None
        from .aliases import spec_of

        return spec_of(name, FOLDER)


class Missing:
    """What no other finder knows, of a file that is a script: for the end of `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Raise ImportError with all that the script imports and is not here."""
        file = importing_frame().f_code.co_filename
        if file.startswith("<") or not (name.startswith("megatron.") or "." not in name):
            return
        main = getattr(sys.modules.get("__main__"), "__file__", None) or file
        if is_of_a_script() and Path(file).parent == Path(main).parent:
            importlib.import_module(f"{__package__}.script_imports").refuse(name)


def is_of_a_script() -> bool:
    """Whether the main file, or the one that imports just now, is a script of the suite."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    files = (main, importing_frame().f_code.co_filename)
    return any(_is_script(file) for file in files if file) and _is_ours()


def importing_frame() -> FrameType:
    """That of the import statement that is executed."""
    frame = sys._getframe(1)
    while frame.f_back and (
        frame.f_code.co_filename.startswith("<frozen importlib._bootstrap")
        or frame.f_globals.get("__name__") == "megatron.training"
        or frame.f_globals.get("__package__") == __package__
    ):
        frame = frame.f_back
    return frame


@functools.cache
def _is_script(file: str) -> bool:
    """Whether a Python file imports `pretrain` from megatron.training."""
    try:
        text = read_text(Path(file), limit=MAX_BYTES)
        tree = ast.parse(text) if "pretrain" in text and "megatron" in text else ast.parse("")
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return any(
        (node.module or "").startswith("megatron.training")
        and any(alias.name == "pretrain" for alias in node.names)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    )


def _is_ours() -> bool:
    """Whether megatron.training is this suite's."""
    spec = importlib.util.find_spec("megatron.training")
    return bool(spec and spec.origin and Path(spec.origin).parents[1] == FOLDER)


def install() -> None:
    """Ask `Finder` first from now on, and give `megatron` itself the names of Megatron-LM."""
    if Finder in sys.meta_path:
        return
    sys.meta_path.insert(0, Finder)
    sys.meta_path.append(Missing)

    def of_package(name: str) -> Any:
        is_ours = any((FOLDER / f"{name}{end}").exists() for end in ("", ".py"))
        if not (is_ours or name.startswith("__")) and is_of_a_script():
            from .aliases import attribute

            return attribute("megatron", name)
        raise AttributeError(f"module 'megatron' has no attribute {name!r}")

    vars(sys.modules["megatron"])["__getattr__"] = of_package
    other = getattr(sys.modules.get("megatron.core"), "__file__", None)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if other and main and Path(other) != FOLDER / "core.py" and _is_script(main):
        from .aliases import end

        end(
            f"{main} has imported {other}, which comes before this suite on Python's path; put the "
            f"suite first: PYTHONPATH={FOLDER.parent} [other-megatron]"
        )


install()
