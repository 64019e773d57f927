"""Reads the memory over a step of each rank in the JSON file of --trace-output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.small_files import read_json

START = b'{\n "world_size":'


class RankMemory(NamedTuple):
    """`bytes` by kind at each of as many points, every `operations` operations of the step."""

    rank: int
    stage: int
    operations: int
    bytes: Mapping[str, Sequence[int]]


def is_trace(path: str) -> bool:
    """Does the file begin as one of --trace-output?"""
    try:
        with open(path, "rb") as file:
            return file.read(len(START)) == START
    except OSError:
        return False


def read_memory(path: str) -> list[RankMemory]:
    """The ranks of a trace. Raises ValueError for a damaged file."""
    try:
        content: Any = read_json(path)
        return [
            RankMemory(
                rank["rank"],
                rank["stage"],
                rank["memory_over_step"]["operations_per_point"],
                rank["memory_over_step"]["bytes"],
            )
            for rank in content["ranks"]
        ]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: is no whole file of --trace-output; trace again") from None
