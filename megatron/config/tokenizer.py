"""The tokenizer's flags, of training and of tools/preprocess_data.py, and the files each type is
built from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.arguments import Needs, arg

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
# TikTokenizer's ids unless flags say otherwise: special pieces, in this order, and how many in all.
TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
TIKTOKEN_VOCAB_SIZE = 1 << 17


def _made_from(name: str, condition: str) -> Needs:
    """Needs a type of tokenizer that reads the file of the flag `name`; types that do not exist are
    a problem of their own."""

    def met(v: Any) -> bool:
        files = TOKENIZER_FILES.get(v.config.data.tokenizer)
        return files is None or name in [flag for flag, _ in files]

    return Needs(condition, met)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer."""

    tokenizer_type: str | None = arg(None, trained=True)
    """GPT2BPETokenizer, SentencePieceTokenizer (the name of a control token in a text, such as
    </s>, becomes that token, as in Megatron), GPTSentencePieceTokenizer, Llama2Tokenizer,
    HuggingFaceTokenizer, TikTokenizer, ByteTokenizer (257 ids: the bytes of UTF-8 and an
    end-of-document token) or NullTokenizer (default for training: GPT2BPETokenizer, or
    NullTokenizer with --mock-data)"""

    vocab_file: str | None = arg(
        None, needs=_made_from("vocab_file", "--tokenizer-type GPT2BPETokenizer")
    )
    """vocab.json of GPT2BPETokenizer"""

    merge_file: str | None = arg(
        None, needs=_made_from("merge_file", "--tokenizer-type GPT2BPETokenizer")
    )
    """merges.txt of GPT2BPETokenizer"""

    tokenizer_model: str | None = arg(
        None,
        needs=_made_from("tokenizer_model", "a --tokenizer-type that is made from a model file"),
    )
    """model file or directory of the other tokenizers"""

    vocab_size: int | None = arg(None, trained=True, minimum=1)
    """vocabulary size of NullTokenizer and TikTokenizer; for other tokenizers it is checked"""

    vocab_extra_ids: int = arg(
        0, trained=True, needs=("tokenizer_type", "SentencePieceTokenizer"), minimum=0
    )
    """number of <extra_id_N> tokens that SentencePieceTokenizer adds"""

    tiktoken_pattern: Literal["v1", "v2"] | None = arg(
        None, trained=True, needs=("tokenizer_type", "TikTokenizer")
    )
    """regular expression by which TikTokenizer splits text (default: v2)"""

    tiktoken_num_special_tokens: int = arg(
        1000, trained=True, needs=("tokenizer_type", "TikTokenizer")
    )
    """number of ids that TikTokenizer reserves for special tokens"""

    tiktoken_special_tokens: tuple[str, ...] | None = arg(
        None, trained=True, needs=("tokenizer_type", "TikTokenizer")
    )
    """names of TikTokenizer's first special tokens"""

    @property
    def tokenizer(self) -> str | None:
        """The type of tokenizer."""
        return self.tokenizer_type
