"""Writes docs/flags.md from the flags' declarations (`--check` only compares); knows no flag itself."""
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.arguments import Flag, flags_of  # noqa: E402
from megatron.config import check, command_line, megatron_flags  # noqa: E402
from megatron.config.megatron_flags import NO_EFFECT, REFUSED, ForeignFlag  # noqa: E402
from megatron.config.tree import Config  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
ERAS = {"2024": "Megatron-LM of January 2024", "newer": "Newer versions of Megatron-LM",
        "removed": "Removed ones, and those of forks, that old scripts still have"}
INTRODUCTION = """# Flags of pretrain_gpt.py

Made by `python tools/make_flag_docs.py` from the declarations in `megatron/config/`; do not edit.

- A value follows its flag, or is joined by `=`. A flag that is given twice has its last value, and that is said.
- `@FILE` reads flags from a file: the shell's quoting, `#` comments, any number of lines; typed flags win. Every
  checkpoint has such a file, `args`, so `pretrain_gpt.py @DIR/iter_0001000/args` repeats the run.
- Defaults < the checkpoint's (`--use-checkpoint-args`: the architecture) < `@FILE` < typed.
- All problems of a command line are printed at once, before anything is loaded, and the exit code is 2.
- `--dry-run --world-size N` prints what a command line means, and needs no data, checkpoint or launcher.
"""


def page() -> str:
    """The whole page."""
    sections = command_line.parser().sections
    parts = [INTRODUCTION]
    for group, title in sections.items():
        rows = [_row(flag) for flag in flags_of(Config).values() if flag.group == group]
        parts.append(_table(title.rstrip("."), ("flag", "default", "what it does"), rows))
    foreign = megatron_flags.FOREIGN.values()
    for verdict, title, column in (
            (NO_EFFECT, "Flags of Megatron-LM without effect", "no effect here, because"),
            (REFUSED, "Flags of Megatron-LM that are refused", "why, and what to use")):
        parts.append(f"## {title}\n\n" + (
            "They are accepted, and a line at the start says so: the numbers are those that were asked for.\n"
            if verdict == NO_EFFECT else
            "Ignoring them would train another model, or lose something that was asked for. Their defaults are "
            "accepted.\n"))
        for era, name in ERAS.items():
            rows = [_foreign_row(flag) for flag in foreign if (flag.verdict, flag.era) == (verdict, era)]
            parts.append(_table(name, ("flag", "default there", column), rows, level=3))
    return "\n".join(parts)


def _row(flag: Flag) -> tuple[str, ...]:
    spellings = ", ".join(f"`{spelling}`" for spelling in flag.spellings)
    default = "" if flag.kind in ("switch", "off") or flag.default in (None, "") else str(flag.default)
    later = " (not supported yet in this version: refused)" if flag.name in check.LATER else ""
    return " ".join(filter(None, [spellings, _escape(flag.metavar)])), _escape(default), _escape(flag.help) + later


def _foreign_row(flag: ForeignFlag) -> tuple[str, ...]:
    default = "" if flag.takes in ("switch", "off") or flag.default in (None, "") else str(flag.default)
    return f"`{flag.spelling}`", _escape(default), _escape(flag.text)


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]], level: int = 2) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join([f"{'#' * level} {title}", "", *(f"| {line} |" for line in lines), ""])


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(argv: list[str]) -> int:
    """Write the page, or with --check say whether it is up to date; returns the exit code."""
    if argv not in ([], ["--check"]):
        print("usage: make_flag_docs.py [--check]", file=sys.stderr)
        return 2
    text = page()
    if not argv:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"error: {PAGE} is not what the declarations say; run python tools/make_flag_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
