"""Builds the tokenizer that the flags ask for. Knows which flags each type needs, and no tokenizer
library.

Types: Megatron's names. What each makes of a text stands at its class.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron import optional
from megatron.arguments import arg
from megatron.config.checks.tokenizer import (
    BYTE_VOCAB_SIZE,
    TIKTOKEN_SPECIAL,
    TIKTOKEN_VOCAB_SIZE,
    tiktoken_problems,
)
from megatron.data.tokenizers.base import Ids, Tokenizer

__all__ = [
    "TOKENIZER_TYPES",
    "ByteTokenizer",
    "NullTokenizer",
    "Tokenizer",
    "TokenizerFlags",
    "build_tokenizer",
]

# The files each type is made from: argument name and what it is.
_MODEL = (("tokenizer_model", "a sentencepiece .model file"),)
TOKENIZER_TYPES: dict[str, tuple[tuple[str, str], ...]] = {
    "GPT2BPETokenizer": (
        ("vocab_file", "GPT-2's vocab.json"),
        ("merge_file", "GPT-2's merges.txt"),
    ),
    "SentencePieceTokenizer": _MODEL,
    "GPTSentencePieceTokenizer": _MODEL,
    "Llama2Tokenizer": _MODEL,
    "HuggingFaceTokenizer": (
        ("tokenizer_model", "a local tokenizer.json or the folder that holds it"),
    ),
    "TikTokenizer": (("tokenizer_model", "a tiktoken vocabulary in JSON"),),
    "ByteTokenizer": (),
    "NullTokenizer": (),
}


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
        parts = [
            b"<|endoftext|>" if index == self.eod else bytes([index]) for index in map(int, ids)
        ]
        return b"".join(parts).decode("utf-8", errors="replace")


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


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags:
    """Tokenizer."""

    tokenizer_type: str | None = arg(None, help="one of " + ", ".join(TOKENIZER_TYPES))
    vocab_file: str | None = arg(None, help="vocab.json of GPT2BPETokenizer")
    merge_file: str | None = arg(None, help="merges.txt of GPT2BPETokenizer")
    tokenizer_model: str | None = arg(
        None,
        help="model file of the other tokenizers; for HuggingFaceTokenizer "
        "tokenizer.json or its directory",
    )
    vocab_size: int | None = arg(
        None, help="number of ids of NullTokenizer and TikTokenizer; checked for the others"
    )
    vocab_extra_ids: int = arg(
        0, help="number of <extra_id_N> pieces that SentencePieceTokenizer adds"
    )
    tiktoken_pattern: str | None = arg(
        None, help="TikTokenizer's split pattern: v1 or v2 (default: v2)"
    )
    tiktoken_num_special_tokens: int = arg(
        1000, help="number of ids that TikTokenizer reserves for special tokens"
    )
    tiktoken_special_tokens: tuple[str, ...] | None = arg(
        None, help="names of TikTokenizer's first special tokens"
    )

    def problems(self) -> list[str]:
        """Everything that is wrong with these flags, one line each with flag, value and remedy;
        nothing is loaded."""
        if self.tokenizer_type not in TOKENIZER_TYPES:
            return [_unknown_type(self.tokenizer_type)]
        problems = []
        for name, what in TOKENIZER_TYPES[self.tokenizer_type]:
            flag = "--" + name.replace("_", "-")
            path = getattr(self, name)
            if not path:
                problems.append(
                    f"{flag}: {self.tokenizer_type} needs {what}; give {flag} PATH [flag-missing]"
                )
            else:
                folder_ok = self.tokenizer_type == "HuggingFaceTokenizer"
                problems += _file_problems(f"{flag} {path}", path, what, folder_ok)
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            problems.append(
                "--vocab-size: NullTokenizer needs the number of ids; give --vocab-size N "
                "[flag-missing]"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            problems.append(
                f"--vocab-size {self.vocab_size}: must be at least 1 [value-out-of-range]"
            )
        if self.vocab_extra_ids < 0:
            problems.append(
                f"--vocab-extra-ids {self.vocab_extra_ids}: must be 0 or more [value-out-of-range]"
            )
        if self.tokenizer_type == "TikTokenizer":
            if self.tiktoken_pattern not in (None, "v1", "v2"):
                problems.append(
                    f"--tiktoken-pattern {self.tiktoken_pattern}: give v1 or v2 "
                    "[value-not-a-choice]"
                )
            problems += tiktoken_problems(
                self.vocab_size, self.tiktoken_num_special_tokens, self.tiktoken_special_tokens
            )
        return problems

    def build(self) -> Tokenizer:
        """The tokenizer these flags ask for. Raises ValueError with one line for each problem
        (flag, value, remedy).

        `vocab_size` is NullTokenizer's and TikTokenizer's size; for the others it is checked
        against the tokenizer's.
        """
        problems = self.problems()
        if problems:
            raise ValueError("\n".join(problems))
        tokenizer = self._make()
        if self.vocab_size not in (None, tokenizer.vocab_size):
            raise ValueError(
                f"--vocab-size {self.vocab_size}: {self.tokenizer_type} has "
                f"{tokenizer.vocab_size} ids; leave --vocab-size away (padding for the model is "
                "added later) [vocab-size-not-that-of-tokenizer]"
            )
        return tokenizer

    def _make(self) -> Tokenizer:
        kind = self.tokenizer_type
        if kind == "NullTokenizer":
            return NullTokenizer(self.vocab_size)
        if kind == "ByteTokenizer":
            return ByteTokenizer()
        if TOKENIZER_TYPES[kind] is _MODEL:
            make = getattr(optional.load("megatron.data.tokenizers.sentencepiece"), kind)
            extra = [self.vocab_extra_ids] * (kind == "SentencePieceTokenizer")
            return make(self.tokenizer_model, *extra)
        bpe = optional.load("megatron.data.tokenizers.bpe")
        if kind == "GPT2BPETokenizer":
            return bpe.GPT2BPETokenizer(self.vocab_file, self.merge_file)
        if kind == "HuggingFaceTokenizer":
            return bpe.HuggingFaceTokenizer(self.tokenizer_model)
        return bpe.TikTokenizer(
            self.tokenizer_model,
            self.tiktoken_pattern or "v2",
            self.vocab_size or TIKTOKEN_VOCAB_SIZE,
            self.tiktoken_num_special_tokens,
            self.tiktoken_special_tokens or TIKTOKEN_SPECIAL,
        )


def build_tokenizer(tokenizer_type: str | None, **flags: Any) -> Tokenizer:
    """The tokenizer of this type; `flags` are the other fields of `TokenizerFlags`. Raises as its
    `build`."""
    return TokenizerFlags(tokenizer_type=tokenizer_type, **flags).build()


def _unknown_type(tokenizer_type: str | None) -> str:
    known = ", ".join(TOKENIZER_TYPES)
    if tokenizer_type is None:
        return f"--tokenizer-type: is needed; give one of {known} [flag-missing]"
    if tokenizer_type.startswith("BertWordPiece"):
        return (
            f"--tokenizer-type {tokenizer_type}: BERT is not trained here; give one of {known} "
            "[tokenizer-unknown]"
        )
    by_lower = {name.lower(): name for name in TOKENIZER_TYPES}
    close = difflib.get_close_matches(tokenizer_type.lower(), by_lower, 1, 0.35)
    hint = f"did you mean {by_lower[close[0]]}? Known: {known}" if close else f"give one of {known}"
    return (
        f"--tokenizer-type {tokenizer_type}: there is no such tokenizer here; {hint} "
        "[tokenizer-unknown]"
    )


def _file_problems(flag: str, path: str, what: str, folder_ok: bool) -> list[str]:
    if not os.path.exists(path):
        where = (
            f"no such file (looked in {os.getcwd()})" if not os.path.isabs(path) else "no such file"
        )
        return [
            (
                f"{flag}: {where}; give {what}, which must be on this machine: nothing is "
                "downloaded [tokenizer-file-missing]"
            )
        ]
    if os.path.isdir(path) and not folder_ok:
        return [f"{flag}: is a directory; give {what} [path-is-a-directory]"]
    if not os.access(path, os.R_OK):
        return [f"{flag}: cannot be read; check its permissions [file-not-readable]"]
    return []
