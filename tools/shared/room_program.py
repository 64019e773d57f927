"""A program of a feature or an add-on: a file of tools/ starts its module, or says that there is no
such folder."""

import importlib
import sys
from collections.abc import Sequence

from megatron import interrupt


def call(module: str, argv: Sequence[str]) -> int:
    """Run main of the module of this dotted name; its exit code, or 2 where its folder, or that of
    another add-on that it needs, has been deleted."""
    try:
        code: int = importlib.import_module(module).main(argv)
        return code
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not missing.startswith("megatron.addons."):
            raise
        print(
            f"error: {'/'.join(missing.split('.')[1:3])}/ is not there, which this program needs; "
            "install the suite with it [feature-not-installed]",
            file=sys.stderr,
        )
        return 2


def run(module: str) -> None:
    """Leave with the exit code of the program and the words of the command line."""
    interrupt.exit_at_once()
    sys.exit(interrupt.run(lambda argv: call(module, argv), sys.argv[1:]))
