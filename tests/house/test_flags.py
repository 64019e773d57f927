"""The list of flags is frozen: adding, renaming or dropping one shows in flags.txt and in
docs/flags.md, on purpose.

To accept a change: python -m tests.house.test_flags && python tools/write_flags_page.py
"""

from __future__ import annotations

from pathlib import Path

from megatron.arguments import flags_of
from megatron.config.megatron_compat.flags import FOREIGN
from megatron.config.tree import Config
from tests.load_tool import load_tool

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).with_name("flags.txt")


def declared() -> str:
    """Every spelling with the verdict on it, one a line, sorted."""
    lines = [
        f"{spelling} supported" for flag in flags_of(Config).values() for spelling in flag.spellings
    ]
    lines += [
        f"{spelling} {flag.verdict}"
        for flag in FOREIGN.values()
        for spelling in (flag.spelling, *flag.aliases)
    ]
    return "\n".join(sorted(lines)) + "\n"


def test_the_list_of_flags_is_the_frozen_one():
    assert declared().splitlines() == FROZEN.read_text(encoding="utf-8").splitlines(), __doc__


def test_the_page_of_flags_is_up_to_date():
    module = load_tool("write_flags_page")
    assert module.page() == module.PAGE.read_text(encoding="utf-8"), __doc__


if __name__ == "__main__":
    FROZEN.write_text(declared(), encoding="utf-8")
