"""Write the texts of the messages below the rows of cases.txt, the core's and those of features:
`python -m tests.rewrite_messages`, then review the diff."""

import contextlib
import tempfile
from pathlib import Path

from tests.core.config.checks import cases


def messages(file: Path) -> str:
    """A file of cases with the texts as the code has them now."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name).resolve()
        cases.lay_out(folder)
        lines = []
        for row, case in cases.rows(file):
            texts = case.lines() if case else []
            lines += [row, *(cases.TEXT + line.replace(str(folder), "FOLDER") for line in texts)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for each in cases.files():
        each.write_text(messages(each), encoding="utf-8")
