"""Which tokenizer made a pair, the size of its text and the checksums of its files, in a small JSON
file with its prefix."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from megatron import log
from megatron.data.parts import part_set
from megatron.file_sums import table_sum
from megatron.small_files import read_json

NULL = "NullTokenizer"
TEXT_BYTES = "text_bytes"
FILES = "files"  # sizes and checksums of the .bin and the .idx, see `pair_checksums`
CHECKSUM = "checksum"  # of all the rest


def json_path(path_prefix: str) -> str:
    """The .json file of the pair of this prefix."""
    return f"{path_prefix}.json"


def vocabulary_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What determines the ids: `Tokenizer.identity` without the paths of its files and what it
    extends."""
    return {key: value for key, value in identity.items() if key not in ("files", "extends")}


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A hash of what determines the ids, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(vocabulary_of(identity), sort_keys=True).encode()).hexdigest()


def description(
    identity: Mapping[str, Any], vocab_size: int, counts: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of the file, without checksums: the tokenizer, and counts of what was written;
    numbers in a text (NullTokenizer) have no bytes."""
    tokenizer = {
        **vocabulary_of(identity),
        "vocab_size": vocab_size,
        "fingerprint": fingerprint(identity),
    }
    if identity["class"] == NULL:
        counts = {name: count for name, count in counts.items() if name != TEXT_BYTES}
    return {"tokenizer": tokenizer, **counts}


def text_size(path_prefix: str) -> tuple[int, int] | None:
    """(tokens, bytes of UTF-8 text that they stand for) of a pair; None where its file does not say
    (written by an older version, or by another program). Raises ValueError as `maker` does."""
    record = note(path_prefix) or {}
    tokens = record.get("tokens")
    text_bytes = record.get(TEXT_BYTES)
    if type(tokens) is int and tokens > 0 and type(text_bytes) is int and text_bytes > 0:
        return tokens, text_bytes
    return None


def maker(path_prefix: str) -> dict[str, Any] | None:
    """What the pair says of the tokenizer that made it, at least `class` and `fingerprint`; None if
    it says nothing.

    Raises ValueError if its file cannot be understood.
    """
    record = note(path_prefix)
    return record.get("tokenizer") if record else None


def sealed(table: Mapping[str, Any]) -> str:
    """The text of the file of a pair with a checksum of its content."""
    content = {name: value for name, value in table.items() if name != CHECKSUM}
    return json.dumps({**content, CHECKSUM: table_sum(content)}, indent=1) + "\n"


def _check_seal(table: Mapping[str, Any]) -> None:
    """Raise ValueError if a file with checksums was changed; of one bit, also in their names."""
    content = {name: value for name, value in table.items() if name != CHECKSUM}
    if (FILES in table) != (CHECKSUM in table) or (
        FILES in table and table[CHECKSUM] != table_sum(content)
    ):
        raise ValueError("its content differs from its own checksum: it was damaged or edited")
    if FILES in table:
        _ = table[FILES]["bin"]["sum"], table[FILES]["idx"]["sum"]


def note(path_prefix: str, verify: bool = True) -> dict[str, Any] | None:
    """Everything in the pair's file: `tokenizer` (missing where only checksums are known), counts,
    `files`; of a set of parts what theirs say together. None without the file; raises ValueError as
    `maker` does, and (with `verify`) if its content differs from its own checksum."""
    path = json_path(path_prefix)
    if not os.path.exists(path):
        return part_set.joined_note(path_prefix) if part_set.is_set(path_prefix) else None
    try:
        record = read_json(path)
        if not isinstance(record, dict):
            raise TypeError("no JSON object")
        if verify:
            _check_seal(record)
        if "tokenizer" in record or FILES not in record:
            _ = record["tokenizer"]["class"], record["tokenizer"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: does not say which tokenizer made {path_prefix}.bin "
            f"({type(error).__name__}: {error}); run tools/preprocess_data.py again, or remove "
            "the file [tokenizer-record-malformed]"
        ) from None
    return record


def check(path_prefix: str, identity: Mapping[str, Any]) -> None:
    """Raise ValueError if the pair says that another tokenizer made it. Plain numbers
    (NullTokenizer) fit any other, and of a tokenizer that this one extends all ids do."""
    made_by = maker(path_prefix)
    if (
        made_by is None
        or NULL in (made_by["class"], identity["class"])
        or made_by["fingerprint"] == fingerprint(identity)
    ):
        return
    if made_by["fingerprint"] in identity.get("extends", ()):
        log.detail(f" {path_prefix}: made by a tokenizer that this run's adds tokens to")
        return
    raise ValueError(
        f"--data-path {path_prefix}: was made by {made_by['class']} (fingerprint "
        f"{made_by['fingerprint'][:12]}), this run has {identity['class']} "
        f"({fingerprint(identity)[:12]}), so its ids mean other text; give the vocabulary it was "
        "made with, or tokenize again (if you know that both give the same ids, remove "
        f"{json_path(path_prefix)}) [data-of-another-tokenizer]"
    )
