"""The tables of docs/ of what a layout needs, from the command above each and its first column:

python -m tests.plan_tables    # writes them
"""

from __future__ import annotations

import re
import shlex

from megatron.config import command_line
from megatron.config.plan.costs import activations
from megatron.config.plan.plan import bytes_per_rank, make_plan
from megatron.config.plan.transfers import sent_by_axis
from megatron.features.registry import RunConfig
from tests.forkrun import ROOT

PAGES = (ROOT / "docs/parallelism.md", ROOT / "docs/moe.md")
COMMAND = r"^python pretrain_gpt\.py ((?:[^`\n]*\\\n)*[^`\n]*) LAYOUT\n```\n"
TABLE = re.compile(rf"({COMMAND}.*?^\|---[^\n]*\n)(.*?)(?=^\n)", re.M | re.S)
AXES = {"dp": "data", "tp": "tensor", "ep": "expert", "pp": "pipeline", "cp": "context"}


def figures(flags: list[str]) -> tuple[str, str, str]:
    """GiB of the fullest rank, those of its activations, and the GB that the busiest rank sends."""
    line = command_line.read(flags, {}, tree=RunConfig)
    plan = make_plan(line.config, line.world_size, line.config.data.vocab_size)
    stages = range(len(plan.layers_per_stage))
    kept = [activations(line.config, plan, stage).total for stage in stages]
    held = [kept[n] + sum(bytes_per_rank(line.config, plan, n).values()) for n in stages]
    fullest = max(stages, key=held.__getitem__)
    by_stage = [sent_by_axis(line.config, plan, stage) for stage in stages]
    sent = {name: max(row[axis] for row in by_stage) for axis, name in AXES.items()}
    texts = [f"{size / 1e9:.0f} {name}" for name, size in sent.items() if size]
    return f"{held[fullest] / 2**30:.1f}", f"{kept[fullest] / 2**30:.1f}", ", ".join(texts)


def filled(page: str) -> str:
    """The page with its tables anew."""

    def table(match: re.Match[str]) -> str:
        given = shlex.split(match[2].replace("\\\n", " "))
        rows = [row.split("|")[1].strip() for row in match[3].splitlines()]
        cells = [(row, *figures([*given, *"".join(row.split("`")[1:]).split()])) for row in rows]
        return match[1] + "".join(f"| {' | '.join(row)} |\n" for row in cells)

    return TABLE.sub(table, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text("utf-8")), encoding="utf-8")
