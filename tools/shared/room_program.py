"""A program of a feature or an add-on: a file of tools/ starts its module, or says that there is no
such folder."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from megatron import interrupt


def call(module: str, argv: Sequence[str]) -> int:
    """Run main of the module of this dotted name; its exit code, or 2 where its folder has been
    deleted."""
    if not _is_installed(module):
        folder = "/".join(module.split(".")[1:3])
        print(
            f"error: {folder}/ is not there, which has this program; install the suite with it "
            "[feature-not-installed]",
            file=sys.stderr,
        )
        return 2
    code: int = importlib.import_module(module).main(argv)
    return code


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def run(module: str) -> None:
    """Leave with the exit code of the program and the words of the command line."""
    interrupt.exit_at_once()
    sys.exit(interrupt.run(lambda argv: call(module, argv), sys.argv[1:]))
