"""How long an iteration may take before it counts as a hang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.training.launch.hang_watch import HangWatch


class Monitor:
    """Keeps the limit of each iteration."""

    def __init__(self):
        self.limits: list[float | None] = []

    def begin_step(self, iteration: int, limit: float | None) -> None:
        self.limits.append(limit)

    def end_step(self) -> None:
        pass


def limits(seconds: list[float], limit: float | None = None, micro_batches=lambda _: 1):
    """Those of iterations that took so many seconds, and of the one after them."""
    monitor = Monitor()
    watch = HangWatch(monitor, limit, micro_batches)
    for iteration, one in enumerate([*seconds, 0.0], 1):
        watch.before_step(iteration)
        watch.after_step(SimpleNamespace(iteration=iteration, seconds=one))
    return monitor.limits


def test_the_first_iteration_has_no_limit_and_the_others_at_least_15_seconds():
    assert limits([9.0, 0.1, 0.1]) == [None, 45.0, pytest.approx(22.75), 15.0]


def test_a_limit_that_is_given_holds():
    assert limits([9.0, 0.1], 3.0) == [None, 3.0, 3.0]


def test_a_batch_that_grows_has_as_many_times_the_seconds():
    sizes = {1: 2, 2: 2, 3: 40}
    assert limits([8.0, 8.0], micro_batches=sizes.get) == [None, 40.0, 800.0]
