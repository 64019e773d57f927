"""Tables in pages say what code and results say: python -m tests.written_tables writes them."""

import pytest

from tests.written_tables import PAGES, with_rows


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_a_table_is_up_to_date(path):
    page = path.read_text(encoding="utf-8")
    assert PAGES[path](page) == page, __doc__


def test_the_rows_of_one_table_are_replaced():
    page = "| a | b |\n|---|---|\n| 1 | 2 |\n\n| c |\n|---|\n| 3 |\n"
    assert with_rows(page, "a", [("4", "5")]) == page.replace("| 1 | 2 |", "| 4 | 5 |")
