"""The families of Hugging Face models that the table of verified exports has."""

from __future__ import annotations

from megatron.addons.convert.families import FAMILIES, VERIFIED
from megatron.small_files import read_json


def test_the_table_has_no_others():
    assert read_json(VERIFIED)["families"].keys() == FAMILIES.keys()
