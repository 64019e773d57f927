"""inspect and diff: what a checkpoint holds, and where two differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from math import prod
from pathlib import Path

import torch

from megatron.checkpoint.safetensors_file import Entry, row_major
from megatron.config.model import ModelConfig
from tools.shared.progress import Progress

from .hf_files import HFFolder
from .huggingface import HFModel, as_hf
from .links import ConversionError, is_vocabulary
from .native import NativeCheckpoint
from .stores.remote_folder import RemoteFolder
from .verification import is_hf

TENSORS_SHOWN = 20


def inspect(path: Path | RemoteFolder, step: int | None = None, tensors: bool = False) -> str:
    """What is in a folder, as lines."""
    if is_hf(path):
        return "\n".join(_inspect_hf(path, tensors))
    with _opened_native(path, step) as native:
        return "\n".join(_inspect_native(native, tensors))


def _inspect_native(native: NativeCheckpoint, tensors: bool) -> Iterable[str]:
    checkpoint, reader = native.checkpoint, native.reader
    state = checkpoint.state
    yield f"{checkpoint.directory}: checkpoint of this suite, iteration {checkpoint.iteration}"
    yield f"  consumed samples: {state.consumed_train_samples}; written by: " + (
        ", ".join(f"{name} {size}" for name, size in state.layout.items()) or "unknown"
    )
    yield f"  architecture: {_flags(native.model)}"
    names = reader.names()
    table = {name: (reader.dtype(name), reader.shape(name)) for name in names}
    yield from _sums("weights", [table[name] for name in native.weights()])
    states = [table[name] for name in names if name.startswith("optimizer.")]
    yield from _sums("optimizer", states) if states else ["  optimizer: none"]
    yield (
        f"  files: {len(checkpoint.manifest.files)}, "
        f"{sum(f.bytes for f in checkpoint.manifest.files.values()):,} bytes"
    )
    if tensors:
        yield from (f"  {name} {_format(*table[name])}" for name in names)


def _opened_native(path: Path | RemoteFolder, step: int | None) -> NativeCheckpoint:
    assert isinstance(path, Path), "opened_folder checks that a URL has a config.json"
    return NativeCheckpoint(path, step)


def _inspect_hf(path: Path | RemoteFolder, tensors: bool) -> Iterable[str]:
    with HFFolder(path) as folder:
        headers = folder.headers()
        yield f"{path}: Hugging Face folder, model_type {folder.config.get('model_type')!r}"
        yield from _sums("weights", list(headers.values()))
        yield f"  largest file: {folder.largest_shard:,} bytes"
    try:
        with HFModel(path, drop_token_heads=None) as model:
            yield f"  architecture: {_flags(model.model)}"
    except ConversionError as error:
        yield from (f"  cannot be imported: {line}" for line in str(error).splitlines())
    if tensors:
        yield from (f"  {name} {_format(*header)}" for name, header in sorted(headers.items()))


def _flags(model: ModelConfig) -> str:
    """The architecture's fields that are not the default."""
    return ", ".join(
        f"{f.name}={getattr(model, f.name)}"
        for f in fields(model)
        if getattr(model, f.name) != f.default
    )


def _format(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _sums(title: str, headers: Sequence[tuple[torch.dtype, Sequence[int]]]) -> Iterable[str]:
    count: Counter[str] = Counter()
    for dtype, shape in headers:
        count[str(dtype).removeprefix("torch.")] += prod(shape)
    formats = ", ".join(f"{number:,} {name}" for name, number in count.items())
    yield f"  {title}: {len(headers)} tensors, {sum(count.values()):,} values ({formats})"


# --- diff


def diff(
    a: Path | RemoteFolder,
    b: Path | RemoteFolder,
    step: int | None = None,
    weights_only: bool = False,
) -> tuple[str, bool]:
    """(lines, are they the same). Two checkpoints of ours are compared tensor by tensor, the
    optimizer's too unless `weights_only`; with a Hugging Face folder on either side, the weights as
    that folder names them."""
    if is_hf(a) and is_hf(b):
        with (
            HFModel(a, drop_token_heads=None) as first,
            HFModel(b, drop_token_heads=None) as second,
        ):
            return _compare(first.outgoing(), second.outgoing())
    if is_hf(a) or is_hf(b):
        with (
            HFModel(a if is_hf(a) else b, drop_token_heads=None) as model,
            _opened_native(b if is_hf(a) else a, step) as native,
        ):
            sides = as_hf(native, model.family.model_type, model.rows).tensors, model.outgoing()
            return _compare(*(sides[::-1] if is_hf(a) else sides))
    with _opened_native(a, step) as first, _opened_native(b, step) as second:
        return _compare(_all_of(first, weights_only), _all_of(second, weights_only))


def _all_of(native: NativeCheckpoint, weights_only: bool) -> list[Entry]:
    """Every tensor of a checkpoint of ours (or its weights), vocabularies without padding rows."""
    rows = native.vocab_size()
    tensors = []
    for name in native.weights() if weights_only else native.reader.names():
        shape = native.reader.shape(name)
        plain = name.split(".", 2)[2] if name.startswith("optimizer.") else name
        shape = (rows, *shape[1:]) if is_vocabulary(plain) else shape
        tensors.append(
            Entry(name, native.reader.dtype(name), shape, partial(native.read, name, shape))
        )
    return tensors


def _compare(a: Sequence[Entry], b: Sequence[Entry]) -> tuple[str, bool]:
    first, second = ({tensor.key: tensor for tensor in side} for side in (a, b))
    lines = [f"only in the first: {name}" for name in first if name not in second]
    lines += [f"only in the second: {name}" for name in second if name not in first]
    both = [name for name in first if name in second]
    progress = Progress(sum(first[name].bytes for name in both))
    for name in both:
        lines += _difference(first[name], second[name])
        progress.shift += first[name].bytes
        progress.update(0)
    progress.clear()
    total = len(lines)
    if total > TENSORS_SHOWN:
        lines[TENSORS_SHOWN:] = [f"and {total - TENSORS_SHOWN} more"]
    lines.append(
        f"{total} of {len(first.keys() | second.keys())} tensors differ"
        if total
        else f"same: {len(both)} tensors, bit for bit"
    )
    return "\n".join(lines), not total


def _difference(a: Entry, b: Entry) -> list[str]:
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{a.key}: {_format(a.dtype, a.shape)} and {_format(b.dtype, b.shape)}"]
    x = row_major(a)
    y = row_major(b)
    if torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)):
        return []
    unlike = (x != y).sum().item()
    return [
        f"{a.key}: {unlike:,} of {x.numel():,} values differ, by "
        f"{(x.double() - y.double()).abs().max():.3g} at most"
    ]
