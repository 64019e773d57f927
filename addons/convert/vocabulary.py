"""extend-vocabulary: makes a run directory of a model with the tokens that a tokenizer adds to its
own. Old rows of embedding and output layer stay bit for bit; new ones begin among them, since rows
drawn as for a new model would take probability from all old tokens (Hewitt 2021)."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.data.tokenizers.bpe import EXTENDS, HuggingFaceTokenizer
from megatron.data.tokenizers.metadata import fingerprint

from .added_tokens import AddedTokens, Way, added_tokens
from .hf_files import CONFIG, new_folder, side_files
from .links import is_vocabulary
from .native import NativeCheckpoint, write_checkpoint

_AT_A_TIME = 64  # new rows that are drawn together: each takes a number for every old one


def new_rows(old: torch.Tensor, added: AddedTokens, seed: int) -> torch.Tensor:
    """The rows of the added tokens, of the old ones [first, h]; in their format."""
    n, size = len(old), added.size
    mean = old.mean(0, dtype=torch.float64)
    new = mean.repeat(size - n, 1)
    for index, ids in added.pieces.items():
        new[index - n] = old[ids].double().mean(0)
    if added.way == "drawn":
        # (sum of g_i (row_i - mean)) / sqrt(n - 1) with normal g_i has the covariance of the rows
        random = torch.Generator().manual_seed(seed)
        wide = old.float()
        for part in new.split(_AT_A_TIME):
            normal = torch.empty(len(part), n).normal_(generator=random)
            spread = (normal @ wide).double() - normal.sum(1, dtype=torch.float64).outer(mean)
            part += spread / max(1, n - 1) ** 0.5
    return new.to(old.dtype)


def _extended(native: NativeCheckpoint, name: str, added: AddedTokens, seed: int) -> torch.Tensor:
    """The vocabulary's rows in their format; what is behind the old tokens is padding."""
    old = native.reader.read(name)[: added.first]
    return torch.cat((old, new_rows(old, added, seed)))


def extend_vocabulary(
    source: Path, target: Path, folder: Path, *, way: Way = "pieces", step: int | None = None
) -> str:
    """Make a run directory with the tokens of the Hugging Face tokenizer in `folder`, new rows made
    in this `way`. Returns what to say of it. Raises ConversionError and, as `added_tokens`,
    ValueError."""
    new_folder(target)
    with NativeCheckpoint(source, step) as native:
        old = native.tokenizer()
        added = added_tokens(old, HuggingFaceTokenizer(str(folder)), way, source, folder)
        weights = []
        for name in native.weights():
            dtype, shape = native.reader.dtype(name), tuple(native.reader.shape(name))
            make = partial(native.reader.read, name)
            if is_vocabulary(name):
                make = partial(_extended, native, name, added, native.config.training.seed)
                shape = (added.size, *shape[1:])
            weights.append(Entry(name, dtype, shape, make))
        family = native.base.get("model_type", "")
        with tempfile.TemporaryDirectory() as made:
            files = [*side_files(folder), Path(made) / EXTENDS]
            files[-1].write_text(json.dumps([*old.extends, fingerprint(old.identity())]))
            if native.base:
                files.append(Path(made) / CONFIG)
                config = {**native.base, "vocab_size": added.size}
                files[-1].write_text(json.dumps(config, indent=2))
            written = write_checkpoint(target, native.model, weights, added.size, family, files)
    return f"{written}: {added}; iteration 0, without optimizer state"
