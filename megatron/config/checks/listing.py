"""What rules about files read: the names in a directory, the lines of a text."""

import os
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from megatron.small_files import read_text


def as_number(word: str) -> float | None:
    """The number that a word is, or None."""
    try:
        return float(word)
    except ValueError:
        return None


def listing(folder: str) -> list[str]:
    """The names in a directory, none where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def text_lines(path: str) -> list[str] | str:
    """The lines of a file, or why they cannot be read."""
    try:
        return read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error}) [file-not-readable]"


@runtime_checkable
class KnowsFiles(Protocol):
    """A group of flags that knows files which the core does not, as features do."""

    @property
    def names_data(self) -> bool:
        """Do they name or choose the data?"""

    def missing(self) -> Iterable[str]:
        """What a real run would not find on this machine."""

    @staticmethod
    def converter_command(load: str) -> str | None:
        """What tools/convert_checkpoint.py reads the checkpoint of another suite with."""


def knowing(groups: Iterable[object]) -> list[KnowsFiles]:
    """Those of the groups that know files."""
    return [group for group in groups if isinstance(group, KnowsFiles)]
