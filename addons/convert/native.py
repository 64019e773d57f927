"""A checkpoint of this suite as the converter sees it: its architecture, its weights, and how a new
one is written."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from megatron.arguments import config_from
from megatron.checkpoint import manifest, reading, store
from megatron.checkpoint.filesystem import DISK
from megatron.checkpoint.reading import Checkpoint
from megatron.checkpoint.safetensors_file import Entry, row_major
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.sharded_reader import Reader
from megatron.checkpoint.state import RunState
from megatron.checkpoint.tensor_slices import Box, whole
from megatron.config import args_text
from megatron.config.checks import declared
from megatron.config.checks import model as check_shape
from megatron.config.checks.facts import Facts
from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.tree import Config
from megatron.data.tokenizers.build import Tokenizer, tokenizer_from
from megatron.data.tokenizers.trained import check_ids, with_tokenizer
from megatron.features.registry import RunConfig
from megatron.model.blocks.moe.facts import EXPERT_BIAS
from megatron.small_files import read_bytes
from megatron.training.build import make_tokenizer
from megatron.training.checkpointing.saved_args import saved_config

from .config_keys import CONFIG, read_json
from .families import ORIGIN, base_folder
from .hf_files import new_folder, side_files, work_folder
from .links import SAME, ConversionError, Header, Link, Shape, check, is_vocabulary


class Tensors(Protocol):
    """Whole tensors by name, as `checkpoint.sharded_reader.Reader` has them."""

    def names(self) -> list[str]:
        """All names."""

    def shape(self, name: str) -> Shape:
        """With padding rows."""

    def dtype(self, name: str) -> torch.dtype:
        """Number format."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of one, on any device."""

    def close(self) -> None:
        """No more is read."""


class NativeModel(ExitStack):
    """A model of this suite, saved or in training: architecture, and the weights without the
    vocabulary's padding. A context manager."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        state: RunState,
        reader: Tensors,
        rows: int | None = None,
    ):
        """`directory`: of the checkpoint that it is, or would be. `rows` of the vocabulary that
        count, where the tokenizer does not say it."""
        super().__init__()
        self.config = config
        self.directory = directory
        self.state = state
        self.reader = reader
        self.rows = rows
        self.callback(self.reader.close)

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.config.model

    @property
    def base_folder(self) -> Path | None:
        """The folder with config.json and tokenizer files of the model that this one was imported
        from, if it is known."""
        return base_folder(self.directory.parent, self.config.data)

    @property
    def base(self) -> dict[str, Any]:
        """The config.json of the model that this one was imported from, or nothing."""
        return read_json(self.base_folder / CONFIG) if self.base_folder else {}

    def vocab_size(self, requested: int | None = None) -> int:
        """Rows of the vocabulary that count: as given, else the imported model's, else those of the
        tokenizer."""
        rows = requested or self.rows or self.base.get("vocab_size") or self.tokenizer().vocab_size
        stored = min(self.reader.shape(name)[0] for name in self.weights() if is_vocabulary(name))
        if rows > stored:
            raise ConversionError(
                f"{self.directory}: holds {stored} rows of the vocabulary, {rows} are "
                f"requested; give --vocab-size {stored} or less"
            )
        return rows

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConversionError where its files are not on this machine."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                tokenizer = make_tokenizer(self.config)
        except ValueError as error:
            raise ConversionError(
                f"{error}\n{self.directory}: its tokenizer says how many rows of the "
                "vocabulary are no padding; give --vocab-size N instead"
            ) from None
        if self.rows:
            check_ids(self.rows, tokenizer, self.directory)
        data = self.config.data
        if data.tokenizer == "NullTokenizer" and self.config.packed:
            tokenizer.eod = None  # which id ends a sample only the tokenizer of its text knows
        return tokenizer

    def kept_tokenizer(self) -> tuple[dict[str, Any] | None, list[Path]]:
        """(its flags, files to copy) for a run directory with the same tokenizer; the flags of an
        imported model's are found among the copies."""
        data = self.config.data
        if self.base_folder and data.tokenizer != "NullTokenizer":
            return None, side_files(self.base_folder)
        flags = {field.name: getattr(data, field.name) for field in fields(TokenizerConfig)}
        flags["tokenizer_type"] = data.tokenizer  # which flags may leave to the default of a run
        return {name: value for name, value in flags.items() if value is not None}, []

    def special_ids(self) -> dict[str, int | None]:
        """config.json's ids of special pieces; none where the tokenizer is not on this machine."""
        try:
            tokenizer = self.tokenizer()
        except ConversionError:
            return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return {
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eod,
            "pad_token_id": tokenizer.pad,
        }

    def weights(self) -> list[str]:
        """Names of the model's tensors."""
        return [name for name in self.reader.names() if not name.startswith("optimizer.")]

    def header(self, name: str, vocab_size: int) -> Header:
        """Number format and shape of a tensor without padding rows."""
        shape = self.reader.shape(name)
        return self.reader.dtype(name), (vocab_size, *shape[1:]) if is_vocabulary(name) else shape

    def read(self, name: str, shape: Shape) -> torch.Tensor:
        """The first rows of a tensor."""
        return self.reader.read(name, whole(shape))

    def outgoing(self, links: Sequence[Link], vocab_size: int) -> list[Entry]:
        """Every tensor of the other side, made of ours when it is written. Raises ConversionError
        where ours are not those of the links."""
        check(
            [
                Link(link.native_name, link.shape, (link.native_name,), SAME, link.model)
                for link in links
            ],
            {name: self.header(name, vocab_size) for name in self.weights()},
            str(self.directory),
        )
        return [
            Entry(
                name, self.reader.dtype(link.native_name), shape, partial(self._split, link, index)
            )
            for link in links
            for index, (name, shape) in enumerate(
                zip(link.foreign_names, link.their_shapes(), strict=True)
            )
        ]

    def _split(self, link: Link, index: int) -> torch.Tensor:
        ours = self.read(link.native_name, link.shape)
        return link.split(ours)[index].contiguous()


