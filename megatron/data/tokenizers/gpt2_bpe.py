"""The files of GPT-2's byte-level BPE, vocab.json and merges.txt: reading and checks."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.preprocess.jsonl import json_value
from megatron.small_files import read_bytes, read_text

# How GPT-2 cuts text before merging: an English contraction, a run of letters, of digits or of
# anything else, each with one space before it if there is one; white space keeps its last character
# back for the run that follows it.
GPT2_PATTERN = r"'(?:[sdmt]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The published GPT-2 files, whose merges are known to pass `products` (a test runs it on them).
GPT2_SHA256 = (
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",  # vocab.json
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",  # merges.txt
)

LONGEST = 1024  # bytes of a piece; those of GPT-2 have at most 128
_MERGE_LINE = re.compile("^([^ \r\n]+) ([^ \r\n]+)$", re.MULTILINE)


@functools.cache
def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each of the 256 bytes in vocab.json and merges.txt.

    Bytes that Latin-1 prints stand for themselves; the others take the characters from U+0100 on,
    in order.
    """
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte) if _prints(byte) else chr(next(spare)) for byte in range(256))


def _prints(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF


@functools.cache
def _newer_characters(known: int) -> np.ndarray:
    """bool [0x110000]: characters that this Python's Unicode tables do not know, and all from
    `known` on."""
    newer = np.ones(0x110000, dtype=bool)
    newer[:known] = list(map("Cn".__eq__, map(unicodedata.category, map(chr, range(known)))))
    return newer


def has_newer_characters(text: str) -> bool:
    """Whether engines may disagree on this text: is a character that is newer than their Unicode
    tables a letter?

    Each engine answers by the age of its tables, so such a text (they are rare) is cut by the
    package `regex`.
    """
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    # Most texts need the first plane's table alone, which is made in a quarter of the time.
    return bool(_newer_characters(0x10000)[codes].any()) and bool(
        _newer_characters(0x40000)[codes].any()
    )


def has_endless_blank(text: str) -> bool:
    """Whether a text may hold a run of a million blanks, at which tiktoken's pattern engine gives
    up.

    Looks at every 10000th character, so that it costs nothing; such a run shows as 99 of them at
    least.
    """
    return len(text) >= 1_000_000 and any(run.isspace() for run in _windows(text[::10_000], 90))


def _windows(sample: str, size: int) -> Iterator[str]:
    return (sample[start : start + size] for start in range(len(sample) - size + 1))


def _vocabulary_of(data: bytes) -> Any:
    """The value of a vocab.json. Raises UnicodeDecodeError and json.JSONDecodeError."""
    try:
        return json_value(data)
    except RecursionError:
        raise json.JSONDecodeError("brackets nested too deeply", "", 0) from None


def read_vocabulary(path: str | Path) -> dict[str, int]:
    """Read vocab.json: pieces in the byte alphabet with their ids, which must be 0 .. n-1.

    Raises ValueError naming the file, what is wrong with it and what to do.
    """
    try:
        vocabulary = _vocabulary_of(read_bytes(path))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--vocab-file {path}: not a JSON file ({error}); give GPT-2's vocab.json "
            "[tokenizer-file-malformed]"
        ) from None
    if not isinstance(vocabulary, dict) or not set(map(type, vocabulary.values())) <= {int}:
        raise ValueError(
            f"--vocab-file {path}: not a JSON object of piece: id; give GPT-2's vocab.json "
            "[tokenizer-file-malformed]"
        )
    if set(vocabulary.values()) != set(range(len(vocabulary))):
        raise ValueError(
            f"--vocab-file {path}: its {len(vocabulary)} ids are not 0 to {len(vocabulary) - 1}, "
            "each once; give the vocabulary that was made together with --merge-file "
            "[tokenizer-file-malformed]"
        )
    return vocabulary


