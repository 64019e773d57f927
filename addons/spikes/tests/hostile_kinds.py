"""What of the search for spikes the campaign of tests/campaigns/hostile damages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.addons.spikes import program
from tests.campaigns.hostile.campaign import Kind, run_tool
from tests.campaigns.hostile.kinds import make_logs


def read_spikes(folder: Path) -> Any:
    names = ("x.log", "metrics.jsonl")
    return [run_tool(program.main, "analyze", folder / name, good=(0, 10)) for name in names]


KINDS = [
    Kind("logs, metrics for spikes.py", make_logs, read_spikes, ("x.log", "metrics.jsonl"), cost=4)
]
