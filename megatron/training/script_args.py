"""What a script asks of the run: `get_args()`, all arguments by Megatron's names with those of the
script itself, `get_tokenizer()` and `get_timers()`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.tokenizers.base import Tokenizer
    from megatron.timers import Timers


class Arguments(argparse.Namespace):
    """Arguments of the suite can be read, those of the script (`own`) be written too."""

    def __init__(self, values: Mapping[str, Any], own: Mapping[str, Any]):
        super().__init__(**own)
        vars(self).update(values)
        vars(self)["_fixed"] = frozenset(values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_fixed", ()):
            raise AttributeError(
                f"get_args().{name}: model and plan were made from it before; give it on the "
                "command line"
            )
        super().__setattr__(name, value)


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


_run: dict[str, Any] = {}  # of this process


def set_args(values: Mapping[str, Any], own: argparse.Namespace | None) -> None:
    """Make these the arguments of the run: the suite's `values`, and those of the script."""
    _run["args"] = Arguments(values, vars(own) if own else {})


def set_tokenizer(tokenizer: Tokenizer) -> None:
    """Make this the tokenizer of the run."""
    _run["tokenizer"] = tokenizer


def set_timers(timers: Timers) -> None:
    """Make these the timers of the run."""
    _run["timers"] = ScriptTimers(timers)


def get_args() -> Arguments:
    """The arguments of the run. Raises RuntimeError before it has begun."""
    return _of_run("args")


def get_tokenizer() -> Tokenizer:
    """The tokenizer of the run. Raises RuntimeError before it has begun."""
    return _of_run("tokenizer")


def get_timers() -> ScriptTimers:
    """The timers of the run. Raises RuntimeError before it has begun."""
    return _of_run("timers")


def _of_run(what: str) -> Any:
    if what not in _run:
        raise RuntimeError(f"get_{what}(): there are none before the run has begun")
    return _run[what]
