"""The data ledger, which the campaign of tests/campaigns/hostile damages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.addons.ops.data_ledger.writer import Ledger
from megatron.data.ledger import read_ledger
from tests.campaigns.hostile.campaign import Kind


def make_ledger(folder: Path) -> None:
    ledger = Ledger(str(folder / "ledger"), 32)
    for iteration in range(1, 6):
        ledger.record(iteration, 8 * iteration, 8, 12345 * iteration)
    ledger.skip(6, [48, 56, 64])


def read_a_ledger(folder: Path) -> Any:
    length, records = read_ledger(str(folder / "ledger"))
    Ledger(str(folder / "ledger"), length)
    return length, records.tolist()


KINDS = [Kind("data ledger", make_ledger, read_a_ledger, ("ledger",))]
