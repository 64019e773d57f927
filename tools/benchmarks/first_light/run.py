"""The steps of first_light.sh, most valuable first: each in processes of its own with a time limit,
whatever the others did.

    python run.py cuda|cpu OUT

OUT gets summary.txt and results.json (after every step), kernels.txt and log.txt. A step that ends
early leaves its time to the later ones. Needs no package itself: a missing one fails a step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "tools" / "benchmarks"
sys.path[:0] = [str(ROOT), str(BENCHMARKS), str(BENCHMARKS / "step")]

import steps  # noqa: E402
from processes import commit_of  # noqa: E402
from session import Failed, Session  # noqa: E402
from summary import summary, write_kernels  # noqa: E402

Step = Callable[[Session], dict[str, Any]]
# Seconds of each, 470 together: a command of eight minutes.
STEPS: Sequence[tuple[str, float, Step]] = (
    ("probe", 55, steps.probe),
    ("kernels", 75, steps.kernels),
    ("program", 60, steps.program),
    ("bench", 165, steps.bench),
    ("resume", 50, steps.resume),
    ("compiled", 65, steps.compiled),
)


def run_step(session: Session, function: Step) -> dict[str, Any]:
    """Its state (`ok` or `failed`), problems, results and seconds."""
    began = time.monotonic()
    report: dict[str, Any] = {"state": "ok", "problems": [], "results": {}}
    try:
        report["results"] = function(session)
    except Failed as error:
        report |= {"state": "failed", "problems": error.problems, "results": error.facts}
    except Exception as error:  # the next step may still tell something
        report |= {"state": "failed", "problems": [f"{type(error).__name__}: {error}"]}
        traceback.print_exc()
    return {**report, "seconds": round(time.monotonic() - began, 1)}


def write(session: Session, head: str, out: Path) -> None:
    """Write what is known so far."""
    rows = session.results.get("bench", {}).get("results", {}).get("rows", [])
    write_kernels(rows, out / "kernels.txt")
    report = {"head": head, "device": session.device, "steps": session.results}
    (out / "results.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (out / "summary.txt").write_text(summary(head, session.results), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Run all steps; 1 if one failed, 2 if the command line cannot be run."""
    device, out = argv[0], Path(argv[1])
    if device not in steps.SIZES:
        print(f"error: {device}: give cuda or cpu", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for name in ("summary.txt", "results.json", "kernels.txt", "log.txt"):
        (out / name).unlink(missing_ok=True)
    began = time.monotonic()
    date = time.strftime("%Y-%m-%d %H:%M")
    with tempfile.TemporaryDirectory(prefix="first-light-", ignore_cleanup_errors=True) as folder:
        session = Session(device, Path(folder), out / "log.txt", began)
        for name, seconds, function in STEPS:
            session.deadline += seconds
            limit = session.deadline - time.monotonic()
            print(f"{name}: at most {limit:.0f} s", flush=True)
            session.results[name] = run_step(session, function)
            probed = session.results["probe"]["results"].get("machine", {})
            head = (
                f"first light {date}, commit {commit_of(ROOT)}, {probed.get('device_name', device)}"
                f", torch {probed.get('torch', '-')}, {time.monotonic() - began:.0f} s"
            )
            write(session, head, out)
    print((out / "summary.txt").read_text(encoding="utf-8"), end="")
    return int(any(step["state"] != "ok" for step in session.results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
