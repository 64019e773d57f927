"""The state of a run apart from its tensors, as plain data with an exact JSON form.

Floats are written with Python's shortest exact spelling and come back bit for bit (the infinities
and NaN as {"float": "inf"}), whole numbers in full. Nothing here is ever unpickled.
"""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron import version
from megatron.checkpoint.filesystem import (
    CheckpointError,
)

VERSION = 1
OWN_MODEL = "own_model"  # in `data`: the class of a script's own model


def versions() -> dict[str, str | None]:
    """Versions of Python, torch, numpy and this suite, and its commit, for the reader of a
    checkpoint."""
    # a reader needs neither
    import numpy
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "suite": version.VERSION,
        "commit": version.commit(),
    }


@dataclass(kw_only=True)
class RunState:
    """Counters and small states of a run after `iteration` iterations. Every value is None, bool,
    int, float, str, or a list or str-keyed dict of such; tuples come back as lists.

    `skips`: the lines of `skips.jsonl` that count; `skipped`: the ranges [first, last] skipped so
    far. `layout`: world, tp, pp, dp ... at the save. `data`: fingerprint of the flags and files
    that fix the data order, and OWN_MODEL. `rng` is empty while all randomness is a pure function
    of counters. `features`: what each feature keeps, by its name. `hardware`: processor, device and
    kernels, which with `versions` decide the last bits. `history`: `History.dump`, empty in earlier
    checkpoints.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    num_floating_point_operations: int = 0
    scheduler: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    skips: list[Any] = field(default_factory=list)
    features: dict[str, Any] = field(default_factory=dict)
    skipped: list[Any] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=versions)
    hardware: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)

    def skipped_ranges(self) -> list[list[int]]:
        """`skipped`, or of an older checkpoint the ranges of its flags, its `skips`; up to its
        iteration. Raises CheckpointError where they are none."""
        ranges = self.skipped or [pair for pair in self.skips if isinstance(pair, list)]
        for pair in ranges:
            if (
                not isinstance(pair, list)
                or [type(end) for end in pair] != [int, int]
                or not 1 <= pair[0] <= pair[1]
            ):
                raise CheckpointError(
                    f"the run state has {pair} as a skipped range, which is not a range; the "
                    "checkpoint is damaged: use another one [checkpoint-damaged]"
                )
        return [
            [first, min(last, self.iteration)] for first, last in ranges if first <= self.iteration
        ]

    def dump(self) -> bytes:
        """The JSON text. TypeError, naming the place, for a value that would not come back as it
        is."""
        table = {"version": VERSION}
        table.update((name, _encoded(value, name)) for name, value in asdict(self).items())
        return (json.dumps(table, indent=1, allow_nan=False) + "\n").encode()


def _encoded(value: Any, path: str) -> Any:
    """`value` as JSON data; exact types only, since a subclass (numpy.float64, an enum) would come
    back as another."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) in (list, tuple):
        return [_encoded(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if type(value) is dict and value.keys() != {"float"}:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{path}: key {key!r} is a {type(key).__name__}, must be a str")
        return {key: _encoded(item, f"{path}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__} ({value!r}): a run "
        "state holds "
        'None, bool, int, float, str, lists and dicts (none with "float" as its only key)'
    )
