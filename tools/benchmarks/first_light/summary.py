"""The results of first_light.sh on one screen, and its table of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import aligned
from steps import short

TABLE = 25  # kernels of each contestant that are kept
FIGURES = {
    "ms": ".1f",
    "tokens/s": ".0f",
    "TFLOP/s": ".3g",
    "MFU %": ".1f",
    "peak GiB": ".1f",
    "compile s": ".0f",
    "loss": ".4f",
}


def shown(value: Any) -> str:
    """A figure with three digits, and several of them with their names."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """A line for each result of a step without a table."""
    return [f"{name}: {shown(value)}" for name, value in facts.items()]


def bench_lines(facts: Mapping[str, Any]) -> list[str]:
    """A row for each contestant."""
    cells = [["", *FIGURES]]
    for row in facts.get("rows", ()):
        values = row | {"loss": (row.get("losses") or [None])[-1]}
        texts = ["-" if values.get(k) is None else format(values[k], f) for k, f in FIGURES.items()]
        cells.append([short(row["cell"]), *texts])
    return aligned(cells)


def summary(head: str, steps: Mapping[str, Mapping[str, Any]]) -> str:
    """All results of the steps that ran."""
    lines = [head]
    for number, (name, step) in enumerate(steps.items(), 1):
        lines.append(f"{number} {name}: {step['state']}, {step['seconds']:.0f} s")
        facts = step["results"]
        rows = bench_lines(facts) if name == "bench" else fact_lines(facts)
        lines += [f"  {line}" for line in rows]
        lines += [f"  FAILED {problem[:200]}" for problem in step["problems"][:6]]
    return "\n".join(lines) + "\n"


def write_kernels(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """The longest kernels of each contestant; no more of them stay in its row."""
    with open(file, "w", encoding="utf-8") as out:
        for row in rows:
            kernels = row.get("kernels", [])
            row["kernels"] = kernels[:TABLE]
            total = sum(seconds for _, _, seconds in kernels) or 1.0
            launches = sum(count for _, count, _ in kernels)
            print(f"== {short(row['cell'])}: {launches} launches, {1e3 * total:.2f} ms", file=out)
            for name, count, seconds in row["kernels"]:
                share = 100 * seconds / total
                print(f"{1e3 * seconds:9.3f} ms {share:5.1f} % x {count:5d} {name[:130]}", file=out)
