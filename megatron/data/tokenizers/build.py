"""Builds the tokenizer of a configuration; the types have Megatron's names."""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron.config.checks import tokenizer as check_tokenizer
from megatron.config.checks.tokenizer import BYTE_VOCAB_SIZE
from megatron.config.tokenizer import (
    SENTENCEPIECE,
    TIKTOKEN_SPECIAL,
    TIKTOKEN_VOCAB_SIZE,
    TOKENIZER_FILES,
    TokenizerConfig,
)
from megatron.data.tokenizers.base import Ids, Tokenizer

__all__ = [
    "ByteTokenizer",
    "NullTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "tokenizer_from",
]


class ByteTokenizer(Tokenizer):
    """A token for each byte of the text's UTF-8: ids 0 to 255 are the bytes, `eod` is 256. It needs
    no file."""

    vocab_size = BYTE_VOCAB_SIZE
    eod = eos = BYTE_VOCAB_SIZE - 1
    special = MappingProxyType({"<|endoftext|>": BYTE_VOCAB_SIZE - 1})

    def encode(self, text: str) -> Ids:
        """The bytes of a text, uint8 [n]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, `eod` becomes <|endoftext|>."""
        encoded = [
            b"<|endoftext|>" if index == self.eod else bytes([index]) for index in map(int, ids)
        ]
        return b"".join(encoded).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Text that already is ids: whole numbers with white space between. `eod` is the last id,
    `vocab_size` - 1."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str) -> Ids:
        """The numbers in a text. Raises ValueError for other words and numbers outside the
        vocabulary."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                last = self.vocab_size - 1
                raise ValueError(
                    f"found {word[:40]!r} where NullTokenizer reads whole numbers from 0 to {last}"
                )
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        """The numbers with spaces between."""
        return " ".join(str(int(index)) for index in ids)

    def settings(self) -> dict[str, Any]:
        """See `Tokenizer.settings`."""
        return {"vocab_size": self.vocab_size}


def tokenizer_from(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of these flags. Raises ValueError with one line for each problem (flag, value,
    remedy).

    `vocab_size` is NullTokenizer's and TikTokenizer's size; for the others it is checked against
    the tokenizer's.
    """
    problems = list(check_tokenizer.problems(config))
    if problems:
        raise ValueError("\n".join(problems))
    tokenizer = _make(config)
    if config.vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"--vocab-size {config.vocab_size}: {config.tokenizer} has "
            f"{tokenizer.vocab_size} ids; omit --vocab-size (padding for the model is "
            "added later) [vocab-size-not-that-of-tokenizer]"
        )
    return tokenizer


def _make(config: TokenizerConfig) -> Tokenizer:
    kind = config.tokenizer
    assert kind is not None  # `check_tokenizer.problems` has it, and what its type needs
    if kind == "NullTokenizer":
        assert config.vocab_size is not None
        return NullTokenizer(config.vocab_size)
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    files = [getattr(config, flag) for flag, _ in TOKENIZER_FILES[kind]]
    if TOKENIZER_FILES[kind] is SENTENCEPIECE:
        from megatron.data.tokenizers import sentencepiece

        make = getattr(sentencepiece, kind)
        extra = [config.vocab_extra_ids] * (kind == "SentencePieceTokenizer")
        return make(*files, *extra)
    from megatron.data.tokenizers import bpe

    if kind == "GPT2BPETokenizer":
        return bpe.GPT2BPETokenizer(*files)
    if kind == "HuggingFaceTokenizer":
        return bpe.HuggingFaceTokenizer(*files)
    return bpe.TikTokenizer(
        files[0],
        config.tiktoken_pattern or "v2",
        config.vocab_size or TIKTOKEN_VOCAB_SIZE,
        config.tiktoken_num_special_tokens,
        config.tiktoken_special_tokens or TIKTOKEN_SPECIAL,
    )


def build_tokenizer(tokenizer_type: str | None, **flags: Any) -> Tokenizer:
    """The tokenizer of this type; `flags` are the other fields of `TokenizerConfig`. Raises as
    `tokenizer_from`."""
    return tokenizer_from(TokenizerConfig(tokenizer_type=tokenizer_type, **flags))
