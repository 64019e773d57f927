"""How many ids a tokenizer has by its file alone, for --dry-run."""

from __future__ import annotations

from pathlib import Path

from megatron.small_files import path_inside, read_bytes, read_json


def ids_in_file(kind: str, path: str) -> int | None:
    """Number of ids of a tokenizer by its file alone, without its library; None where that is not
    known."""
    try:
        file = Path(path)
        if kind == "HuggingFaceTokenizer":
            return _json_ids(file if file.is_file() else path_inside(file, "tokenizer.json"))
        if kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
            return _pieces(read_bytes(file))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        # building the tokenizer says what is wrong with it
        pass
    return None


def _json_ids(path: Path) -> int:
    """Of a tokenizer.json: one more than the highest id."""
    content = read_json(path)
    vocab = content["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in content.get("added_tokens") or ()]
    return max(len(set(ids)), max(ids) + 1)


def _pieces(data: bytes) -> int:
    """Of a SentencePiece model, a protocol buffer: how often its field 1, a piece, occurs. Raises
    IndexError, ValueError."""
    offset = count = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        size, after = (
            _varint(data, offset) if key & 7 in (0, 2) else ({1: 8, 5: 4}[key & 7], offset)
        )
        count += key == 1 << 3 | 2
        offset = after + (0 if key & 7 == 0 else size)
    if offset != len(data):
        raise ValueError("cut short")
    return count


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """A number of a protocol buffer, and where the next one begins."""
    value = shift = 0
    while data[offset] & 0x80:
        value |= (data[offset] & 0x7F) << shift
        shift += 7
        offset += 1
    return value | data[offset] << shift, offset + 1
