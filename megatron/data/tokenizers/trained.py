"""Which tokenizer a trained model takes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.data import DataConfig
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.data.tokenizers.base import Tokenizer


def with_tokenizer(data: DataConfig, flags: Mapping[str, Any]) -> DataConfig:
    """`data` of a run with these tokenizer `flags`. A run of NullTokenizer, on ids alone, takes
    any type; every other one only other files. Raises ValueError."""
    trained = data.tokenizer
    kind = flags.get("tokenizer_type", trained)
    if trained not in (kind, "NullTokenizer"):
        raise ValueError(
            f"--tokenizer-type {kind}: the model was trained with {trained}; omit the flag "
            "[tokenizer-not-that-of-training]"
        )
    needed = [name for name, _ in TOKENIZER_FILES.get(kind, ())]
    for name, value in flags.items():
        if name != "tokenizer_type" and name not in needed:
            add = ", or add --tokenizer-type" if trained == "NullTokenizer" else ""
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: {kind} reads no such file; omit it{add} "
                "[tokenizer-not-that-of-training]"
            )
    if kind != trained and kind != "TikTokenizer":
        flags = {**flags, "vocab_size": None}
    return replace(data, **flags)


def check_ids(rows: int, tokenizer: Tokenizer, directory: object) -> None:
    """Raise ValueError where a model of `rows` ids has not all of the tokenizer."""
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"{directory}: the model has {rows} ids, the tokenizer {tokenizer.vocab_size}; give "
            "the one that its data were made with [tokenizer-not-that-of-training]"
        )
