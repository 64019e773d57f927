"""What the code at the end of a message means: --explain CODE, of every program.

codes.txt, and that of each feature and add-on, has a line for each: code, meaning, what to do.
"""

import difflib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron import addons, small_files
from megatron.problems import Problems, error_lines

FOLDER = Path(__file__).resolve().parent


class Code(NamedTuple):
    """A code's section, meaning and remedy."""

    section: str
    meaning: str
    remedy: str


def codes() -> dict[str, Code]:
    """All codes in the order of their files."""
    known: dict[str, Code] = {}
    rooms = (*sorted(FOLDER.glob("features/*/codes.txt")), *addons.files("codes.txt"))
    for file in (FOLDER / "codes.txt", *rooms):
        section = ""
        for line in small_files.read_text(file).splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line and not line.startswith("#"):
                code, meaning, remedy = line.split(" | ")
                known[code] = Code(section, meaning, remedy)
    return known


def explain(code: str) -> str:
    """What --explain prints for a code, with or without its brackets. Raises Problems if no message
    has it."""
    name = code.strip("[]")
    known = codes()
    if name not in known:
        close = difflib.get_close_matches(name, known, 3, 0.5)
        hint = (
            f"did you mean {' or '.join(close)}?" if close else "messages end with it in brackets"
        )
        raise Problems([f"--explain {code}: no message has this code; {hint} [code-unknown]"])
    entry = known[name]
    rows = [("meaning", entry.meaning), ("what to do", entry.remedy)]
    lines = [f"{name}: {entry.section}"]
    for head, text in rows:
        lines += textwrap.wrap(
            f"  {head:<12}{text.replace('`', '')}", 98, subsequent_indent=" " * 14
        )
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> int:
    """What a program does for --explain and the words after it; its exit code."""
    try:
        print(explain(" ".join(words)), end="", flush=True)
    except Problems as error:
        print(error_lines(error.lines), end="", file=sys.stderr)
        return 2
    return 0
