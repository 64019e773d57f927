"""Rules of the tokenizer's flags, of training and of tools/preprocess_data.py."""

import contextlib
import difflib
import os
from collections.abc import Iterator

from megatron.config.tokenizer import TOKENIZER_FILES, TokenizerConfig

BYTE_VOCAB_SIZE = 257  # ByteTokenizer: the 256 bytes and the end of a document


def problems(config: TokenizerConfig) -> Iterator[str]:
    """Everything that is wrong with these flags, one line each with flag, value and remedy; no file
    is read."""
    kind = config.tokenizer or ""
    yield from file_problems(config, kind)
    if kind == "NullTokenizer" and config.vocab_size is None:
        yield (
            "--vocab-size is missing: NullTokenizer needs the number of ids; give --vocab-size N "
            "[flag-missing]"
        )
    yield from flag_problems(config)


def flag_problems(config: TokenizerConfig) -> Iterator[str]:
    """What is wrong whatever files there are."""
    kind = config.tokenizer
    size = config.vocab_size
    if kind not in TOKENIZER_FILES:
        yield unknown_type(kind)
    elif kind == "ByteTokenizer" and size not in (None, BYTE_VOCAB_SIZE):
        yield (
            f"--vocab-size {size}: ByteTokenizer has {BYTE_VOCAB_SIZE} ids (256 bytes and the end "
            "of a document); omit --vocab-size [vocab-size-not-that-of-tokenizer]"
        )
    elif kind == "TikTokenizer":
        from megatron.config.checks.tiktoken import tiktoken_problems

        yield from tiktoken_problems(
            size, config.tiktoken_num_special_tokens, config.tiktoken_special_tokens
        )


def unknown_type(kind: str | None) -> str:
    """The problem of a --tokenizer-type that does not exist, or of None where one is needed."""
    kinds = ", ".join(TOKENIZER_FILES)
    if kind is None:
        return f"--tokenizer-type is missing: give one of {kinds} [flag-missing]"
    if kind.startswith("BertWordPiece"):
        return (
            f"--tokenizer-type {kind}: BERT is not trained here; use one of {kinds} "
            "[tokenizer-unknown]"
        )
    by_lower = {name.lower(): name for name in TOKENIZER_FILES}
    # what BigScience and BigCode call one that is a tokenizer.json
    by_lower |= dict.fromkeys(("pretrainedfromhf", "tokenizerfromfile"), "HuggingFaceTokenizer")
    close = difflib.get_close_matches(kind.lower(), by_lower, 1, 0.35)
    hint = f"did you mean {by_lower[close[0]]}? Known: {kinds}" if close else f"use one of {kinds}"
    return f"--tokenizer-type {kind}: there is no such tokenizer; {hint} [tokenizer-unknown]"


def file_problems(config: TokenizerConfig, kind: str) -> Iterator[str]:
    """The files of a tokenizer that are not given, or that cannot be read on this machine."""
    for name, description in TOKENIZER_FILES.get(kind, ()):
        flag = "--" + name.replace("_", "-")
        path = getattr(config, name)
        if not path:
            yield f"{flag} is missing: {kind} needs {description}; give {flag} PATH [flag-missing]"
        elif not os.path.exists(path):
            where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
            yield (
                f"{flag} {path}: no such file{where}; {kind} needs {description} on this machine: "
                f"give {flag} PATH{_near_file(path)} [tokenizer-file-missing]"
            )
        elif os.path.isdir(path) and kind != "HuggingFaceTokenizer":
            yield f"{flag} {path}: is a directory; {kind} needs {description} [path-is-a-directory]"
        elif not os.access(path, os.R_OK):
            yield f"{flag} {path}: cannot be read; change its permissions [file-not-readable]"


def _near_file(path: str) -> str:
    folder, name = os.path.split(path)
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(folder or "."))
    close = difflib.get_close_matches(name, names, 1, 0.6)
    return f"; there is {os.path.join(folder, close[0])}" if close else ""
