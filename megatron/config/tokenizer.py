"""The tokenizer's flags, of training and of tools/preprocess_data.py, and the files each type is
built from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg

# By type (Megatron's names): (field of the flag, what the file is) of each file.
SENTENCEPIECE = (("tokenizer_model", "a sentencepiece .model file"),)
TOKENIZER_FILES: dict[str, tuple[tuple[str, str], ...]] = {
    "GPT2BPETokenizer": (
        ("vocab_file", "GPT-2's vocab.json"),
        ("merge_file", "GPT-2's merges.txt"),
    ),
    "SentencePieceTokenizer": SENTENCEPIECE,
    "GPTSentencePieceTokenizer": SENTENCEPIECE,
    "Llama2Tokenizer": SENTENCEPIECE,
    "HuggingFaceTokenizer": (
        ("tokenizer_model", "a local tokenizer.json or the directory that holds it"),
    ),
    "TikTokenizer": (("tokenizer_model", "a tiktoken vocabulary in JSON"),),
    "ByteTokenizer": (),
    "NullTokenizer": (),
}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer."""

    tokenizer_type: str | None = arg(
        None,
        help="GPT2BPETokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer, "
        "Llama2Tokenizer, HuggingFaceTokenizer, TikTokenizer, ByteTokenizer (257 ids: the bytes "
        "of UTF-8 and an end-of-document token) or NullTokenizer (default for training: "
        "GPT2BPETokenizer, or NullTokenizer with --mock-data)",
    )
    vocab_file: str | None = arg(None, help="vocab.json of GPT2BPETokenizer")
    merge_file: str | None = arg(None, help="merges.txt of GPT2BPETokenizer")
    tokenizer_model: str | None = arg(None, help="model file or directory of the other tokenizers")
    vocab_size: int | None = arg(
        None,
        help="vocabulary size of NullTokenizer and TikTokenizer; for other tokenizers it is "
        "checked",
    )
    vocab_extra_ids: int = arg(
        0, help="number of <extra_id_N> tokens that SentencePieceTokenizer adds"
    )
    tiktoken_pattern: Literal["v1", "v2"] | None = arg(
        None, help="regular expression by which TikTokenizer splits text (default: v2)", dump=False
    )
    tiktoken_num_special_tokens: int = arg(
        1000, help="number of ids that TikTokenizer reserves for special tokens", dump=False
    )
    tiktoken_special_tokens: tuple[str, ...] | None = arg(
        None, help="names of TikTokenizer's first special tokens", dump=False
    )

    @property
    def tokenizer(self) -> str | None:
        """The type of tokenizer."""
        return self.tokenizer_type
