"""What a script of one's own imports, under Megatron's names; nothing is loaded before it is
used."""

import importlib
from pathlib import Path

from megatron import addons

_HOME = {
    "megatron.log": ("print_rank_0", "print_rank_last"),
    "megatron.program": (
        "ModelType",
        "parse_and_validate_args",
        "pretrain",
        "pretrain_cfg_container_from_args",
    ),
    "megatron.training.script_args": ("get_args", "get_timers", "get_tokenizer"),
    "megatron.training.script_model": ("GPTModel",),
    "megatron.training.script_ranks": ("is_first_or_last_pipeline_stage", "mpu", "parallel_state"),
}
_RANKS = "megatron.training.script_ranks"
_MORE = "script_names"  # of add-ons: more names (`NAMES`), and `refuse` for those that are nowhere


def _home(name: str) -> str | None:
    """The module that has a name; of functions of mpu, which scripts import by name too, mpu's."""
    for home, names in _HOME.items():
        if name in names:
            return home
    if name.startswith(("get_", "is_")) and hasattr(importlib.import_module(_RANKS).mpu, name):
        return _RANKS
    homes = (each for each in addons.modules(_MORE) if name in importlib.import_module(each).NAMES)
    return next(homes, None)


def has(name: str) -> bool:
    """Can a script import it from here? Loads nothing large."""
    return _home(name) is not None


def __getattr__(name: str) -> object:
    is_module = any((Path(__file__).parent / f"{name}{end}").exists() for end in ("", ".py"))
    home = None if is_module or name.startswith("__") else _home(name)
    if home is None:
        if not is_module and not name.startswith("__"):
            for more in addons.modules(_MORE):
                importlib.import_module(more).refuse(name, has)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(home)
    return getattr(module if home != _RANKS or name in _HOME[home] else module.mpu, name)
