"""The run of this process, as far as it has begun, for what a script of one's own asks of it
(`script_args`): nothing is made of it before a script has loaded that."""

from collections.abc import Callable
from typing import Any

_facts: dict[str, tuple[Any, ...]] = {}  # what was told of the run, in order
_listeners: list[Callable[..., None]] = []


def tell(fact: str, *values: Any) -> None:
    """The run has begun, is connected or was loaded: `script_args` has a function of that name."""
    _facts[fact] = values
    for listen in _listeners:
        listen(fact, *values)


def listen(listener: Callable[..., None]) -> None:
    """Call it with all that was told, and with what will be."""
    _listeners.append(listener)
    for fact, values in _facts.items():
        listener(fact, *values)
