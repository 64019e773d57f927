"""Rules of the flags of TikTokenizer."""

from collections.abc import Iterator, Sequence

from megatron.config.tokenizer import TIKTOKEN_SPECIAL, TIKTOKEN_VOCAB_SIZE


def tiktoken_problems(
    vocab_size: int | None, reserved: int, special: Sequence[str] | None
) -> Iterator[str]:
    """What is wrong with the number of ids, how many of them are `reserved`, and the names of
    `special` pieces."""
    size = vocab_size or TIKTOKEN_VOCAB_SIZE
    names = special or TIKTOKEN_SPECIAL
    if not 0 < reserved < size:
        yield (
            f"--tiktoken-num-special-tokens {reserved}: must be between 1 and --vocab-size "
            f"({size}) [value-out-of-range]"
        )
    if (
        not set(TIKTOKEN_SPECIAL) <= set(names)
        or len(set(names)) != len(names)
        or len(names) > reserved > 0
    ):
        yield (
            f"--tiktoken-special-tokens {' '.join(names)}: give each once, all of "
            f"{' '.join(TIKTOKEN_SPECIAL)} among them, and at most --tiktoken-num-special-tokens "
            f"({reserved}) [tiktoken-special-tokens-incomplete]"
        )
