"""What a script of one's own imports, under Megatron's names; nothing is loaded before it is
used."""

import importlib

_HOME = {"get_args": "megatron.training.script_args", "print_rank_0": "megatron.log"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
