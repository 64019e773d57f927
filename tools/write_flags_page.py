#!/usr/bin/env python
"""Write docs/flags.md from the declarations of the flags, which stand in megatron/config and
megatron/features.

Run it after a flag changed; tests/house/test_flags.py fails while the page and the declarations
differ.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments import Flag, build_parser
from megatron.command_help import help_with_default
from megatron.config.megatron_compat.flags import (
    FOREIGN,
    MORE,
    NO_EFFECT,
    READ_AS,
    REFUSED,
    ForeignFlag,
    prefixes,
)
from megatron.features.registry import RunConfig
from tools.shared.program import read

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags of pretrain_gpt.py

Generated from the declarations in `megatron/config` and `megatron/features` by
`python tools/write_flags_page.py`; do not edit it. Flags may also be read from a file:
`pretrain_gpt.py @my.args --lr 1e-4` (shell quoting, `#` comments; the command line wins over the
file).
A flag that is in no table below is an error that names the nearest ones.
"""
HEADS = {
    NO_EFFECT: """
## Flags of Megatron-LM that are accepted without effect

The results are the same without them. A run lists those that were given in one paragraph at the
start.
""",
    MORE: """
## Flags of Megatron-LM that request less precision or memory than is used

They are accepted; the paragraph at the start of a run says what each costs, and `--dry-run` shows
the bytes.
""",
    READ_AS: """
## Flags of Megatron-LM that are read as others

Older spellings, and flags of its forks. A flag of the right column that is given itself wins.
""",
    REFUSED: """
## Flags of Megatron-LM that are refused

Ignoring them would train another model or lose data. The error says what to use.
""",
}


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


def foreign_rows(flags: Iterable[ForeignFlag]) -> list[str]:
    """A table of Megatron's flags that are not ours."""
    rows = ["", "| flag | |", "|---|---|"]
    return rows + [
        f"| {', '.join(f'`{s}`' for s in (flag.spelling, *flag.aliases))} | {cell(flag.reason)} |"
        for flag in sorted(flags, key=lambda f: f.spelling)
    ]


def page() -> str:
    """The whole page."""
    parser = build_parser(RunConfig, prog="pretrain_gpt.py", description="")
    lines = [HEAD.rstrip("\n")]
    for group, title in parser.sections.items():
        lines += ["", f"## {title.rstrip('.')}"] + own_rows(
            flag for flag in parser.flags if flag.group == group
        )
    for verdict, head in HEADS.items():
        lines += [
            head.rstrip("\n"),
            *foreign_rows(flag for flag in FOREIGN.values() if flag.verdict == verdict),
        ]
        lines += [
            f"| {', '.join(f'`{start}*`' for start in starts)} | {cell(text)} |"
            for which, starts, text in prefixes()
            if which == verdict
        ]
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
