"""What tests assert of a message: its code and the flags, files and numbers it names, never its
sentence.

The sentences are in tests/core/config/checks/cases.txt (`python -m tests.rewrite_messages`).
"""

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


def assert_reported(output: str, code: str, *named: object) -> None:
    """Assert that a line of this output has this code and names each of these."""
    lines = [line for line in output.splitlines() if f"[{code}]" in line]
    named_in = [line for line in lines if all(str(each) in line for each in named)]
    assert named_in, f"[{code}] with {named}: {output}"


def numbers(line: str) -> list[float]:
    """The numbers of a line, in order; 4,096 is one of them, the digits of iter_0000004 are none."""
    return [
        float(number.replace(",", ""))
        for number in re.findall(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", line)
    ]


@contextlib.contextmanager
def raises(kind: type[Exception], code: str, *named: object) -> Iterator[None]:
    """Assert that an exception of this kind comes, with one line as `assert_problem` wants it."""
    with pytest.raises(kind) as caught:
        yield
    assert_problem(str(caught.value), code, *named)
