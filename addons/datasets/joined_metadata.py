"""What the .json files of several pairs say together, for programs that join or compare pairs."""

from collections.abc import Sequence
from typing import Any

from megatron.data.tokenizers.metadata import NULL, TEXT_BYTES, json_path, maker, note, text_size


def joined_counts(prefixes: Sequence[str]) -> dict[str, int]:
    """Tokens, bytes of text and (of chat data) trained tokens of several pairs together; empty
    where one of them does not say."""
    sizes = [size for prefix in prefixes if (size := text_size(prefix)) is not None]
    if len(sizes) < len(prefixes):
        return {}
    tokens, text_bytes = (sum(column) for column in zip(*sizes, strict=True))
    counts: list[Any] = [(note(prefix) or {}).get("trained_tokens") for prefix in prefixes]
    trained = {} if None in counts else {"trained_tokens": sum(counts)}
    return {"tokens": tokens, TEXT_BYTES: text_bytes, **trained}


def common_maker(prefixes: Sequence[str]) -> dict[str, Any] | None:
    """The tokenizer of all these pairs, as far as they name one; raises ValueError if they name
    two.

    Plain numbers (NullTokenizer) fit any other.
    """
    first: tuple[str, dict[str, Any]] | None = None
    for prefix in prefixes:
        made_by = maker(prefix)
        if made_by is None or first and made_by["class"] == NULL:
            continue
        if (
            first
            and NULL != first[1]["class"]
            and made_by["fingerprint"] != first[1]["fingerprint"]
        ):
            raise ValueError(
                f"{prefix}: was made by {made_by['class']} (fingerprint "
                f"{made_by['fingerprint'][:12]}), {first[0]} by {first[1]['class']} "
                f"({first[1]['fingerprint'][:12]}), so their ids mean other text; tokenize both "
                "with one vocabulary (if you know that both give the same ids, remove "
                f"{json_path(prefix)}) [data-of-another-tokenizer]"
            )
        first = prefix, made_by
    return first[1] if first else None