class NativeCheckpoint(NativeModel):
    """An open checkpoint."""

    reader: Reader

    def __init__(
        self,
        path: Path | str,
        step: int | None = None,
        tokenizer: Mapping[str, Any] = MappingProxyType({}),
    ):
        """`tokenizer`: flags of the tokenizer of a model that was trained on ids alone."""
        checkpoint = reading.load(path, step)
        if checkpoint is None:
            raise ConversionError(
                f"{path}: no checkpoint of this suite there ({store.TRACKER} is missing); give the "
                "directory that --save named, or an iter_XXXXXXX in it "
                "[checkpoint-missing]"
            )
        config = saved_config(checkpoint, RunConfig)
        rows = config.data.vocab_size if tokenizer else None
        if tokenizer:
            config = replace(config, data=with_tokenizer(config.data, tokenizer))
        self.checkpoint: Checkpoint = checkpoint
        super().__init__(config, checkpoint.directory, checkpoint.state, checkpoint.reader(), rows)

    @property
    def identity(self) -> str:
        """A text that another checkpoint does not have: its path, and the manifest with the
        checksums of all tensors."""
        digest = hashlib.sha256(read_bytes(self.directory / manifest.FILE_NAME))
        return f"{self.directory.absolute()} {digest.hexdigest()}"


def tokenizer_flags(folder: Path, model_type: str, rows: int) -> dict[str, Any]:
    """The tokenizer whose files are in `folder`: GPT-2's own, tokenizer.json, or SentencePiece's;
    numbers if none does."""
    flags: dict[str, Any]
    has = {file.name for file in side_files(folder)}
    if model_type == "gpt2" and {"vocab.json", "merges.txt"} <= has:
        flags = {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(folder / "vocab.json"),
            "merge_file": str(folder / "merges.txt"),
        }
    elif "tokenizer.json" in has:
        flags = {"tokenizer_type": "HuggingFaceTokenizer"}
    elif "tokenizer.model" in has:
        flags = {
            "tokenizer_type": "Llama2Tokenizer",
            "tokenizer_model": str(folder / "tokenizer.model"),
        }
    else:
        flags = {"tokenizer_type": "NullTokenizer", "vocab_size": rows}
    if flags["tokenizer_type"] == "HuggingFaceTokenizer":
        flags["tokenizer_model"] = str(folder)
    return flags


