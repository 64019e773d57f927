"""`get_timers()` of a script: Megatron's timers by name, over those of the run."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megatron.training.script_args import run_timers

if TYPE_CHECKING:
    from megatron.timers import Timers


class ScriptTimer:
    """One of Megatron's timers, of a name."""

    def __init__(self, timers: Timers, name: str, level: int):
        self._open = functools.partial(timers, name, level)
        self._span: AbstractContextManager[None] = self._open()

    def start(self, barrier: bool = False) -> None:
        """Start it; no rank waits for another, whatever `barrier` says."""
        self._span = self._open()
        self._span.__enter__()

    def stop(self, barrier: bool = False) -> None:
        """Stop it, and add the time to its name."""
        self._span.__exit__(None, None, None)


class ScriptTimers:
    """`get_timers()(name, log_level=2).start()` and `get_timers()(name).stop()`: where
    --timing-log-level is as high, the time is in the run's lines of timers."""

    def __init__(self, timers: Timers):
        self._timers = timers
        self._by_name: dict[str, ScriptTimer] = {}

    def __call__(self, name: str, log_level: int = 2) -> ScriptTimer:
        """The timer of this name; the first call says its level."""
        return self._by_name.setdefault(name, ScriptTimer(self._timers, name, log_level))


@functools.cache
def _of(timers: Timers) -> ScriptTimers:
    return ScriptTimers(timers)


def get_timers() -> ScriptTimers:
    """The timers of the run. Raises RuntimeError before it has begun."""
    return _of(run_timers())
