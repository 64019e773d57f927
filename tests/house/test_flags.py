"""Adding, renaming or dropping a flag shows in docs/flags.md, on purpose: python
tools/write_flags_page.py writes it."""

from tests.load_tool import load_tool


def test_the_page_of_flags_is_up_to_date():
    module = load_tool("write_flags_page")
    assert module.page() == module.PAGE.read_text(encoding="utf-8"), __doc__
