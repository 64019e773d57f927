"""The steps of first_light.sh, most valuable first: each in processes of its own with a time limit,
whatever the others did.

OUT gets summary.txt and results.json (after every step), kernels.txt and log.txt. results.json is
what may be sent to others: it names no host, no user and no folder. A step that ends early leaves
its time to the later ones. Needs no package itself: a missing one fails a step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "bench"
sys.path[:0] = [str(ROOT), str(BENCHMARKS), str(BENCHMARKS / "step")]

import steps  # noqa: E402
from harness import aligned, commit_of  # noqa: E402

STEPS: Mapping[str, Callable[[steps.Session], steps.Report]] = {
    "probe": steps.probe,
    "numbers": steps.numbers,
    "cells": steps.cells,
}
# The share of --seconds that each step has.
SHARES = {"cuda": (0.07, 0.25, 0.68), "cpu": (0.05, 0.55, 0.4)}
LAST_SECONDS = 3.0  # to end processes and write
TABLE = 25  # kernels of each cell that are kept
FIGURES = {
    "ms": ".1f",
    "h200": ".1f",
    "at_most": "<= .4g",
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


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figures of the cells beside those of the H200."""
    lines = [["", *FIGURES]]
    for row in rows:
        figures = [shown(row.get(name), form) for name, form in FIGURES.items()]
        if missing := row.get("absent") or row.get("late"):
            figures = [missing, *[""] * (len(FIGURES) - 1)]
        lines.append([f"{row['name']}, {row['kind']}", *figures])
    return aligned(lines)


def summary(head: Mapping[str, Any], steps: Mapping[str, Mapping[str, Any]]) -> str:
    """All results of the steps that ran."""
    lines = [f"first light: {shown(head)}"]
    for number, (name, step) in enumerate(steps.items(), 1):
        facts = dict(step["results"])
        facts |= facts.pop("runs", {})
        lines.append(f"{number} {name}: {step['state']}, {step['seconds']:.0f} s")
        lines += [f"  {line}" for line in table(facts.pop("rows", []))] if name == "cells" else []
        lines += [f"  {key}: {shown(value)}" for key, value in facts.items()]
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
        for name, count, seconds in row["kernels"]:
            part = f"{1e3 * seconds:9.3f} ms {100 * seconds / total:5.1f} %"
            lines.append(f"{part} x {count:5d} {name[:130]}")
    file.write_text("\n".join(lines), encoding="utf-8")


def write(head: dict[str, Any], done: Mapping[str, Any], out: Path) -> None:
    """Write what is known so far."""
    probed = done["probe"]["results"]
    head |= probed.pop("machine", {})
    head |= {name: probed.pop(name) for name in ("driver",) if name in probed}
    write_kernels(done.get("cells", {}).get("results", {}).get("rows", []), out / "kernels.txt")
    report = json.dumps(without_names({**head, "steps": done}), indent=1)
    (out / "results.json").write_text(report, encoding="utf-8")
    (out / "summary.txt").write_text(summary(head, done), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Run all steps; 1 if one failed. Raises SystemExit(2) if the command line cannot be run."""
    parser = argparse.ArgumentParser(prog="first_light.sh", allow_abbrev=False)
    parser.add_argument("device", nargs="?", choices=SHARES, default="cuda")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which all ends")
    parser.add_argument("--out", type=Path, default=Path("runs/first_light"))
    options = parser.parse_args(argv)
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").unlink(missing_ok=True)
    began = time.monotonic()
    head = {"date": time.strftime("%Y-%m-%d"), "commit": commit_of(ROOT), "device": options.device}
    done: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="first-light-", ignore_cleanup_errors=True) as folder:
        session = steps.Session(options.device, Path(folder), out / "log.txt", began)
        for (name, step), share in zip(STEPS.items(), SHARES[options.device], strict=True):
            session.deadline += share * (options.seconds - LAST_SECONDS)
            print(f"{name}: at most {session.deadline - time.monotonic():.0f} s", flush=True)
            step_began = time.monotonic()
            try:
                results, problems = step(session)
            except Exception as error:  # the next step may still tell something
                results, problems = {}, [f"{type(error).__name__}: {error}"]
                traceback.print_exc()
            done[name] = {
                "state": "failed" if problems else "ok",
                "seconds": round(time.monotonic() - step_began, 1),
                "problems": problems,
                "results": results,
            }
            head["seconds"] = round(time.monotonic() - began)
            write(head, done, out)
    print((out / "summary.txt").read_text(encoding="utf-8"), end="")
    return int(any(step["state"] != "ok" for step in done.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
