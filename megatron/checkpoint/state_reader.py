"""Reads the state of a run (state.py), whatever stands there."""

import json
import math
from dataclasses import fields
from typing import Any

from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.state import VERSION, RunState
from megatron.config.run_directory import ForeignCheckpoint

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def parse(text: bytes, source: str) -> RunState:
    """The state in `text`; `source` is its path, for messages. Raises CheckpointError."""
    try:
        table = json.loads(text)
        version = table.pop("version")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{source} is not a run state: {type(error).__name__} {error}; the checkpoint is "
            "damaged: use another one [checkpoint-damaged]"
        ) from None
    known = {declared.name: declared for declared in fields(RunState)}
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
        state = RunState(**{"versions": {}, **values})
    except RecursionError:
        raise CheckpointError(
            f"{source} is nested too deep; the checkpoint is damaged: use another one "
            "[checkpoint-damaged]"
        ) from None
    blank = RunState(versions={})
    for name in known:
        have = type(getattr(state, name))
        want = type(getattr(blank, name))
        if have is not want:
            raise CheckpointError(
                f"{source}: {name} is a {have.__name__}, should be a {want.__name__}; the "
                "checkpoint is damaged: use another one [checkpoint-damaged]"
            )
    return state


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
