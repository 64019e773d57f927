"""What rules about files read: the names in a directory, the lines of a text."""

import os

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
