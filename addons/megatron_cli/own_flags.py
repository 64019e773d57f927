"""The flags that a script of one's own adds, read from its text; nothing of it is executed."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron.arguments import Parser, is_flag
from megatron.small_files import read_text

from .read_script import GPT, Script

MAX_BYTES = 1 << 20  # of a script


def own_flags(script: Script, beside: Path, flags: Parser) -> tuple[list[str], list[str]]:
    """(spellings that the program of `script` adds to `flags`, notes). It is looked for here and in
    the directory of the launch script `beside`; of one that is not there, all unknown flags count.
    """
    path = Path(script.program)
    program = next((p for p in (path, beside.parent / path) if p.is_file()), None)
    if program is None and path.name != GPT:
        starts = [word.partition("=")[0] for word in script.words if is_flag(word)]
        spellings = [word for word in starts if not _is_known(word, flags)]
        note = f"; taken for its own flags: {' '.join(spellings)}" * bool(spellings)
        return spellings, [f"{script.program} is not here{note}"]
    spellings = _added(program) if program else []
    notes = []
    if path.name != GPT:
        notes = [f"what {script.program} imports: python tools/check_script.py {program}"]
    return [word for word in spellings if not _is_known(word, flags)], notes


def _is_known(spelling: str, flags: Parser) -> bool:
    """A flag here, or one of Megatron's."""
    foreign = flags.foreign_flags
    return bool(flags.find(spelling) or foreign.ignores(spelling) or foreign.explain(spelling))


def _added(path: Path) -> list[str]:
    """The flags in calls of `add_argument`; none of a text that is no Python."""
    try:
        tree = ast.parse(read_text(path, limit=MAX_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    spellings = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=args):
                words = (word.value for word in args if isinstance(word, ast.Constant))
                spellings += [word for word in words if isinstance(word, str) and is_flag(word)]
    return spellings


def adding(spellings: Collection[str], parser: argparse.ArgumentParser) -> None:
    """Add flags that take any number of values."""
    for number, spelling in enumerate(dict.fromkeys(spellings)):
        parser.add_argument(spelling, nargs="*", dest=f"_own_{number}")


def is_own(words: Sequence[str], spellings: Collection[str]) -> bool:
    """Is this flag, with its values, one of the script's own?"""
    return words[0].partition("=")[0] in spellings
