"""The page's table of tags is the one that a run writes by."""

import re

from megatron.features.boards.points import GROUPED
from tests.forkrun import ROOT


def test_the_page_has_all_tags_and_their_groups():
    page = (ROOT / "docs/features/boards.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]*)` \| `([^`]*)` \|$", page, re.M)
    assert {megatron: short for short, megatron in rows} == GROUPED
