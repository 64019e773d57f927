"""The model card of an export: README.md with the table that Hugging Face's hub reads, and what the
checkpoint knows of its training. What it does not know, such as data and license, is not there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron.arguments import values_of
from megatron.checkpoint.safetensors_file import Entry

from .native import NativeModel

NAME = "README.md"


def card(native: NativeModel, config: dict[str, Any], tensors: Sequence[Entry]) -> bytes:
    """The content of README.md; `config` and `tensors` are those of the export."""
    family = config["model_type"]
    rows = {
        "architecture": family,
        "parameters": f"{sum(math.prod(tensor.shape) for tensor in tensors):,}",
        "number format": str(tensors[0].dtype).removeprefix("torch."),
        "context": f"{native.model.max_position_embeddings:,} tokens",
        "vocabulary": f"{config['vocab_size']:,} rows",
        "tokenizer": native.state.data.get("tokenizer", {}).get("class"),
        **_training(native),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"tags:\n- {family}\n- megatron-gpt-pretraining\n---\n\n"
        f"# {family}, {rows['parameters']} parameters\n\n| | |\n|---|---|\n{table}"
    ).encode()


def _training(native: NativeModel) -> dict[str, str | None]:
    """Rows about how the weights came to be."""
    state, config = native.state, native.config
    versions = {name: state.versions.get(name) for name in ("suite", "commit", "torch")}
    trained = state.consumed_train_samples - state.skipped_train_samples
    tokens = trained * config.model.seq_length
    most = "at most " if values_of(config).get("pad_samples") else ""  # the rest is padding
    begin = native.base.get("model_type")
    rows = {
        "started from": f"a Hugging Face model of family {begin}" if begin else None,
        "iteration": f"{state.iteration:,}",
        "trained on": f"{trained:,} samples of {config.model.seq_length:,} tokens: {most}"
        f"{tokens:,} tokens",
        "library": f"megatron-gpt-pretraining {versions['suite']}, torch {versions['torch']}",
        "commit": versions["commit"],
    }
    return rows if trained else rows | {"trained on": None}
