"""The steps of first_light.sh, most valuable first: each in processes of its own with a time limit,
whatever the others did.

OUT gets summary.txt and results.json (after every step), kernels.txt and log.txt. results.json is
what may be sent to others: it names no host, no user and no folder. A step that ends early leaves
its time to the later ones. Needs no package itself: a missing one fails a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "tools" / "benchmarks"
sys.path[:0] = [str(ROOT), str(BENCHMARKS), str(BENCHMARKS / "step")]

import steps  # noqa: E402
from processes import commit_of  # noqa: E402
from session import Session  # noqa: E402
from summary import summary, without_names, write_kernels  # noqa: E402

Step = Callable[[Session], steps.Report]
STEPS: Mapping[str, Step] = {
    "probe": steps.probe,
    "numbers": steps.numbers,
    "cells": steps.cells,
}
# The share of --seconds that each step has.
SHARES = {"cuda": (0.07, 0.25, 0.68), "cpu": (0.05, 0.55, 0.4)}
LAST_SECONDS = 3.0  # to end processes and write


def run_step(session: Session, function: Step) -> dict[str, Any]:
    """Its state (`ok` or `failed`), problems, results and seconds."""
    began = time.monotonic()
    try:
        results, problems = function(session)
    except Exception as error:  # the next step may still tell something
        results, problems = {}, [f"{type(error).__name__}: {error}"]
        traceback.print_exc()
    seconds = round(time.monotonic() - began, 1)
    state = "failed" if problems else "ok"
    return {"state": state, "seconds": seconds, "problems": problems, "results": results}


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
        session = Session(options.device, Path(folder), out / "log.txt", began)
        for (name, function), share in zip(STEPS.items(), SHARES[options.device], strict=True):
            session.deadline += share * (options.seconds - LAST_SECONDS)
            print(f"{name}: at most {session.deadline - time.monotonic():.0f} s", flush=True)
            done[name] = run_step(session, function)
            head["seconds"] = round(time.monotonic() - began)
            write(head, done, out)
    print((out / "summary.txt").read_text(encoding="utf-8"), end="")
    return int(any(step["state"] != "ok" for step in done.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
