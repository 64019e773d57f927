"""The state of a run apart from its tensors, as plain data with an exact JSON form.

Floats are written with Python's shortest exact spelling and come back bit for bit (the infinities
and NaN as {"float": "inf"}), whole numbers in full. Nothing here is ever unpickled.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron import version
from megatron.checkpoint.filesystem import (
    CheckpointError,
)
from megatron.config.run_directory import (
    ForeignCheckpoint,
)

VERSION = 1
ABSENT = "(absent)"
OWN_MODEL = "own_model"  # in `data`: the class of a script's own model
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


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

    @classmethod
    def parse(cls, text: bytes, source: str) -> RunState:
        """The state in `text`; `source` is its path, for messages. Raises CheckpointError."""
        try:
            table = json.loads(text)
            version = table.pop("version")
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{source} is not a run state: {type(error).__name__} {error}; the checkpoint is "
                "damaged: use another one [checkpoint-damaged]"
            ) from None
        known = {declared.name: declared for declared in fields(cls)}
        if "features" not in table:  # earlier programs wrote a feature's state among the others
            features = [key for key in table.keys() - known.keys() if isinstance(table[key], dict)]
            table["features"] = {key: table.pop(key) for key in sorted(features)}
        strange = sorted(table.keys() - known.keys())
        if version != VERSION or strange:
            raise ForeignCheckpoint(
                f"{source} has version {version!r} and the unknown entries {strange}; this "
                f"program reads version {VERSION}: use the program that wrote it "
                "[checkpoint-version-unknown]"
            )
        try:
            values = {name: _decoded(value) for name, value in table.items()}
            state = cls(**{"versions": {}, **values})
        except RecursionError:
            raise CheckpointError(
                f"{source} is nested too deep; the checkpoint is damaged: use another one "
                "[checkpoint-damaged]"
            ) from None
        blank = cls(versions={})
        for name in known:
            have = type(getattr(state, name))
            want = type(getattr(blank, name))
            if have is not want:
                raise CheckpointError(
                    f"{source}: {name} is a {have.__name__}, should be a {want.__name__}; the "
                    "checkpoint is damaged: use another one [checkpoint-damaged]"
                )
        return state


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


def _decoded(value: Any) -> Any:
    """The inverse of _encoded."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        if (
            value.keys() == {"float"}
            and isinstance(value["float"], str)
            and value["float"] in _FLOATS
        ):
            return _FLOATS[value["float"]]
        return {key: _decoded(item) for key, item in value.items()}
    return value


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, Any, Any]]:
    """(name, saved value, current value) for each of `names` on which the two disagree, in the
    order of `names`.

    A name that one side lacks has the value ABSENT there; lists and tuples of equal elements agree.
    """

    def plain(value: Any) -> Any:
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    pairs = [
        (name, plain(saved.get(name, ABSENT)), plain(current.get(name, ABSENT))) for name in names
    ]
    return [(name, old, new) for name, old, new in pairs if old != new]
