"""A program of a feature: a file of tools/ starts a module of tools/features/NAME/ (program.py,
unless it has several), or says that the feature is not there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from megatron import interrupt


def call(name: str, argv: Sequence[str], module: str = "program") -> int:
    """Run the program of a feature; its exit code, or 2 where the feature has been deleted."""
    try:
        importlib.import_module(f"megatron.features.{name}.feature")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron.features"):
            raise
        print(
            f"error: the feature {name} is not installed: there is no "
            f"megatron/features/{name}/; install the suite with it [feature-not-installed]",
            file=sys.stderr,
        )
        return 2
    code: int = importlib.import_module(f"tools.features.{name}.{module}").main(argv)
    return code


def run(name: str, module: str = "program") -> None:
    """Leave with the exit code of the program and the words of the command line."""
    interrupt.exit_at_once()
    sys.exit(interrupt.run(lambda argv: call(name, argv, module), sys.argv[1:]))
