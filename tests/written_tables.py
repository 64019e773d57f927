"""Tables in pages of docs/ that follow from the code or from results:

python -m tests.written_tables    # writes them
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev

from megatron.config import command_line
from megatron.config.plan.costs import activations
from megatron.config.plan.plan import make_plan
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.config.plan.transfers import sent_by_axis
from megatron.features.registry import RunConfig
from tests.forkrun import ROOT

DOCS = ROOT / "docs"
AXES = {"dp": "data", "tp": "tensor", "ep": "expert", "pp": "pipeline", "cp": "context"}


def below(page: str, heading: str) -> re.Match[str]:
    """The rows of the page's one table whose heading begins so."""
    (table,) = re.finditer(rf"^\| {heading}[^\n]*\n\| ?-[^\n]*\n((?:\|[^\n]*\n)*)", page, re.M)
    return table


def with_rows(page: str, heading: str, rows: Iterable[Iterable[str]]) -> str:
    """The page with other rows in this table."""
    start, end = below(page, heading).span(1)
    return page[:start] + "".join(f"| {' | '.join(row)} |\n" for row in rows) + page[end:]


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


def layouts(page: str) -> str:
    """What the command of the page needs with the flags of each row's first cell."""
    (command,) = re.findall(r"^python pretrain_gpt\.py ([^`]*?) LAYOUT\n", page, re.M)
    given = shlex.split(command.replace("\\\n", " "))
    cells = [row.split("|")[1].strip() for row in below(page, "LAYOUT")[1].splitlines()]
    rows = [(cell, *figures([*given, *"".join(cell.split("`")[1:]).split()])) for cell in cells]
    return with_rows(page, "LAYOUT", rows)


def quality(page: str) -> str:
    """The losses of bench/results/quality.json and quality_7M.json."""
    return of_size(of_size(page, "1M", "quality.json"), "7M", "quality_7M.json")


def of_size(page: str, size: str, file: str) -> str:
    """Those of one file, in the table of this size."""
    result = json.loads((ROOT / "bench/results" / file).read_text("utf-8"))
    rows = [
        (
            f"{name.title()}, learning rate {best['lr']}, weight decay {best['weight_decay']}",
            *(steps, f"{mean(losses):.3f}", f"{stdev(losses):.3f}"),
        )
        for name, best in result["best"].items()
        for steps, losses in result[name].items()
    ]
    low, high = result["interval"]
    part = f"{result['ratio']:.2f} ({low:.2f} to {high:.2f})"
    goal = "Muon's steps to Adam's last loss, of Adam's (95 % interval, by 5 seeds)"
    return with_rows(page, f"{size}, 5 seeds", [*rows, (goal, part, "", "")])


PAGES: dict[Path, Callable[[str], str]] = {
    DOCS / "parallelism.md": layouts,
    DOCS / "moe.md": layouts,
    DOCS / "benchmarks.md": quality,
}

if __name__ == "__main__":
    for path, written in PAGES.items():
        path.write_text(written(path.read_text("utf-8")), encoding="utf-8")
