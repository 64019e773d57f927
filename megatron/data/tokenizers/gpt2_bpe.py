"""The files of GPT-2's byte-level BPE, vocab.json and merges.txt: reading and checks."""

import codecs
import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
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
def _newer_characters(first_unknown: int) -> np.ndarray:
    """bool [0x110000]: characters that this Python's Unicode tables do not know, and all from
    `known` on."""
    newer = np.ones(0x110000, dtype=bool)
    newer[:first_unknown] = list(
        map("Cn".__eq__, map(unicodedata.category, map(chr, range(first_unknown))))
    )
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
            f"--vocab-file {path}: not a JSON file ({error}); give GPT-2's vocab.json, and "
            "merges.txt as --merge-file [tokenizer-file-malformed]"
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
    index = {piece: byte for byte, piece in enumerate(byte_alphabet())}  # rises with the rank
    for number, (left, right) in enumerate(merges, start=1):
        product = left + right
        if left not in index or right not in index or product in index:
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
        index[product] = 255 + number
    names = itertools.chain.from_iterable(merges)
    halves = np.fromiter(map(index.__getitem__, names), np.int64).reshape(-1, 2)
    reached = np.ones(len(index), bool)
    reached[256:] = _meet(halves)
    if not reached.all():  # nor is what is made of such a product
        for merge, (left, right) in enumerate(halves, start=256):
            reached[merge] &= reached[left] and reached[right]
    return list(itertools.compress(index, reached))[256:]


def _meet(halves: np.ndarray) -> np.ndarray:
    """Of each merge, whether its two pieces side by side, each merged from its own bytes, still
    stand there when the merge comes: no earlier merge joined the end of one with the start of the
    other. `halves` int64 [n, 2]: what each merge joins, bytes as they are and products as
    256 + rank; the result is bool [n].

    Goes back in time over the pairs of neighbours that met there, for all merges at once. A merge
    takes its places from left to right: of two equal pieces the left one was made first, and the
    left one is merged with what is before it before a pair of the same rank takes it.
    """
    size = 256 + len(halves)
    keys = halves @ [size, 1]
    by_key = np.argsort(keys)
    keys = keys[by_key]
    left_half, right_half = np.pad(halves, ((256, 0), (0, 0))).T  # a byte has none
    meet = np.ones(len(halves), bool)
    merge = np.arange(len(halves))
    left, right = halves.T
    end = begin = merge + 256  # the merges that take the two away
    while len(merge):
        bytes_both = np.maximum(left, right) < 256
        left_is_newer = left > right
        end = np.where(left_is_newer, left, end)
        begin = np.where(left_is_newer, begin, right)
        left, right = (
            np.where(left_is_newer, right_half[left], left),
            np.where(left_is_newer, right, left_half[right]),
        )
        key = left * size + right
        index = np.searchsorted(keys, key).clip(max=len(keys) - 1)
        joined = np.where(keys[index] == key, by_key[index] + 256, end)
        apart = (joined < end) & (joined <= begin) & ~bytes_both
        meet[merge[apart]] = False
        going = ~(apart | bytes_both)
        merge, left, right, end, begin = (
            array[going] for array in (merge, left, right, end, begin)
        )
    return meet


@functools.cache
def _charmap() -> Any:
    return codecs.charmap_build("".join(byte_alphabet()))


def bytes_of(piece: str) -> bytes:
    """The bytes of a piece; an added piece, which is not in the byte alphabet, is UTF-8."""
    try:
        return codecs.charmap_encode(piece, "strict", _charmap())[0]
    except UnicodeEncodeError:
        return piece.encode("utf-8")
