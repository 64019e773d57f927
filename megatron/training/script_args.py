"""`get_args()`: all arguments of the run by Megatron's names, with those of the script itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


class Arguments(argparse.Namespace):
    """Arguments of the suite can be read, those of the script (`own`) be written too."""

    def __init__(self, values: Mapping[str, Any], own: Mapping[str, Any]):
        super().__init__(**own)
        vars(self).update(values)
        vars(self)["_fixed"] = frozenset(values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_fixed", ()):
            raise AttributeError(
                f"get_args().{name}: model and plan were made from it before; give it on the "
                "command line"
            )
        super().__setattr__(name, value)


_run: dict[str, Arguments] = {}  # of this process


def set_args(values: Mapping[str, Any], own: argparse.Namespace | None) -> None:
    """Make these the arguments of the run: the suite's `values`, and those of the script."""
    _run["args"] = Arguments(values, vars(own) if own else {})


def get_args() -> Arguments:
    """The arguments of the run. Raises RuntimeError before it has begun."""
    if "args" not in _run:
        raise RuntimeError("get_args(): there are no arguments before the run has begun")
    return _run["args"]
