"""Rules of TikTokenizer's flags, for training and for tools/preprocess_data.py alike, and how many
ids a tokenizer's file has. Builds no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

# Special pieces that TikTokenizer's ids begin with, in this order, unless others are given.
TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
TIKTOKEN_VOCAB_SIZE = 1 << 17
BYTE_VOCAB_SIZE = 257  # ByteTokenizer: the 256 bytes and the end of a document


def tiktoken_problems(
    vocab_size: int | None, reserved: int, special: Sequence[str] | None
) -> Iterator[str]:
    """What is wrong with the number of ids, how many of them are `reserved`, and the names of
    `special` pieces."""
    size = vocab_size or TIKTOKEN_VOCAB_SIZE
    names = special or TIKTOKEN_SPECIAL
    if not 0 < reserved < size:
        yield (
            f"--tiktoken-num-special-tokens {reserved}: must lie between 1 and --vocab-size "
            f"({size}) [value-out-of-range]"
        )
    if (
        not set(TIKTOKEN_SPECIAL) <= set(names)
        or len(set(names)) != len(names)
        or len(names) > reserved > 0
    ):
        yield (
            f"--tiktoken-special-tokens {' '.join(names)}: give each once, all of "
            f"{' '.join(TIKTOKEN_SPECIAL)} among them, and at most --tiktoken-num-special-tokens "
            f"({reserved}) [tiktoken-special-tokens-incomplete]"
        )


def ids_in_file(kind: str, path: str) -> int | None:
    """Number of ids of a tokenizer by its file alone, without its library; None where that is not
    known."""
    try:
        file = Path(path)
        if kind == "HuggingFaceTokenizer":
            return _json_ids(file if file.is_file() else file / "tokenizer.json")
        if kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
            return _pieces(file.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        # building the tokenizer says what is wrong with it
        pass
    return None


def _json_ids(path: Path) -> int:
    """Of a tokenizer.json: one more than the highest id."""
    content = json.loads(path.read_bytes())
    vocab = content["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in content.get("added_tokens") or ()]
    return max(len(set(ids)), max(ids) + 1)


def _pieces(data: bytes) -> int:
    """Of a SentencePiece model, a protocol buffer: how often its field 1, a piece, occurs. Raises
    IndexError, ValueError."""
    at = count = 0
    while at < len(data):
        key, at = _varint(data, at)
        size, after = _varint(data, at) if key & 7 in (0, 2) else ({1: 8, 5: 4}[key & 7], at)
        count += key == 1 << 3 | 2
        at = after + (0 if key & 7 == 0 else size)
    if at != len(data):
        raise ValueError("cut short")
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of a protocol buffer, and where the next one begins."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1