def read_merges(path: str | Path) -> list[tuple[str, str]]:
    """Read merges.txt: one pair a line, best first. The `#version` line may be there, the final
    newline may be missing.

    Raises ValueError naming the file and the line.
    """
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--merge-file {path}: not UTF-8 text ({error}); give GPT-2's merges.txt "
            "[tokenizer-file-malformed]"
        ) from None
    body = text.partition("\n")[2] if text.startswith("#version") else text
    merges = _MERGE_LINE.findall(body)
    if merges and len(merges) == 1 + body.removesuffix("\n").count("\n"):  # every line is a pair
        return merges
    merges = []
    # not splitlines: U+0085 is a piece here
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2 or "" in pair:
            raise ValueError(
                f"--merge-file {path}, line {number}: expected two pieces and one space, found "
                f"{line[:80]!r} [tokenizer-file-malformed]"
            )
        merges.append(pair)
    if not merges:
        raise ValueError(
            f"--merge-file {path}: holds no merges; give GPT-2's merges.txt "
            "[tokenizer-file-malformed]"
        )
    return merges


def products(path: str, merges: Sequence[tuple[str, str]]) -> list[str]:
    """What the merges make, in their order, without products that their own bytes do not merge
    into: no text has them.

    Raises ValueError, naming the file, for a merge of what no earlier merge makes, and for two that
    make the same.
    """
    known = set(byte_alphabet())
    for number, (left, right) in enumerate(merges, start=1):
        product = left + right
        if left not in known or right not in known or product in known:
            raise ValueError(
                f"--merge-file {path}, merge {number} ({left} {right}): each merge must join "
                "pieces that merges above it make, into a new one; give the merges.txt of a "
                "byte-level BPE [tokenizer-file-malformed]"
            )
        if len(product) > LONGEST:
            raise ValueError(
                f"--merge-file {path}, merge {number}: makes a piece of {len(product)} bytes; at "
                f"most {LONGEST} are possible [tokenizer-file-malformed]"
            )
        known.add(product)
    reached = set(byte_alphabet())
    order = _Order(merges)
    for left, right in merges:
        if left in reached and right in reached and order.meet(left, right):
            reached.add(left + right)
    made = (left + right for left, right in merges)
    return [product for product in made if product in reached]


class _Order:
    """Which pair makes each product, and when."""

    def __init__(self, merges: Sequence[tuple[str, str]]):
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.pairs = {left + right: (left, right) for left, right in merges}
        # of each piece the rank of the merge that makes it
        self.made = dict.fromkeys(byte_alphabet(), -1)
        self.made |= {left + right: rank for rank, (left, right) in enumerate(merges)}

    def meet(self, left: str, right: str) -> bool:
        """Whether two pieces side by side, each merged from its own bytes, still stand there when
        their own merge comes: no earlier merge joined the end of one with the start of the other.

        Goes back in time over the pairs of neighbours that met there. A merge takes its places from
        left to right: of two equal pieces the left one was made first, and the left one is merged
        with what is before it before a pair of the same rank takes it.
        """
        ranks = self.ranks
        pairs = self.pairs
        made = self.made
        end = begin = ranks[left, right]  # when the merges come that take them away
        left_made = made[left]
        right_made = made[right]
        while True:
            if left_made > right_made:
                end = left_made
                left = pairs[left][1]
                left_made = made[left]
            elif right_made >= 0:
                begin = right_made
                right = pairs[right][0]
                right_made = made[right]
            else:
                return True
            rank = ranks.get((left, right), end)
            if rank < end and rank <= begin:
                return False


@functools.cache
def _byte_of() -> Mapping[str, int]:
    return {character: byte for byte, character in enumerate(byte_alphabet())}


def bytes_of(piece: str) -> bytes:
    """The bytes of a piece; an added piece, which is not in the byte alphabet, is UTF-8."""
    try:
        return bytes(map(_byte_of().__getitem__, piece))
    except KeyError:
        return piece.encode("utf-8")
