"""What a script of one's own imports, under Megatron's names; nothing is loaded before it is
used."""

import importlib

_HOME = {
    "megatron.log": ("print_rank_0", "print_rank_last"),
    "megatron.program": ("ModelType", "pretrain"),
    "megatron.training.script_args": ("get_args", "get_timers", "get_tokenizer"),
    "megatron.training.script_model": ("GPTModel",),
}


def __getattr__(name: str) -> object:
    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
