"""The weighted mean of checkpoints, a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.config import architecture
from megatron.config.run_directory import FINAL, iteration_directory, iterations
from megatron.training.checkpointing.resume_checks import vocabulary_problem

from ..convert.hf_files import new_folder
from ..convert.links import ConversionError
from ..convert.native import NativeCheckpoint, write_checkpoint

MASTER = "optimizer.fp32_param."
AVERAGE = "optimizer.ema."  # of --ema-decay


def _checkpoints(sources: Sequence[Path], window: int | None, least: int) -> list[Path]:
    """The folders that are merged, oldest first. Raises ConversionError where they are less than
    `least`."""
    folders = []
    for source in sources:
        numbers = [] if FINAL.fullmatch(source.name) else iterations(source)
        if window and 0 < len(numbers) < window:
            raise ConversionError(
                f"--merge-window {window}: {source} has {len(numbers)} checkpoints; give "
                "--merge-window with at most as many [checkpoint-step-missing]"
            )
        newest = numbers[-window:] if window else numbers
        folders += [iteration_directory(source, number) for number in newest] or [source]
    if len(folders) < least:
        raise ConversionError(
            f"{', '.join(map(str, folders))}: a mean needs two checkpoints or more; give more of "
            "them, or a run directory with several"
        )
    return folders


def _check_alike(all_of: Sequence[NativeCheckpoint], rows: int) -> None:
    """Raise ConversionError where two are not weights of one model and vocabulary."""
    first = all_of[0]
    headers = {name: first.header(name, rows) for name in first.weights()}
    for other in all_of[1:]:
        pair = f"{first.checkpoint.directory} and {other.checkpoint.directory}"
        changed = architecture.typed_differences(first.model, other.model)
        if changed:
            names = ", ".join(f"{each.name} {each.saved} and {each.now}" for each in changed)
            raise ConversionError(f"{pair}: different models, {names}; merge those of one model")
        identities = [
            native.checkpoint.state.data.get("tokenizer") or {} for native in (first, other)
        ]
        if vocabulary_problem(str(other.checkpoint.directory), *identities):
            raise ConversionError(
                f"{pair}: different tokenizers; merge those of one "
                "[checkpoint-of-another-tokenizer]"
            )
        if {name: other.header(name, rows) for name in other.weights()} != headers:
            raise ConversionError(
                f"{pair}: tensors of different shapes or number formats; merge those of one run"
            )


def _check_averages(all_of: Sequence[NativeCheckpoint]) -> None:
    """Raise ConversionError where one has no averages."""
    for native in all_of:
        if not any(name.startswith(AVERAGE) for name in native.reader.names()):
            raise ConversionError(
                f"--ema: {native.checkpoint.directory} has no averages of its weights; omit the "
                "flag, or train with --ema-decay [checkpoint-without-averages]"
            )


def _mean(
    all_of: Sequence[NativeCheckpoint],
    weights: Sequence[float],
    prefix: str,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Of the tensor of this name: what each checkpoint has, times its weight, summed."""
    total = torch.zeros(shape, dtype=torch.float64)
    for native, weight in zip(all_of, weights, strict=True):
        names = (prefix + name, name)
        stored = next(each for each in names if each in native.reader.manifest.tensors)
        total.add_(native.read(stored, shape), alpha=weight)
    return total.to(dtype)


def merge(
    sources: Sequence[Path],
    target: Path,
    window: int | None,
    weights_of: Callable[[int], list[float]],
    ema: bool = False,
) -> str:
    """Write a run directory with the mean of checkpoints, weighted by what `weights_of` gives for
    their number; `ema`: of the averages that they have. Returns what to say of it. Raises
    ConversionError."""
    new_folder(target)
    folders = _checkpoints(sources, window or int(ema), 1 if ema else 2)
    weights = weights_of(len(folders))
    with ExitStack() as stack:
        all_of = [stack.enter_context(NativeCheckpoint(folder)) for folder in folders]
        newest = all_of[-1]
        # layouts pad the vocabulary differently; its padding is not merged
        rows = newest.vocab_size()
        _check_alike(all_of, rows)
        if ema:
            _check_averages(all_of)
        entries = []
        for name in newest.weights():
            dtype, shape = newest.header(name, rows)
            prefix = AVERAGE if ema else MASTER
            mean = partial(_mean, all_of, weights, prefix, name, dtype, shape)
            entries.append(Entry(name, dtype, shape, mean))
        flags, files = newest.kept_tokenizer()
        family = newest.base.get("model_type", "")
        written = write_checkpoint(target, newest.model, entries, rows, family, files, flags=flags)
    lines = [f"{weight:.6f} x {folder}" for weight, folder in zip(weights, folders, strict=True)]
    return "\n".join([*lines, f"{written}: their sum; iteration 0, without optimizer state"])
