"""What of goodput's the campaign of tests/campaigns/hostile damages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.addons.ops.goodput import program, run_events_file
from tests.campaigns.hostile.campaign import Kind, run_tool


def make_events(folder: Path) -> None:
    start = {"iteration": 0, "ranks": 2, "host": "h", "pid": 1, "starter": "torchrun h 1"}
    events = [
        {"event": "start", "time": 10.0, "process_start": 1.0, **start},
        {"event": "steps", "time": 18.0, "first": 1, "last": 8, "seconds": 8.0},
        {"event": "save", "time": 20.0, "iteration": 8, "seconds": 2.0},
        {"event": "rollback", "time": 21.0, "iteration": 4},
        {"event": "failure", "time": 25.0, "iteration": 9, "rank": 1, "code": 1, "host": "h"}
        | {"pid": 1, "reason": "error: x"},
        {"event": "start", "time": 35.0, "process_start": 30.0, **start, "iteration": 8},
        {"event": "evaluation", "time": 40.0, "iteration": 12, "seconds": 1.0},
        {"event": "end", "time": 41.0, "iteration": 12},
    ]
    (folder / "run_events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def read_run_events(folder: Path) -> Any:
    file = folder / run_events_file.NAME
    events = run_events_file.newest_events(file)
    loop = run_events_file.crash_loop(events, "torchrun h 1", 1)
    return (
        loop,
        run_events_file.unreported(events),
        run_tool(program.main, file),
    )


KINDS = [Kind("run_events.jsonl", make_events, read_run_events, ("run_events.jsonl",), cost=2)]
