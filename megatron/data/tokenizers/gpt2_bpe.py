"""GPT-2's byte-level BPE in plain Python: the definition that faster engines must equal.

Source of the algorithm: Sennrich et al. 2016 (arXiv:1508.07909) over bytes, as Radford et al. 2019
(GPT-2) apply it. Megatron's particulars: `<|endoftext|>` in a text is ordinary text, and a piece
without an id becomes id 0.
"""

from __future__ import annotations

import functools
import heapq
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.preprocess.jsonl import json_value
from megatron.small_files import read_bytes, read_text

try:
    import regex
# said where it is needed: another engine may do the work, and a tool's --help needs none
except ImportError:
    regex = None

# How GPT-2 cuts text before merging: an English contraction, a run of letters, of digits or of
# anything else, each with one space before it if there is one; white space keeps its last character
# back for the run that follows it.
GPT2_PATTERN = r"'(?:[sdmt]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The published GPT-2 files, whose merges are known to pass `is_canonical` (a test runs it on them).
GPT2_SHA256 = (
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",  # vocab.json
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",  # merges.txt
)


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

    Each engine answers by the age of its tables, so such a text (they are rare) is left to the
    plain implementation.
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


def merge_symbols(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Merge neighbours until no pair has a rank: always the best pair left, all its occurrences
    from left to right.

    O(n log n) in the number of symbols, so that one endless run of letters does not stop a job.
    """
    pieces: list[str | None] = list(symbols)
    before = list(range(-1, len(pieces) - 1))
    after = list(range(1, len(pieces) + 1))
    heap = [
        (ranks[pair], left)
        for left, pair in enumerate(zip(symbols, symbols[1:], strict=False))
        if pair in ranks
    ]
    heapq.heapify(heap)

    def offer(left: int) -> None:
        rank = ranks.get((pieces[left], pieces[after[left]]))
        if rank is not None:
            heapq.heappush(heap, (rank, left))

    while heap:
        rank = heap[0][0]
        places = []
        while heap and heap[0][0] == rank:
            places.append(heapq.heappop(heap)[1])
        for left in places:
            right = after[left]
            if (
                right == len(pieces)
                or pieces[left] is None
                or ranks.get((pieces[left], pieces[right])) != rank
            ):
                continue  # an earlier merge took one of the two
            pieces[left], pieces[right] = pieces[left] + pieces[right], None
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
                offer(left)
            if before[left] >= 0:
                offer(before[left])
    return [piece for piece in pieces if piece is not None]


class PlainBPE:
    """Text to GPT-2 ids and back by the book: cut with `GPT2_PATTERN`, merge each cut's bytes, look
    the pieces up.

    Slow (about 1 MB/s) and always right. Raises ValueError where text is to be cut and the `regex`
    package is missing.
    """

    def __init__(self, vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]]):
        self.vocabulary = vocabulary
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
        self._cut_ids: Callable[[str], list[int]] = functools.lru_cache(maxsize=1 << 17)(
            self._encode_cut
        )

    @functools.cached_property
    def _pieces(self) -> dict[int, str]:
        return {index: piece for piece, index in self.vocabulary.items()}

    def _encode_cut(self, cut: str) -> list[int]:
        alphabet = byte_alphabet()
        pieces = merge_symbols([alphabet[byte] for byte in cut.encode("utf-8")], self.ranks)
        return [self.vocabulary.get(piece, 0) for piece in pieces]

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing in it is special."""
        ids: list[int] = []
        for cut in gpt2_cuts(text):
            ids += self._cut_ids(cut)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        text = bytearray()
        for index in ids:
            piece = self._pieces[int(index)]
            if all(character in self._byte_of for character in piece):
                text += bytes(self._byte_of[character] for character in piece)
            else:  # an added piece that was written as plain text
                text += piece.encode("utf-8")
        return text.decode("utf-8", errors="replace")


def gpt2_cuts(text: str) -> list[str]:
    """Cut a text by `GPT2_PATTERN`; joined, the cuts are the text. Raises ValueError if `regex` is
    not installed."""
    if regex is None:
        raise ValueError(
            "--tokenizer-type GPT2BPETokenizer: needs the package regex; run: pip install regex "
            "[package-missing]"
        )
    return regex.findall(GPT2_PATTERN, text)


def is_well_formed(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> bool:
    """Whether every byte and product has an id, and each merge makes something new out of bytes and
    earlier products.

    Then no piece is unknown, and whether equal pairs are merged one by one or all at once makes no
    difference.
    """
    known = set(byte_alphabet())
    if not all(byte in vocabulary for byte in known):
        return False
    for left, right in merges:
        product = left + right
        if product in known or product not in vocabulary or left not in known or right not in known:
            return False
        known.add(product)
    return True


def is_canonical(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> bool:
    """Whether merging "the neighbours that together have the lowest id", as tiktoken does, is the
    same as `merges`.

    It is for well-formed merges if ids rise with them and each product's own bytes merge back into
    it: then, at any moment, what stands in the place of a product is what its bytes alone give, so
    the pair with its id is its merge.
    """
    if not is_well_formed(vocabulary, merges):
        return False
    ids = [vocabulary[left + right] for left, right in merges]
    order = {pair: rank for rank, pair in enumerate(merges)}
    return ids == sorted(ids) and all(
        len(merge_symbols(left + right, order)) == 1 for left, right in merges
    )


def piece_ranks(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]
) -> dict[bytes, int]:
    """The ids of the 256 bytes and of all products by their bytes; no added piece is among them."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    pieces = [*byte_of, *(left + right for left, right in merges)]
    return {bytes(byte_of[character] for character in piece): vocabulary[piece] for piece in pieces}
