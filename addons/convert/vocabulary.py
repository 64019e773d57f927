"""extend-vocabulary: makes a run directory of a model with the tokens that a tokenizer adds to its
own. Old rows of embedding and output layer stay bit for bit; new ones begin among them, since rows
drawn as for a new model would take probability from all old tokens (Hewitt 2021)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.data.tokenizers.base import Tokenizer, library
from megatron.data.tokenizers.bpe import EXTENDS, HuggingFaceTokenizer
from megatron.data.tokenizers.metadata import fingerprint
from megatron.small_files import read_bytes

from . import hf_tokenizer
from .hf_files import CONFIG, new_folder, side_files
from .links import ConversionError, is_vocabulary
from .native import NativeCheckpoint, write_checkpoint

_AT_A_TIME = 64  # new rows that are drawn together: each takes a number for every old one


def _engine(tokenizer: Tokenizer, source: Path) -> Any:
    """The tokenizer as one of the library `tokenizers`."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        file = Path(tokenizer.files[0])
        if file.name != "tokenizer.json":
            raise ConversionError(
                f"{file.parent}: has no tokenizer.json; save one with transformers"
            )
        return library("tokenizers", "HuggingFaceTokenizer").Tokenizer.from_buffer(read_bytes(file))
    engine = hf_tokenizer._engine(tokenizer)
    if engine is None:
        raise ConversionError(
            f"{source}: its {type(tokenizer).__name__} has no form as tokenizer.json, with which a "
            "tokenizer could be compared"
        )
    return engine


def _pieces(old: Tokenizer, engine: Any, first: int, size: int) -> dict[int, list[int]]:
    """Of each new id whose text old tokens spell, these."""
    added = {index: token.content for index, token in engine.get_added_tokens_decoder().items()}
    pieces = {}
    for index in range(first, size):
        text = added.get(index) or engine.decode([index], skip_special_tokens=False)
        ids = [] if "\ufffd" in text else [int(each) for each in old.encode(text)]
        if ids and max(ids) < first:
            pieces[index] = ids
    return pieces


def _rows(
    old: torch.Tensor, size: int, way: str, pieces: Mapping[int, list[int]], seed: int
) -> torch.Tensor:
    """The new rows [size - n, h] behind the old ones [n, h], in fp64."""
    n, h = old.shape
    mean = old.mean(0, dtype=torch.float64)
    new = mean.repeat(size - n, 1)
    for index, ids in pieces.items() if way == "pieces" else ():
        new[index - n] = old[ids].double().mean(0)
    if way == "drawn":
        # (sum of g_i (row_i - mean)) / sqrt(n - 1) with normal g_i has the covariance of the rows
        random = torch.Generator().manual_seed(seed)
        wide = old.float()
        for part in new.split(_AT_A_TIME):
            normal = torch.empty(len(part), n).normal_(generator=random)
            spread = (normal @ wide).double() - normal.sum(1, dtype=torch.float64).outer(mean)
            part += spread / max(1, n - 1) ** 0.5
    return new


def _extended(native: NativeCheckpoint, name: str, old_size: int, *more: Any) -> torch.Tensor:
    """The vocabulary's rows in their format; what is behind the old tokens is padding."""
    old = native.reader.read(name)[:old_size]
    return torch.cat((old, _rows(old, *more).to(old.dtype)))


def extend_vocabulary(
    source: Path, target: Path, folder: Path, *, way: str = "pieces", step: int | None = None
) -> str:
    """Make a run directory with the tokens of the Hugging Face tokenizer in `folder`, new rows made
    in this `way`: "mean", "pieces" or "drawn". Returns what to say of it. Raises ConversionError
    where the tokenizer gives an old token another id, or adds none."""
    new_folder(target)
    with NativeCheckpoint(source, step) as native:
        old = native.tokenizer()
        new = HuggingFaceTokenizer(str(folder))
        engine = _engine(new, folder)
        ids = engine.get_vocab(with_added_tokens=True)
        before = _engine(old, source).get_vocab(with_added_tokens=True)
        moved = [piece for piece, index in before.items() if ids.get(piece) != index]
        if moved:
            raise ConversionError(
                f"{folder}: {len(moved)} tokens of {source} have another id there or none, as "
                f"{moved[0][:60]!r}; give its own tokenizer with tokens added behind "
                "[vocabulary-ids-moved]"
            )
        first, size = old.vocab_size, new.vocab_size
        if size <= first:
            raise ConversionError(
                f"{folder}: has no token beyond the {first} of {source}; add some "
                "[vocabulary-not-longer]"
            )
        pieces = _pieces(old, engine, first, size) if way == "pieces" else {}
        weights = []
        for name in native.weights():
            dtype, shape = native.reader.dtype(name), tuple(native.reader.shape(name))
            make = partial(native.reader.read, name)
            if is_vocabulary(name):
                seed = native.config.training.seed
                make = partial(_extended, native, name, first, size, way, pieces, seed)
                shape = (size, *shape[1:])
            weights.append(Entry(name, dtype, shape, make))
        family = native.base.get("model_type", "")
        with tempfile.TemporaryDirectory() as made:
            files = [*side_files(folder), Path(made) / EXTENDS]
            files[-1].write_text(json.dumps([*old.extends, fingerprint(old.identity())]))
            if native.base:
                files.append(Path(made) / CONFIG)
                files[-1].write_text(json.dumps({**native.base, "vocab_size": size}, indent=2))
            written = write_checkpoint(target, native.model, weights, size, family, files)
    means = size - first - len(pieces)
    ways = {
        "mean": f"{means:,} begin as the mean of the old rows",
        "drawn": f"{means:,} are drawn with mean and covariance of the old rows",
        "pieces": f"{len(pieces):,} begin as the mean of the old tokens that spell them, "
        f"{means:,} as that of all old rows",
    }
    return (
        f"{written}: {size:,} tokens, {size - first:,} of them new; {ways[way]}; iteration 0, "
        "without optimizer state"
    )
