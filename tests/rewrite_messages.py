"""Write tests/golden/messages.txt, the texts of the messages: `python -m tests.rewrite_messages`,
then review the diff."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.core.config.checks import cases

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
HEADING = (
    "What is said of each command line of tests/core/config/checks/cases.txt. Written by python -m "
    "tests.rewrite_messages."
)


def messages() -> str:
    """The file's text as the code has it now."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        cases.lay_out(folder)
        os.chdir(folder)
        try:
            lines = [line.replace(str(folder), "FOLDER") for line in _command_lines()]
        finally:
            os.chdir(before)
    return "\n".join([HEADING, *lines]) + "\n"


def _command_lines() -> Iterator[str]:
    for case in cases.cases():
        yield f"\n$ {case}"
        yield from case.lines()


if __name__ == "__main__":
    GOLDEN.write_text(messages(), encoding="utf-8")