def choose_tokenizer(flags: dict[str, Any], rows: int) -> Tokenizer:
    """The tokenizer that `flags` make, which is built once to know its size. Raises ConversionError
    where it cannot be, or has more ids than the `rows` of the embedding."""
    names = {flag.name for flag in fields(TokenizerConfig)}
    try:
        tokenizer = tokenizer_from(
            TokenizerConfig(**{name: value for name, value in flags.items() if name in names})
        )
    except ValueError as error:
        raise ConversionError(
            f"{error}\nthe tokenizer could not be made; --no-tokenizer leaves it behind"
        ) from None
    if tokenizer.vocab_size > rows:
        raise ConversionError(
            f"{flags['tokenizer_type']}: has {tokenizer.vocab_size} ids, the model {rows} rows; "
            "give the tokenizer that the model was trained with, or --no-tokenizer"
        )
    return tokenizer


def divisor(size: int, rows: int) -> int:
    """The smallest --make-vocab-size-divisible-by that pads `size` ids to `rows` rows (the default
    where none is needed)."""
    for number in (128, *range(1, rows + 1)):
        if rows % number == 0 and -(-size // number) * number == rows:
            return number
    raise AssertionError(f"{size} ids, {rows} rows")


def check_model(config: Config) -> None:
    """Raise ConversionError for a model that pretrain_gpt.py refuses, with its messages and
    codes."""
    facts = Facts(config, 1, ())
    lines = [line for rule in (declared.limits, check_shape.shape) for line in rule(facts)]
    # what cannot be trained for this reason alone can still be evaluated and exported
    lines = [line for line in lines if not line.endswith("[router-does-not-learn]")]
    if lines:
        raise ConversionError("\n".join(f"the model that this would be: {line}" for line in lines))


def write_checkpoint(
    root: Path,
    model: ModelConfig,
    weights: Sequence[Entry],
    rows: int,
    model_type: str,
    tokenizer_files: Iterable[Path],
    *,
    flags: dict[str, Any] | None = None,
    state: RunState | None = None,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Write a run directory with one checkpoint of these weights; `flags` choose the tokenizer,
    which else is found among the copied `tokenizer_files`. With tensors of the optimizer among the
    weights, `state` are its counters and those of the run. `check` is called when all is written,
    before it gets its name: it raises what is wrong with the source. Nothing stays behind when it
    fails.
    """
    from tools.shared.progress import Progress, counted

    new_folder(root)
    with work_folder(root, "partial") as work:
        copies = work / ORIGIN
        copies.mkdir()
        for file in tokenizer_files:
            shutil.copyfile(file, copies / file.name)
        flags = flags or tokenizer_flags(copies.absolute(), model_type, rows)
        chosen = choose_tokenizer(flags, rows)
        temporary, final = (str(folder.absolute()) for folder in (work, root))
        flags = _moved(flags, temporary, final)
        padding = {"make_vocab_size_divisible_by": divisor(chosen.vocab_size, rows)}
        if not any(copies.iterdir()):
            copies.rmdir()
        # untrained tensors, such as expert biases, are fp32 in every precision
        trained = [weight for weight in weights if not weight.key.startswith("optimizer.")]
        formats = {weight.dtype for weight in trained if not weight.key.endswith(EXPERT_BIAS)}
        precision = {"bf16": formats == {torch.bfloat16}, "fp16": formats == {torch.float16}}
        config = config_from(Config, {**vars(model), **precision, **flags, **padding})
        check_model(config)
        progress = Progress(sum(weight.bytes for weight in weights))
        slices = [
            TensorSlice(
                weight.key,
                weight.shape,
                weight.dtype,
                whole(weight.shape),
                counted(partial(row_major, weight), weight.bytes, progress),
            )
            for weight in weights
        ]
        layout = dict.fromkeys(("world_size", "tp", "pp", "cp", "dp"), 1)
        state = replace(
            state or RunState(),
            data={"tokenizer": _moved(chosen.identity(), temporary, final)},
            layout=layout,
        )
        written = store.save(work, state.iteration, slices, state, args_text.to_text(config))
        progress.clear()
        check()
        DISK.fsync_directory(work)
        DISK.rename(work, root)
        DISK.fsync_directory(root.parent)
        return root / written.name


def _moved(value: Any, temporary: str, final: str) -> Any:
    """`value`, in which paths below `here` are paths below `there`."""
    if isinstance(value, dict):
        return {key: _moved(item, temporary, final) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_moved(item, temporary, final) for item in value]
    if isinstance(value, str) and Path(value).is_relative_to(temporary):
        return str(final / Path(value).relative_to(temporary))
    return value
