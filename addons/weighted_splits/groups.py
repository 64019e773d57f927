"""The groups of --train-weighted-split-paths: their syntax, in the command line and in files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from megatron.config.checkpoint import is_url
from megatron.config.checks.listing import as_number
from megatron.small_files import read_text

FORM = "NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX"
LONGEST = 200  # characters of a name or a word that is shown


class Part(NamedTuple):
    """The documents of a pair from one fraction to another, and their weight in the group."""

    weight: float
    bounds: tuple[float, float]
    prefix: str


class Group(NamedTuple):
    """Data under a name."""

    name: str
    parts: Sequence[Part]


def groups_of(split: str, words: Sequence[str], path: str | None) -> tuple[list[Group], list[str]]:
    """(the groups of a split, problems), of words or of the file `path`. Raises OSError."""
    flag = f"--{split}-weighted-split-paths"
    place = flag
    try:
        if path is not None:
            place = f"{flag}-path {path}"
            words, place = _words_of(path, place)
        groups = [_group(word, place) for word in words]
        names = [group.name for group in groups]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise _malformed(place, f"has two groups {name}", "give each another name")
        if split != "valid" and len(groups) > 1:
            raise _malformed(
                place, f"has {len(groups)} groups", f"give one, with all data of {split}"
            )
    except ValueError as error:
        return [], [str(error)]
    return groups, []


def _malformed(place: str, problem: str, remedy: str) -> ValueError:
    return ValueError(f"{place}: {problem}; {remedy} [weighted-splits-malformed]")


def _words_of(path: str, place: str) -> tuple[list[str], str]:
    """The groups in a file, each in double quotes on its one line, and where that is. Raises
    ValueError and OSError."""
    try:
        lines = read_text(path, "utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise _malformed(place, f"is no text ({error})", f'write "{FORM}"') from None
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbers:
        raise _malformed(place, "is empty", f'write "{FORM}"')
    if len(numbers) > 1:
        raise _malformed(f"{place}, line {numbers[1]}", "a second line", "write all on one line")
    place = f"{place}, line {numbers[0]}"
    line = lines[numbers[0] - 1].strip()
    if not re.fullmatch(r'"[^"]+"(?:\s+"[^"]+")*', line):
        raise _malformed(
            place, f"{line[:LONGEST]!r} is not one or several groups in quotes", f'write "{FORM}"'
        )
    return re.findall(r'"([^"]+)"', line), place


def _group(text: str, place: str) -> Group:
    """Raises ValueError."""
    name, colon, data = text.partition(":")
    name = name.strip()
    if not colon or not re.fullmatch(rf"[^\s\",]{{1,{LONGEST}}}", name) or not name.isprintable():
        raise _malformed(
            place,
            f"{text[:LONGEST]!r} does not begin with the name of a group",
            f"write {FORM}",
        )
    return Group(name, [_part(part, f"{place}: {name}") for part in data.split(",")])


def _part(text: str, place: str) -> Part:
    """Raises ValueError."""
    words = text.split()
    if len(words) != 3:
        raise _malformed(
            place,
            f"{text.strip()[:LONGEST]!r} is not a weight, a range and a prefix",
            "write WEIGHT START:END PREFIX, with commas between data sets",
        )
    weight, (first, colon, last), prefix = as_number(words[0]), words[1].partition(":"), words[2]
    if weight is None or not 0 < weight < math.inf:
        raise _malformed(
            place,
            f"the weight {words[0][:LONGEST]} is not a number above 0",
            "omit data that is not wanted",
        )
    start, end = as_number(first), as_number(last)
    if not colon or start is None or end is None or not 0 <= start < end <= 1:
        raise _malformed(
            place,
            f"{words[1][:LONGEST]} is not a range of documents",
            "give fractions from 0 to 1, as in 0:0.95",
        )
    if is_url(prefix):
        raise _malformed(
            place, f"{prefix[:LONGEST]} is in an object store", "give a path of this machine"
        )
    return Part(weight, (start, end), prefix)
