"""--extend-vocabulary: which tokens the tokenizer of a run adds to that of the checkpoint that it
loads, and a reader that has their rows behind those of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.checkpoint import state_reader
from megatron.checkpoint.filesystem import CheckpointError
from megatron.config import saved_flags
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.load_order import newest_with_good_args
from megatron.config.run_directory import ARGS, STATE, vouched_file
from megatron.config.tree import Config
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import tokenizer_from
from megatron.data.tokenizers.metadata import fingerprint

from .added_tokens import added_tokens


def tokenizer_of(folder: Path, identity: dict[str, Any], tree: type[Config]) -> Tokenizer:
    """The tokenizer that a checkpoint was saved with, of this identity. Raises ValueError where its
    files are not there, or are others now."""
    data = saved_flags.read(folder / ARGS, tree).config.data
    try:
        tokenizer = tokenizer_from(data)
        same = fingerprint(tokenizer.identity()) == fingerprint(identity)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--extend-vocabulary: the tokenizer of {folder}, which the new one is compared with, "
            f"cannot be read: {error}; put its files there again "
            "[checkpoint-of-another-tokenizer]"
        ) from None
    if not same:
        raise ValueError(
            f"--extend-vocabulary: the files of the tokenizer of {folder} have changed since it "
            f"was saved ({', '.join(tokenizer.files)}); put them there again, and the longer "
            "tokenizer in a folder of its own [checkpoint-of-another-tokenizer]"
        )
    return tokenizer


def extend(tokenizer: Tokenizer, c: CheckpointConfig, tree: type[Config]) -> None:
    """Let the tokenizer say what it extends: that of the checkpoint of --load and what that one
    does. Raises ValueError where it only resembles it."""
    assert c.load is not None
    folder = newest_with_good_args(c.load, c.ckpt_step, c.slots_of(c.load))
    text = None if folder is None else vouched_file(folder, STATE)
    if folder is None or text is None:
        return  # the load says what is wrong, or starts from random weights
    try:
        saved = state_reader.parse(text, f"{folder}").data.get("tokenizer")
    except CheckpointError:
        return
    if not saved:
        return
    extends = saved.get("extends", ())
    if fingerprint(saved) != fingerprint(tokenizer.identity()):
        old = tokenizer_of(folder, saved, tree)
        place = ", ".join(tokenizer.files) or type(tokenizer).__name__
        added_tokens(old, tokenizer, "mean", folder, f"--tokenizer-model {place}")
        extends = [*extends, fingerprint(saved)]
    tokenizer.extends = list(dict.fromkeys([*tokenizer.extends, *extends]))
