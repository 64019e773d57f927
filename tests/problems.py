"""What tests assert of a message: its code and the flags, files and numbers it names, never its
sentence.

The sentences are in tests/golden/messages.txt (`python -m tests.rewrite_messages`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

CODE = re.compile(r" \[([a-z0-9]+(?:-[a-z0-9]+)+)\]$")


def code_of(line: str) -> str:
    """The code that a message ends with."""
    found = CODE.search(line)
    assert found, f"no code: {line}"
    return found[1]


def codes_of(lines: list[str]) -> list[str]:
    """Their codes, in order."""
    return [code_of(line) for line in lines]


def assert_problem(line: str, code: str, *named: object) -> None:
    """Assert that this is one line with this code, which names each of these."""
    assert code_of(line) == code, line
    assert "\n" not in line
    for each in named:
        assert str(each) in line, f"{each} is not named: {line}"


@contextlib.contextmanager
def raises(kind: type[Exception], code: str, *named: object) -> Iterator[None]:
    """Assert that an exception of this kind comes, with one line as `assert_problem` wants it."""
    with pytest.raises(kind) as caught:
        yield
    assert_problem(str(caught.value), code, *named)
