"""Which tokenizer made a pair, in a small JSON file beside it. Knows no tokenizer, only what one says of itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any


def json_path(path_prefix: str) -> str:
    """The file beside the pair of this prefix."""
    return f"{path_prefix}.json"


def vocabulary_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the ids: all of `Tokenizer.identity` but where its files lie."""
    return {key: value for key, value in identity.items() if key != "files"}


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A hash of what decides the ids, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(vocabulary_of(identity), sort_keys=True).encode()).hexdigest()


def describe(identity: Mapping[str, Any], vocab_size: int, counts: Mapping[str, int | bool]) -> str:
    """The file's text: the tokenizer, and counts of what was written."""
    tokenizer = {**vocabulary_of(identity), "vocab_size": vocab_size, "fingerprint": fingerprint(identity)}
    return json.dumps({"tokenizer": tokenizer, **counts}, indent=1) + "\n"


def check(path_prefix: str, identity: Mapping[str, Any]) -> None:
    """Raise ValueError if the pair says that another tokenizer made it. Plain numbers (NullTokenizer) fit any other."""
    path = json_path(path_prefix)
    if not os.path.exists(path):
        return
    try:
        with open(path, encoding="utf-8") as file:
            made_by = json.load(file)["tokenizer"]
        name, mark = made_by["class"], made_by["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: does not say which tokenizer made {path_prefix}.bin ({type(error).__name__}: {error}); "
                         "run tools/preprocess_data.py again, or remove the file") from None
    if mark == fingerprint(identity) or "NullTokenizer" in (name, identity["class"]):
        return
    raise ValueError(
        f"--data-path {path_prefix}: was made by {name} (fingerprint {mark[:12]}), this run has {identity['class']} "
        f"({fingerprint(identity)[:12]}), so its ids mean other text; give the vocabulary it was made with, or tokenize "
        f"again (if you know that both give the same ids, remove {path})"
    )
