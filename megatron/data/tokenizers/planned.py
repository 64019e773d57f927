"""The size of a vocabulary for a plan, also where the tokenizer's files are not on this machine."""

from megatron.config.tokenizer import TIKTOKEN_VOCAB_SIZE, TOKENIZER_FILES, TokenizerConfig
from megatron.data.tokenizers.build import tokenizer_from

GPT2_VOCAB_SIZE = 50257


def planned_vocabulary(config: TokenizerConfig) -> tuple[int, str]:
    """(size, where it comes from) of the vocabulary as far as flags and files of this machine say
    it: a plan needs none of them."""
    if config.vocab_size is not None:
        return config.vocab_size, "--vocab-size"
    if config.tokenizer == "TikTokenizer":
        return TIKTOKEN_VOCAB_SIZE, "TikTokenizer's, without --vocab-size"
    try:
        size = tokenizer_from(config).vocab_size
    except (ValueError, OSError):  # the notes of a dry run say why
        return GPT2_VOCAB_SIZE, "assumed, GPT-2's; give --vocab-size to plan for another"
    for name, _ in TOKENIZER_FILES[config.tokenizer or ""]:
        return size, f"--{name.replace('_', '-')} {getattr(config, name)}"
    return size, f"{config.tokenizer}'s"
