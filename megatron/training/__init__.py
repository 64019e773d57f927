"""What a script of one's own imports, under Megatron's names; nothing is loaded before it is
used."""

import importlib
import sys
from pathlib import Path

from megatron import addons

_HOME = {
    "megatron.log": ("print_rank_0", "print_rank_last"),
    "megatron.program": ("ModelType", "pretrain"),
    "megatron.training.script_args": ("get_args", "get_tokenizer"),
    "megatron.training.script_model": ("GPTModel",),
}
_MORE = "script_names"  # of add-ons: `has` says which names are there, `refuse` what of others


_importer = sys._getframe(1)
while _importer.f_back and _importer.f_code.co_filename.startswith("<frozen importlib"):
    _importer = _importer.f_back
if not str(_importer.f_globals.get("__name__")).startswith("megatron."):  # a script
    addons.load_import_finders()


def _home(name: str) -> str | None:
    """The module that has a name; an add-on's may stand for the core's."""
    for more in addons.modules(_MORE):
        if importlib.import_module(more).has(name):
            return more
    return next((home for home, names in _HOME.items() if name in names), None)


def has(name: str) -> bool:
    """Can a script import it from here? Loads nothing large."""
    return _home(name) is not None


def __getattr__(name: str) -> object:
    is_module = any((Path(__file__).parent / f"{name}{end}").exists() for end in ("", ".py"))
    home = None if is_module or name.startswith("__") else _home(name)
    if home is not None:
        return getattr(importlib.import_module(home), name)
    if not is_module and not name.startswith("__"):
        for more in addons.modules(_MORE):
            importlib.import_module(more).refuse(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
