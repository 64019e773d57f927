#!/usr/bin/env python
"""Write docs/flags.md from the declarations of the flags, which stand in megatron/config,
megatron/features and add-ons.

Run it after a flag changed; tests/house/test_flags.py fails while the page and the declarations
differ.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments import Flag
from megatron.command_help import help_with_default
from megatron.config import command_line
from megatron.features.registry import RunConfig
from tools.shared.program import read

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags of pretrain_gpt.py

Generated from the declarations in `megatron/config`, `megatron/features` and `addons` by
`python tools/write_flags_page.py`; do not edit it. Flags may also be read from a file:
`pretrain_gpt.py @my.args --lr 1e-4` (shell quoting, `#` comments; the command line wins over the
file). `--model NAME` stands for the flags of a published architecture: `pretrain_gpt.py --help
models` lists them, those that follow it win, and `--dry-run` prints what the name stands for.
A flag that is not below is an error that names the nearest ones.
"""


def cell(text: str) -> str:
    """Text that keeps to its table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def own_rows(flags: Iterable[Flag]) -> list[str]:
    """A table of supported flags."""
    rows = ["", "| flag | what it does |", "|---|---|"]
    for flag in flags:
        spelled = ", ".join(f"`{spelling}`" for spelling in flag.spellings)
        value = f" `{flag.metavar}`" if flag.metavar else ""
        rows.append(f"| {spelled}{cell(value)} | {cell(help_with_default(flag))} |")
    return rows


def foreign_rows(rows: Iterable[tuple[Sequence[str], str]]) -> list[str]:
    """A list of the flags of another program, an entry for each text."""
    by_text: dict[str, list[str]] = {}
    for spellings, text in rows:
        by_text.setdefault(text, []).extend(f"`{spelling}`" for spelling in spellings)
    return [""] + [
        f"- {cell(text)}: {', '.join(spelled)}" if text else ", ".join(spelled)
        for text, spelled in by_text.items()
    ]


def page() -> str:
    """The whole page."""
    parser = command_line.parser(RunConfig)
    lines = [HEAD.rstrip("\n")]
    for group, title in parser.sections.items():
        flags = [flag for flag in parser.flags if flag.group == group]
        if flags:
            lines += ["", f"## {title.rstrip('.')}", *own_rows(flags)]
    for head, rows in parser.foreign_flags.tables().items():
        lines += [head.rstrip("\n"), *foreign_rows(rows)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Options:
    """The command line: it takes nothing."""


def main(argv: Sequence[str]) -> int:
    """Write the page. Exit codes: 0 written, 1 it cannot be written, 2 a wrong command line."""
    read(Options, argv, prog="write_flags_page.py", description=__doc__ or "")
    try:
        PAGE.write_text(page(), encoding="utf-8")
    except OSError as error:
        print(f"error: {PAGE}: cannot be written ({error.strerror or error})", file=sys.stderr)
        return 1
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
