"""tools/goodput.py: the seconds of each kind, what a restart loses, the advice, the picture; and
what a run writes."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.addons.ops.goodput import points as goodput_points
from megatron.addons.ops.goodput import program as goodput
from megatron.addons.ops.goodput import run_events
from megatron.addons.ops.goodput.accounting import KINDS, account, read_goodput
from megatron.addons.ops.goodput.run_events import RunEvents
from megatron.addons.ops.goodput.run_events_file import (
    NAME,
    UNKNOWN,
    attempts_of,
    crash_loop,
    read_events,
    unreported,
)
from tests.runs import SMALL, train, write_text


def event(name: str, time: float, **content) -> dict:
    return {"event": name, "time": time, **content}


def start(process_start: float, time: float, iteration: int, starter: str = "x") -> dict:
    return event(
        "start", time, process_start=process_start, iteration=iteration, starter=starter, ranks=2
    )


def failure(time: float, iteration: int, rank: int = 1, code: int = 1) -> dict:
    return event(
        "failure", time, iteration=iteration, rank=rank, code=code, host="h", pid=1, reason="why"
    )


# ten iterations of a second, saved at 8; two are lost
FIRST = [
    start(0.0, 10.0, 0),
    event("steps", 18.0, first=1, last=8, seconds=8.0),
    event("save", 20.0, iteration=8, seconds=2.0),
    event("steps", 22.5, first=9, last=10, seconds=2.0),
    failure(25.5, 11),
]
SECOND = [
    start(30.0, 35.0, 8),
    event("steps", 39.0, first=9, last=12, seconds=4.0),
    event("evaluation", 40.0, iteration=12, seconds=1.0),
    event("end", 40.0, iteration=12),
]


def test_a_stall_is_not_productive():
    """The second of three iterations takes 5 s instead of 1."""
    events = [
        start(0.0, 1.0, 0),
        event("steps", 2.0, first=1, last=1, seconds=1.0),
        event("stall", 7.0, iteration=2, seconds=5.0, usual=1.0),
        event("steps", 8.0, first=2, last=3, seconds=2.0),
        event("end", 8.0, iteration=3),
    ]
    run = account("run", attempts_of(events))
    assert {kind: run.of(kind) for kind in goodput_kinds(run)} == {
        "productive": 3.0,
        "stalled": 4.0,
        "start-up": 1.0,
    }
    assert run.iterations == 3


def events_of_iterations(folder: Path, seconds: list[float]) -> list[dict]:
    """What a run writes whose iterations take so long."""
    run = SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(save=str(folder)),
        ),
        runtime=SimpleNamespace(rank=0, world_size=1),
        progress=SimpleNamespace(iteration=0),
        services=SimpleNamespace(signals=SimpleNamespace()),
    )
    events = RunEvents(run, 0.0, 0)
    events.on_start()
    for iteration, one in enumerate(seconds, 1):
        run.progress.iteration = iteration
        events.after_step(SimpleNamespace(iteration=iteration, seconds=one))
    events.on_end()
    return read_events(folder / NAME)


def test_a_slow_iteration_is_written_as_a_stall(tmp_path):
    seconds = [5.0, *[0.5] * 8, 1.4, 1.6, 0.5]  # the first one warms up; 1.4 is below 3 times 0.5
    written = events_of_iterations(tmp_path, seconds)
    stalls = [one for one in written if one["event"] == "stall"]
    assert [(one["iteration"], one["seconds"], one["usual"]) for one in stalls] == [(11, 1.6, 0.5)]
    steps = [one for one in written if one["event"] == "steps"]
    assert [one["first"] for one in steps][1:] == [one["last"] + 1 for one in steps][:-1]
    assert sum(one["seconds"] for one in steps) == pytest.approx(sum(seconds) - 1.1)


def test_a_run_that_stays_slow_stalls_no_longer(tmp_path):
    """As when the batch size ramps up."""
    written = events_of_iterations(tmp_path, [0.5] * 20 + [4.0] * 100)
    stalls = [one["iteration"] for one in written if one["event"] == "stall"]
    assert stalls == list(range(21, 41))  # half of those known are then slow


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_a_clock_that_is_set_changes_no_length(tmp_path, monkeypatch, jump):
    """At the third look at it."""
    looks = []

    def jumping() -> float:
        looks.append(1)
        return time.time() + jump * (len(looks) > 2)

    clock = SimpleNamespace(time=jumping, monotonic=time.monotonic)
    monkeypatch.setattr(run_events, "time", clock)
    times = [one["time"] for one in events_of_iterations(tmp_path, [0.5] * 20)]
    assert 0.0 <= times[-1] - times[0] < 60.0


def test_an_attempt_after_the_clock_was_set_back_counts():
    earlier = [{**one, "time": one["time"] - 86400.0} for one in SECOND]
    earlier[0]["process_start"] -= 86400.0
    run = account("run", attempts_of(FIRST + earlier))
    right = account("run", attempts_of(FIRST + SECOND))
    assert run.seconds == right.seconds - right.of("restart")
    assert all(run.of(kind) == right.of(kind) for kind in KINDS if kind != "restart")


def test_every_second_is_counted_once():
    run = account("run", attempts_of(FIRST + SECOND))
    assert {kind: run.of(kind) for kind in goodput_kinds(run)} == {
        "productive": 12.0,
        "recomputed": 2.0,
        "evaluation": 1.0,
        "save": 2.0,
        "start-up": 15.0,
        "detection": 3.0,
        "restart": 4.5,
        "other": 0.5,
    }
    assert sum(span.seconds for span in run.spans) == run.seconds == 40.0
    assert (run.share, run.failures, run.attempts, run.iterations) == (0.3, 1, 2, 12)
    # sqrt(2 x 2 s x 40 s) over a step of a second
    assert run.best_interval == 13


def goodput_kinds(run) -> set[str]:
    return {span.kind for span in run.spans}


def test_a_rollback_loses_its_steps_and_another_launcher_waits():
    rolled = [
        start(0.0, 1.0, 0),
        event("steps", 5.0, first=1, last=4, seconds=4.0),
        event("rollback", 5.0, iteration=2),
        event("steps", 7.0, first=3, last=4, seconds=2.0),
        event("end", 7.0, iteration=4),
    ]
    run = account("run", [rolled, [start(17.0, 18.0, 4, "y")]])
    assert (run.of("productive"), run.of("recomputed"), run.of("waiting")) == (4.0, 2.0, 10.0)
    assert run.failures == 0 and run.best_interval is None


def test_ctrl_c_is_no_failure_and_a_death_without_a_word_is_one():
    stopped = [start(0.0, 1.0, 0), failure(2.0, 1, code=130)]
    killed = [start(3.0, 4.0, 0)]
    assert account("run", [stopped, killed, [start(5.0, 6.0, 0)]]).failures == 1


def test_a_crash_loop_is_the_same_rank_in_the_same_iteration():
    attempts = [[start(0.0, 1.0, 8), failure(2.0, 11)]] * 3
    events = sum(attempts, [])
    assert crash_loop(events, "x", 3) and crash_loop(events, "x", 2)
    assert not crash_loop(events, "x", 4) and not crash_loop(events, "y", 3)
    assert not crash_loop(events, "x", 0)
    for other in (failure(2.0, 12), failure(2.0, 11, rank=0)):
        assert not crash_loop([*events, start(0.0, 1.0, 8), other], "x", 3)
    assert not crash_loop([*events, start(0.0, 1.0, 8)], "x", 3)


def test_only_an_attempt_without_an_end_is_unreported():
    assert unreported(FIRST) is None and unreported(FIRST + SECOND) is None
    assert unreported([]) is None
    found = unreported(FIRST + SECOND[:-1])
    assert (found["iteration"], found["rank"], found["time"]) == (13, UNKNOWN, 40.0)
    assert unreported([*FIRST, start(30.0, 35.0, 8)])["iteration"] == 9
    assert not crash_loop([*FIRST[:1], found] * 3, "x", 3)


def test_a_torn_line_is_omitted(tmp_path):
    lines = [json.dumps(one) for one in FIRST]
    (tmp_path / NAME).write_text("\n".join(lines)[:-5] + "\n" + json.dumps(SECOND[0]) + "\n5\n")
    assert read_events(tmp_path / NAME) == [*FIRST[:-1], SECOND[0]]


def test_the_picture_and_the_table(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / NAME).write_text("".join(json.dumps(one) + "\n" for one in FIRST + SECOND))
    picture = tmp_path / "goodput.png"
    assert goodput.main([str(tmp_path), "--output", str(picture)]) == 0
    assert picture.stat().st_size > 5000 and "30.0%" in capsys.readouterr().out
    assert goodput.main([str(tmp_path / "none")]) == 2
    assert goodput.main([str(tmp_path), "--failures"]) == 0
    assert capsys.readouterr().out.rstrip("\n").split("\t")[1:] == ["11", "1", "h", "1", "why"]
    with pytest.raises(SystemExit):
        goodput.main([str(tmp_path), "--failures", "--output", str(picture)])


def die(iteration: int) -> None:
    """A hook of `tests.runs.train`: this process is killed in an iteration."""
    from megatron.training import loop

    real = loop.train_step

    def step(run, forward_step, samples, number, *rest):
        if number == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(run, forward_step, samples, number, *rest)

    loop.train_step = step


def test_what_a_run_writes(tmp_path):
    """Start, steps, saves, evaluation, end; the lost iteration of a killed run; no failure of a
    file ends the run."""
    text = write_text(tmp_path / "text", 100)
    save = tmp_path / "save"
    flags = "--train-iters 6 --eval-interval 3 --eval-iters 1 --save-interval 2 --split 80,20,0 --run-events"
    words = [*SMALL, "--data-path", text, *flags.split(), "--save", str(save), "--load", str(save)]
    with pytest.raises(AssertionError):
        train(tmp_path / "run", words, hook=functools.partial(die, 6))
    train(tmp_path / "run", words)
    attempts = attempts_of(read_events(save / NAME))
    assert [one[0]["iteration"] for one in attempts] == [0, 4]
    names = [[one["event"] for one in events] for events in attempts]
    assert names[0].count("save") == 2 and names[0].count("evaluation") == 1
    assert names[1].count("save") == 1 and "end" in names[1]
    lost = attempts[0][-1]  # written by the second start
    assert (lost["event"], lost["recovered"], lost["rank"], lost["silent"]) == (
        "failure",
        True,
        0,
        True,
    )
    assert lost["time"] == attempts[0][-2]["time"] < attempts[1][0]["process_start"]
    steps = [one for one in attempts[1] if one["event"] == "steps"]
    assert steps[0]["first"] == 5 and steps[-1]["last"] == 6
    run = read_goodput(str(save))
    assert run.failures == 1 and 0 < run.share < 1
    assert Path(save / NAME).read_text().count("\n") >= 10


@pytest.mark.parametrize("cut", range(8))
def test_a_file_that_grows_is_read_once(tmp_path, cut):
    """Line by line, and with lines that are not complete yet: the sums are those of the file."""
    events = [*FIRST, event("steps", 26.0, first=11, last=11, seconds=0.5), *SECOND]
    text = "".join(json.dumps(one) + "\n" for one in events)
    path = tmp_path / NAME
    tail = goodput_points.EventsTail(path)
    for end in range(cut, len(text) + 40, 40):
        path.write_text(text[:end])
        tail.update()
    path.write_text(text)
    tail.update()
    assert goodput_points.points(tail.events) == pytest.approx(goodput_points.points(events))
    assert len(tail.events) == len(events)
    tail.events[-2:] = []  # evaluation and end
    path.write_text(text + json.dumps(event("steps", 41.0, first=13, last=14, seconds=0.5)) + "\n")
    tail.update()
    assert tail.events[-1] == event("steps", 41.0, first=9, last=14, seconds=4.5)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "8"},
        {"seconds": None},
        {"seconds": -1.0},
        {"first": [1]},
        {"first": 9},
        {"last": 10**400},
        {"time": True},
        {"event": ["steps"]},
        {"event": "unknown"},
    ],
)
def test_an_event_without_its_values_is_omitted(change, tmp_path):
    """Of a file that was damaged, say by a full disk."""
    good = [FIRST[0], FIRST[1], FIRST[2]]
    lines = [json.dumps(one) for one in (*good, {**FIRST[1], **change})]
    (tmp_path / NAME).write_text("\n".join(lines))
    assert read_events(tmp_path / NAME) == good
    assert goodput.main([str(tmp_path)]) == 0
