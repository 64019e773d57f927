"""The file of --stages: a list of tables, each with the end of a stage and the flags that change.

[[stage]]
until_iterations = 1000
data-path = ["0.9", "web", "0.1", "code"]

[[stage]]                       # the last one ends with --train-iters
data-path = ["0.5", "books", "0.5", "code"]
seq-length = 8192
rotary-base = 500000
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.arguments import Flag
from megatron.small_files import read_text

DATA = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
)
SCHEDULE = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "lr_warmup_init",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_style",
    "weight_decay",
)
# What a rotary base or scaling is spelled by: the weights stay, what they see of positions changes.
ROPE = (
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "rotary_ntk_alpha",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "yarn_correction_range_round_to_int",
    "longrope_short_factor",
    "longrope_long_factor",
    "longrope_attention_factor",
    "window_rotary_base",
)
SIZES = (
    "seq_length",
    "max_position_embeddings",
    "global_batch_size",
    "micro_batch_size",
)
# What results do not depend on, but memory does, and files of one sequence length.
MEMORY = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "data_ledger",
)
CHANGING = (*DATA, *SIZES, *ROPE, *SCHEDULE, *MEMORY)
UNTIL = ("until_iterations", "until_samples", "until_tokens")


@dataclass(frozen=True)
class Stage:
    """A stage as it was written: its end (None: that of the run) with its unit, one of UNTIL, its
    own flags by field name, and with them those that earlier stages have changed."""

    number: int
    place: str  # in messages
    unit: str | None
    until: int | None
    own: Mapping[str, Any]
    flags: Mapping[str, Any]


def typed(values: Mapping[str, Any], flags: Mapping[str, Flag]) -> list[str]:
    """Flags of a stage as they would be typed."""
    words: list[str] = []
    for name, value in values.items():
        words.append(flags[name].spelling)
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def read_stages(path: str, flags: Mapping[str, Flag]) -> list[Stage]:
    """The stages of a file, in their order; `flags` are those of the program. Raises ValueError
    with the file, the stage and the key that is wrong."""
    try:
        text = read_text(path)
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--stages {path}: cannot be read ({error}) [file-not-readable]") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"--stages {path}: is not TOML ({error}) [stages-malformed]") from None
    tables = content.get("stage")
    if content.keys() != {"stage"} or not isinstance(tables, list) or not tables:
        raise ValueError(
            f"--stages {path}: must be tables [[stage]] and nothing else, at least one; has "
            f"{', '.join(sorted(map(repr, content)))[:200] or 'none'} [stages-malformed]"
        )
    stages: list[Stage] = []
    kept: dict[str, Any] = {}
    for number, table in enumerate(tables, 1):
        place = f"--stages {path}: stage {number}"
        unit, until, own = _read_table(place, table, flags, number == len(tables))
        if not own.keys().isdisjoint(DATA):
            kept = {name: value for name, value in kept.items() if name not in DATA}
        kept = kept | own
        stages.append(Stage(number, place, unit, until, own, kept))
    return stages


def _read_table(
    place: str, table: Any, flags: Mapping[str, Flag], is_last: bool
) -> tuple[str | None, int | None, dict[str, Any]]:
    """(unit of the end, the end, flags) of a stage."""
    if not isinstance(table, dict):
        raise ValueError(f"{place} is not a table [[stage]] [stages-malformed]")
    values = {str(key).replace("-", "_"): value for key, value in table.items()}
    units = [unit for unit in UNTIL if unit in values]
    if len(units) > 1 or not (units or is_last) or len(values) < len(table):
        raise ValueError(
            f"{place}: must have one of {', '.join(UNTIL)}, and each key once [stages-malformed]"
        )
    until = values.pop(units[0]) if units else None
    if units and (not isinstance(until, int) or isinstance(until, bool) or until < 1):
        raise ValueError(
            f"{place}: {units[0]} {str(until)[:200]}: must be a whole number of at least 1, "
            "counted from the start of the run [stages-malformed]"
        )
    for name, value in values.items():
        _check_flag(f"{place}: {name.replace('_', '-')[:200]}", name, value, flags)
    return units[0] if units else None, until, values


def _check_flag(place: str, name: str, value: Any, flags: Mapping[str, Flag]) -> None:
    if name not in CHANGING or name not in flags:
        raise ValueError(
            f"{place}: cannot change from stage to stage; give it on the command line. Stages may "
            f"change {', '.join(each.replace('_', '-') for each in CHANGING if each in flags)} "
            "[stage-flag-cannot-change]"
        )
    items: Sequence[Any] = value if isinstance(value, list) else [value]
    switch = flags[name].kind in ("switch", "off")
    good = value is True if switch else all(_is_word(item) for item in items) and len(items)
    if not good:
        raise ValueError(
            f"{place}: {str(value)[:200]}: must be "
            f"{'true, or left out' if switch else 'a number, a text or a list of them'} "
            "[stages-malformed]"
        )


def _is_word(item: Any) -> bool:
    return isinstance(item, int | float | str) and not isinstance(item, bool) and item != ""
