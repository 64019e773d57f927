"""Write tests/golden/messages.txt, the texts of the messages, and those of features:
`python -m tests.rewrite_messages`, then review the diff."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.core.config.checks import cases
from tests.forkrun import ROOT

HEADING = "What is said of each command line of {}. Written by python -m tests.rewrite_messages."


def golden(file: Path) -> Path:
    """The file with the texts of a file of cases."""
    if file == cases.CORE:
        return ROOT / "tests" / "golden" / "messages.txt"
    return file.with_name("messages.txt")


def messages(file: Path) -> str:
    """The texts of the cases of `file` as the code has them now."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        cases.lay_out(folder)
        os.chdir(folder)
        try:
            lines = [line.replace(str(folder), "FOLDER") for line in _command_lines(file)]
        finally:
            os.chdir(before)
    heading = HEADING.format(file.relative_to(ROOT).as_posix())
    return "\n".join([heading, *lines]) + "\n"


def _command_lines(file: Path) -> Iterator[str]:
    for case in cases.cases(file):
        yield f"\n$ {case}"
        yield from case.lines()


if __name__ == "__main__":
    for each in cases.files():
        golden(each).write_text(messages(each), encoding="utf-8")
