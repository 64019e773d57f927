"""The results of first_light.sh on one screen, its table of kernels, and what may be sent to
others."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import aligned

TABLE = 25  # kernels of each cell that are kept
FIGURES = {
    "ms": ".1f",
    "h200": ".1f",
    "at_most": "<= .0f",
    "tokens/s": ".0f",
    "MFU %": ".1f",
    "busy %": ".0f",
    "peak GiB": ".1f",
    "compile s": ".0f",
}
FOLDER = re.compile(  # the last name of a path stays
    r"""(?<=['"])[~/][^'"\n]*/(?=[^/'"\n]*['"])|(?<![\w.])~?(?:/[\w.+@~-]+)*/(?=[\w.+@-])"""
)
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


def without_names(value: Any) -> Any:
    """`value` as JSON has it, without folders, addresses and the names of this host and user in
    its texts."""
    if isinstance(value, Mapping):
        return {key: without_names(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(each) for each in value]
    if not isinstance(value, str):
        return value
    text = ADDRESS.sub("ADDRESS", FOLDER.sub("", value))
    host = re.escape(socket.gethostname().partition(".")[0])
    text = re.sub(rf"\b{host}(\.[\w-]+)*\b", "HOST", text)
    user = os.environ.get("USER") or os.environ.get("LOGNAME")
    return re.sub(rf"\b{re.escape(user)}\b", "USER", text) if user else text


def shown(value: Any, form: str = ".3g") -> str:
    """A figure, a text, or `-` where there is none."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(shown, value))
    bound, _, digits = form.rpartition(" ")
    if isinstance(value, float):
        return f"{bound} {value:{digits}}".strip()
    return "-" if value is None else str(value)[:110]


def lines_of(name: str, facts: Mapping[str, Any]) -> list[str]:
    """The results of a step: figures beside those of the H200."""
    if name == "cells":
        table = [["", *FIGURES]]
        for row in facts.get("rows", ()):
            cells = [shown(row.get(key), form) for key, form in FIGURES.items()]
            missing = row.get("absent") or row.get("late")
            table.append([f"{row['name']}, {row['kind']}", *([missing] if missing else cells)])
            table[-1] += [""] * (len(table[0]) - len(table[-1]))
        return aligned(table)
    runs = facts.get("runs", {})
    return [f"{key}: {shown(value)}" for key, value in {**facts, **runs}.items() if key != "runs"]


def summary(head: Mapping[str, Any], steps: Mapping[str, Mapping[str, Any]]) -> str:
    """All results of the steps that ran."""
    lines = [f"first light: {shown(head)}"]
    for number, (name, step) in enumerate(steps.items(), 1):
        lines.append(f"{number} {name}: {step['state']}, {step['seconds']:.0f} s")
        lines += [f"  {line}" for line in lines_of(name, step["results"])]
        lines += [f"  FAILED {problem[:200]}" for problem in step["problems"][:8]]
    return "\n".join(lines) + "\n"


def write_kernels(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """The longest kernels of each cell; no more of them stay in its row."""
    lines = []
    for row in rows:
        kernels = row.get("kernels", [])
        row["kernels"] = kernels[:TABLE]
        total = sum(seconds for _, _, seconds in kernels) or 1.0
        launches = sum(count for _, count, _ in kernels)
        lines.append(f"== {row['name']}, {row['kind']}: {launches} launches, {1e3 * total:.2f} ms")
        lines += [
            f"{1e3 * seconds:9.3f} ms {100 * seconds / total:5.1f} % x {count:5d} {name[:130]}"
            for name, count, seconds in row["kernels"]
        ]
    file.write_text("\n".join(lines), encoding="utf-8")
