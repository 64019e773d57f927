"""PREFIX.sources read by its format (docs of megatron/data/document_sources.py), whole and slowly."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any


class RawSources:
    """Of the documents of a pair, or of the parts of a set in their order."""

    def __init__(self, prefix: Path):
        folder = Path(f"{prefix}.parts")
        parts = sorted(folder.glob("*.sources")) if folder.is_dir() else [Path(f"{prefix}.sources")]
        self._documents: list[dict[str, Any]] = []
        self._named: dict[int, list[int]] = {}
        for path in parts:
            self._read(path.read_bytes())

    def _read(self, data: bytes) -> None:
        *_, count, ids, size, _ = struct.unpack("<16sIIQQQQ8x", data[:64])
        before = len(self._documents)
        table = data[64 + 32 * count :]
        pairs = struct.unpack(f"<{2 * ids}Q", table[: 16 * ids])
        assert list(pairs[:ids]) == sorted(pairs[:ids])
        for name, number in zip(pairs[:ids], pairs[ids:], strict=True):
            self._named.setdefault(name, []).append(before + number)
        texts, files = table[16 * ids :][:size], json.loads(table[16 * ids + size :])["files"]
        rows = list(struct.iter_unpack("<QQQII", data[64 : 64 + 32 * count]))
        ends = [row[2] for row in rows[1:]] + [size]
        for (offset, line, start, file, length), end in zip(rows, ends, strict=True):
            place = {"offset": offset, "bytes": length, "line": line or None}
            fields = json.loads(texts[start:end].decode("utf-8", "surrogatepass"))
            where = {"input": files[file][0], "input_bytes": files[file][1], "fields": fields}
            self._documents.append({**where, **(place if length else {"row": offset})})

    def __len__(self) -> int:
        return len(self._documents)

    def document(self, number: int) -> dict[str, Any]:
        """Where it came from, and its fields."""
        return self._documents[number]

    def with_id(self, name: str) -> list[int]:
        """The documents of the hash of an id."""
        text = name.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return self._named.get(int.from_bytes(digest, "little"), [])
