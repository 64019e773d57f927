"""Second readers of damaged data, with struct and json alone. Each raises ValueError for what is to
be refused."""

import itertools
import json
import struct
from pathlib import Path

VOCAB = 1000
FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}
FLOATS = (6, 7)


def pair(folder: Path) -> tuple[list[bytes], bool]:
    """The bytes of each sequence of d.idx and d.bin, and whether samples of 5 tokens can be trained
    on."""
    idx = (folder / "d.idx").read_bytes()
    data = (folder / "d.bin").read_bytes()
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\0\0":
        raise ValueError("header")
    version, code, sequences, entries = struct.unpack("<QBQQ", idx[9:34])
    expected = 34 + 12 * sequences + 8 * entries
    sizes = (expected, expected + sequences)
    if version != 1 or code not in FORMATS or len(idx) not in sizes or not entries:
        raise ValueError("sizes")
    at = 34 + 4 * sequences
    lengths = struct.unpack(f"<{sequences}i", idx[34:at])
    pointers = struct.unpack(f"<{sequences}q", idx[at : at + 8 * sequences])
    documents = struct.unpack(f"<{entries}q", idx[at + 8 * sequences : expected])
    if documents[0] != 0 or documents[-1] != sequences or list(documents) != sorted(documents):
        raise ValueError("documents")
    size = struct.calcsize(FORMATS[code])
    if min(lengths + pointers, default=0) < 0 or any(pointer % size for pointer in pointers):
        raise ValueError("pointers")
    spans = [(start, start + n * size) for n, start in zip(lengths, pointers, strict=True)]
    filled = sorted(span for span in spans if span[0] < span[1])
    if any(end > after for (_, end), (after, _) in itertools.pairwise(filled)):
        raise ValueError("sequences overlap")
    if max((end for _, end in filled), default=0) != len(data):
        raise ValueError("sizes")
    if any(end > len(data) for _, end in spans):
        raise ValueError("an empty sequence outside")
    found = [data[start:end] for start, end in spans]
    count = sum(lengths)
    ids = struct.unpack(f"<{count}{FORMATS[code]}", b"".join(found))
    usable = count >= 5 and code not in FLOATS and 0 <= min(ids) <= max(ids) < VOCAB
    return found, usable


def texts(folder: Path) -> list[list[list[int]]]:
    """The ids of each document of in.jsonl that has any, as NullTokenizer has them."""
    found = []
    for line in (folder / "in.jsonl").read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        try:
            value = json.loads(line.decode())["text"]
            parts = [value] if isinstance(value, str) else value
            words = [text.split() for text in parts]
            good = isinstance(value, str | list) and all(map(_is_id, itertools.chain(*words)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if good and any(words):
            found.append([[int(word) for word in text] for text in words if text])
    if not found:
        raise ValueError("no text")
    return found


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit() and int(word) < VOCAB
