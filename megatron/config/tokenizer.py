"""Sizes and rules of tokenizers' flags, for training and for tools/preprocess_data.py alike. Knows no tokenizer."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

# Special pieces that TikTokenizer's ids begin with, in this order, unless others are given.
TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
TIKTOKEN_VOCAB_SIZE = 1 << 17
BYTE_VOCAB_SIZE = 257  # ByteTokenizer: the 256 bytes and the end of a document


def tiktoken_problems(vocab_size: int | None, reserved: int, special: Sequence[str] | None) -> Iterator[str]:
    """What is wrong with the number of ids, how many of them are `reserved`, and the names of `special` pieces."""
    size, names = vocab_size or TIKTOKEN_VOCAB_SIZE, special or TIKTOKEN_SPECIAL
    if not 0 < reserved < size:
        yield f"--tiktoken-num-special-tokens {reserved}: must lie between 1 and --vocab-size ({size})"
    if not set(TIKTOKEN_SPECIAL) <= set(names) or len(set(names)) != len(names) or len(names) > reserved > 0:
        yield (f"--tiktoken-special-tokens {' '.join(names)}: give each once, all of {' '.join(TIKTOKEN_SPECIAL)} "
               f"among them, and at most --tiktoken-num-special-tokens ({reserved})")
