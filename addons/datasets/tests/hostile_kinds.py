"""Pairs that tools/inspect_data.py checks, damaged by tests/campaigns/hostile."""

from pathlib import Path
from typing import Any

from megatron.addons.datasets.inspect_data import check_pair
from tests.campaigns.hostile.campaign import Kind
from tests.campaigns.hostile.kinds import VOCAB, make_pair


def read_checked(folder: Path) -> dict[str, Any]:
    found = check_pair(str(folder / "d"), VOCAB, all_tokens=True)
    if "problem" in found:
        raise ValueError(found["problem"])
    return found


KINDS = [
    Kind("pair that is inspected", make_pair, read_checked, ("d.*",), checksummed=True),
]
