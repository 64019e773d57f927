"""The modules of Megatron-LM, whose names are those of `megatron.training`, and the end of a script
that imports what is not here."""

from __future__ import annotations

import importlib
import sys
import time
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from .module_names import MODULES


class _Alias(ModuleType):
    """A module of Megatron-LM: its names are those of `megatron.training`."""

    def __getattr__(self, name: str) -> Any:
        return attribute(self.__name__, name)


def attribute(module: str, name: str) -> Any:
    """What a module of Megatron-LM has of this name. Raises AttributeError, or ImportError for a
    script that imports what is not here."""
    if f"{module}.{name}" in MODULES and not name.startswith("_"):
        try:
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            pass
    if name == "__version__":
        return importlib.import_module(f"{__package__}.script_names").__version__
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron.training"), name)


class _Loader(Loader):
    """Makes an alias; of a file of the suite with such a name, that file with more names."""

    def __init__(self, own: ModuleSpec | None):
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if self._own and self._own.loader and self._own.origin:
            self._own.loader.exec_module(module)


def spec_of(name: str, folder: Path) -> ModuleSpec | None:
    """The spec of an alias, or of a neighbour of a script; None for what Python finds by itself.
    `folder`: megatron/ of the suite."""
    if "." not in name:
        neighbour = name != "megatron" and not PathFinder.find_spec(name)
        return ModuleSpec(name, _Loader(None)) if neighbour else None
    _, *folders, _ = name.split(".")
    own = None  # where both projects are in one folder, megatron/core is there
    if not name.startswith("megatron.core"):
        own = PathFinder.find_spec(name, [str(folder.joinpath(*folders))])
    spec = ModuleSpec(name, _Loader(own), is_package=not own)
    if own:
        spec.origin, spec.has_location = own.origin, own.has_location
        if own.submodule_search_locations is not None:
            spec.submodule_search_locations = list(own.submodule_search_locations)
    return spec


class NotHere(ImportError):
    """A script cannot start."""


def end(text: str) -> NoReturn:
    """Raise `NotHere`, of which the text alone is printed, once for all ranks."""
    sys.excepthook = _say_briefly
    raise NotHere(text)


def _say_briefly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, NotHere):
        sys.__excepthook__(kind, error, trace)
        return
    from megatron import launcher, log

    if launcher.rank() == 0:
        log.last_words(f"error: {error}\n")
    else:
        time.sleep(log.PEERS_WAIT)  # in which a launcher ends this process
