"""What this add-on adds to the names of `megatron.training`: `Engine`. Loads nothing before it is
used."""

from typing import Any


def has(name: str) -> bool:
    """Is it a name of `megatron.training`?"""
    return name == "Engine"


def refuse(name: str) -> None:
    """Nothing is refused."""


def __getattr__(name: str) -> Any:
    if has(name):
        from .engine import Engine

        return Engine
    raise AttributeError(name)
