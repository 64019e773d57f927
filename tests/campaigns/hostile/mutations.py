"""Damage to a file, drawn from a seed: flipped bits, cuts, splices, depth, huge numbers, other
types, and pipes, devices, directories and sparse files in its place. Knows no format."""

import os
import random
import re
from pathlib import Path

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_VALUE = re.compile(rb'"[^"\\\n]{0,60}"|\btrue\b|\bnull\b|-?\b\d+(?:\.\d+)?\b')
NUMBERS = [
    *(b"0", b"-1", b"1e400", b"-1e400", b"NaN", b"Infinity", b"1e-400", b"0.5", b"2147483648"),
    *(b"9223372036854775807", b"18446744073709551616", b"-9223372036854775809", b"9" * 5000),
]
VALUES = [
    *(b"null", b"true", b"[]", b"{}", b'""', b"[[1]]", b'{"a": null}', b'"\\ud800"', b"1.5"),
    *(b'"../../outside"', b'"/etc/passwd"', b'"\\u0000"', b"-1", b"[null, 1, {}]", b'"1"'),
]
BINARY = [0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
SPECIAL = ["pipe", "sparse", "directory", "/dev/zero", "/dev/full", "empty", "loop", "missing"]
SPECIAL += ["depth"]  # of brackets
SPARSE_BYTES = 8 << 30


def mutated(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """One to three pieces of damage; `others` are contents of other files to splice in."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        data = chance.choice(_DAMAGES)(data, chance, others)
    return data


def put_special(path: Path, kind: str) -> None:
    """Replace a file by what is none, or by one without content."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "depth":
        path.write_text("[" * 200_000 + "]" * 200_000)
    elif kind in ("sparse", "empty"):
        path.touch()
        os.truncate(path, SPARSE_BYTES if kind == "sparse" else 0)
    elif kind != "missing":
        path.symlink_to(path if kind == "loop" else kind)


def _flip(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _remove(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[at + chance.choice([1, 4, 8, 40, 400]) :]


def _splice(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    other = chance.choice([data, *others])
    first = chance.randrange(len(other) + 1)
    part = other[first : first + chance.choice([1, 8, 100, 4000])]
    at = chance.randrange(len(data) + 1)
    return data[:at] + part + data[at + chance.choice([0, len(part)]) :]


def _replace(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    return chance.choice([*others, b"", b"\0" * 100, b"\xff" * 100, b"\n" * 100])


def _nest(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    depth = chance.choice([50, 900, 3000, 100_000])
    left, right = chance.choice(
        [(b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"{", b"}"), (b"${", b"}"), (b"$((", b"))")]
    )
    nested = left * depth + b"1" + right * depth
    spans = [match.span() for match in _VALUE.finditer(data[:100_000])]
    first, last = chance.choice([(0, len(data)), (len(data), len(data)), *spans[:200]])
    return data[:first] + nested + data[last:]


def _number(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    return _substitute(data, _NUMBER, NUMBERS, chance)


def _type(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    return _substitute(data, _VALUE, VALUES, chance)


def _substitute(
    data: bytes, pattern: re.Pattern[bytes], values: list[bytes], chance: random.Random
) -> bytes:
    spans = [match.span() for match in pattern.finditer(data[:100_000])]
    if not spans:
        return data + chance.choice(values)
    first, last = chance.choice(spans)
    return data[:first] + chance.choice(values) + data[last:]


def _binary(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """Another number, or one a little or much larger."""
    width = chance.choice([1, 4, 8])
    at = chance.randrange(max(1, min(len(data), 200) - width + 1))
    old = int.from_bytes(data[at : at + width], "little")
    value = chance.choice([*BINARY, old - 1, old + 1, old + 2, old + (1 << 40)]) % 256**width
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


_DAMAGES = [_flip, _cut, _remove, _splice, _replace, _nest, _number, _type, _binary, _type, _number]
