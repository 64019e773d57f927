"""Named spans: what they measure, their order, their levels."""

import time

import pytest

from megatron.timers import Timers


def test_spans_add_up_and_start_again():
    timers = Timers()
    for _ in range(2):
        with timers("a"):
            time.sleep(0.01)
    with timers("b"):
        pass
    found = timers.pop()
    assert list(found) == ["a", "b"] and 0.02 <= found["a"] < 1.0 and found["b"] < found["a"]
    assert timers.pop() == {}


def test_a_span_that_holds_others_stands_before_them():
    timers = Timers(2)
    with timers("step", 1):
        with timers("forward", 2):
            pass
        with timers("backward", 2):
            pass
    with timers("forward", 2):
        pass
    found = timers.pop()
    assert list(found) == ["step", "forward", "backward"] and found["step"] > 0.0


@pytest.mark.parametrize("level, names", [(0, ["a"]), (1, ["a", "b"]), (2, ["a", "b", "c"])])
def test_levels(level, names):
    """What is above the level costs neither a span nor a synchronisation."""
    calls = []
    timers = Timers(level, lambda: calls.append(1))
    for name, at in (("a", 0), ("b", 1), ("c", 2)):
        with timers(name, at):
            pass
    assert list(timers.pop()) == names and len(calls) == 2 * len(names)


def test_only_the_names_asked_for():
    timers = Timers()
    for name in ("save-checkpoint", "evaluate", "load-checkpoint"):
        with timers(name):
            pass
    assert list(timers.pop(["evaluate", "never", "save-checkpoint"])) == [
        "evaluate",
        "save-checkpoint",
    ]
    assert list(timers.pop()) == ["load-checkpoint"]


def test_the_device_is_waited_for_inside_the_span():
    """Work that was only queued must not count for the next span."""
    timers = Timers(0, lambda: time.sleep(0.02))
    with timers("a"):
        pass
    assert timers.pop()["a"] >= 0.02


def test_a_span_that_fails_is_measured_too():
    timers = Timers()
    with pytest.raises(KeyError), timers("a"):
        raise KeyError("planted")
    assert list(timers.pop()) == ["a"]


def test_popped_while_open():
    """Then what follows counts anew."""
    timers = Timers()
    with timers("a"):
        assert timers.pop() == {"a": 0.0}
    assert timers.pop()["a"] > 0.0


def test_spans_within_a_step_take_the_devices_time():
    """Marked without waiting, read when popped; what is above the level is not marked."""
    moments = iter((1.0, 2.0, 5.0, 6.5, 10.0, 12.0))
    read = []
    stream = (lambda: next(moments), lambda start, end: read.append(start) or end - start)
    waits = []
    timers = Timers(1, lambda: waits.append(1), stream)
    timers.watched = ("wait",)
    with timers("step", 1):
        with timers("wait", 2):
            pass
        with timers("no", 2):
            pass
    with timers("step", 1):
        assert not read
        found = timers.pop()
    assert found == {"step": 5.5} and timers.pop_watched() == 3.0
    assert timers.pop() == {"step": 2.0} and not waits
    with timers("setup"):
        pass
    assert len(waits) == 2 and timers.pop()["setup"] < 60
