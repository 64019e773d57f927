"""The tables of layouts show what --dry-run says today: python -m tests.plan_tables writes them."""

from __future__ import annotations

import pytest

from tests.plan_tables import PAGES, TABLE, filled


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_a_table_of_layouts_is_up_to_date(path):
    page = path.read_text(encoding="utf-8")
    assert len(TABLE.findall(page)) == 1 and filled(page) == page, __doc__
