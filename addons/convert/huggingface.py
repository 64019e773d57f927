"""hf-import and hf-export: a Hugging Face folder to a checkpoint of ours and back, one tensor in
memory at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TokenizerConfig

from . import hf_tokenizer, model_card
from .config_keys import CONFIG, Keys
from .families import (
    as_written,
    config_for,
    family_of,
    notes_on,
    read_config,
)
from .family_table import TOKEN_HEADS, Family
from .hf_files import (
    HFFolder,
    new_folder,
    new_target,
    side_files,
    write_folder,
)
from .links import DEPTHS, ConversionError, Header, Link, check, links_of
from .native import NativeCheckpoint, NativeModel, write_checkpoint
from .stores.remote_folder import RemoteFolder

if TYPE_CHECKING:
    from ..object_storage.run_directories import Remote

_HEAD = re.compile(r"(model\.)?mtp[._]")
_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
MOST = 1 << 20  # channels, heads, experts
MOST_IDS = 1 << 28
MOST_POSITIONS = 1 << 25
_ROUNDINGS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class HFModel(ExitStack):
    """An open Hugging Face model: its family, architecture, and links to our names, checked. A
    context manager."""

    def __init__(
        self,
        path: Path | str | RemoteFolder,
        ignored: tuple[str, ...] = (),
        max_positions: int | None = None,
        drop_token_heads: bool | None = False,
    ):
        super().__init__()
        self.folder = self.enter_context(HFFolder(path))
        try:
            keys = Keys(self.folder.config, self.folder.path / CONFIG, ignored)
            self.family, self.model, self.rows = read_config(keys, max_positions)
            self.notes = keys.notes
            self.headers = self._headers()
            self._check_sizes()
            heads = self._token_heads(keys.token_heads, drop_token_heads)
            self.links = links_of(self.model, self.rows, self.family.names)
            self.copies = self._tied_copies()
            self.constants = self.family.constant_names(self.model)
            self._check_constants()
            check(
                self.links,
                {
                    k: v
                    for k, v in self.headers.items()
                    if k not in self.copies and k not in self.constants and k not in heads
                },
                str(path),
                self.family.buffers,
            )
        except BaseException:
            self.close()
            raise

    def _check_sizes(self) -> None:
        """Raise ConversionError for sizes of config.json that no such files can have, before
        anything is made of them."""
        m = self.model
        sizes = {
            "layers": (m.num_layers, len(self.headers)),
            "ids": (self.rows, MOST_IDS),
            "positions": (m.seq_length, MOST_POSITIONS),
            "experts": (m.num_experts or 0, MOST),
            "attention heads": (m.num_attention_heads, MOST),
            "key/value heads": (m.query_groups, MOST),
            "channels per head": (m.head_dim, MOST),
            "hidden channels": (m.hidden_size, MOST),
            "MLP channels": (max(m.ffn, m.expert_ffn), MOST),
            "heads, channels or taps of gated delta nets": (max(m.delta_sizes or [0]), MOST),
        }
        for subject, (size, most) in sizes.items():
            if size > most:
                raise ConversionError(
                    f"{self.folder.path / CONFIG}: {size} {subject}, and files with "
                    f"{len(self.headers)} tensors can have {most} at most; repair {CONFIG}"
                )

    def _headers(self) -> dict[str, Header]:
        """By full name, also where the file omits the family's prefix, as GPT-2's first files
        do."""
        headers = self.folder.headers()
        self.short = bool(self.family.optional) and not any(
            name.startswith(self.family.optional) for name in headers
        )
        prefix = self.family.optional if self.short else ""
        return {
            name if name == "lm_head.weight" else prefix + name: header
            for name, header in headers.items()
        }

    def _tied_copies(self) -> set[str]:
        """Output matrices of a tied model that the files hold too: they must be the embedding, bit
        for bit."""
        names = {
            hf_names[0] + ".weight"
            for native_name, (hf_names, _) in self.family.names.items()
            if native_name == "output_layer"
        }
        copies = {name for name in names & self.headers.keys() if self.model.tied}
        embedding = self.family.names["embedding.word_embeddings"][0][0] + ".weight"
        for name in copies:
            if embedding in self.headers and not torch.equal(self.read(name), self.read(embedding)):
                raise ConversionError(
                    f"{self.folder.path}: {name} is not {embedding}, although config.json says "
                    "tie_word_embeddings; say false there if the model has an output matrix of "
                    "its own"
                )
        return copies

    def _token_heads(self, layers: int, drop: bool | None) -> set[str]:
        """What is left out of the tensors of heads for later tokens (multi-token prediction), which
        are that many `layers` behind the last one, or have names of their own. Where the family's
        are known, the model has them from now on, and only copies are left out. Raises
        ConversionError for others unless they are to be dropped (`drop` None: others alone)."""
        last = self.model.num_layers + layers
        heads = {name for name in self.headers if _HEAD.match(name)}
        for name in self.headers:
            layer = _NUMBER.match(name)
            if layer and self.model.num_layers <= int(layer[1]) < last:
                heads.add(name)
        if layers and not heads:
            self.notes.append(f"{CONFIG} names heads for later tokens, and the files have none")
        if heads and drop is not True and TOKEN_HEADS.keys() <= self.family.names.keys():
            with_heads = replace(self.model, mtp_num_layers=layers or 1)
            links = links_of(with_heads, self.rows, self.family.names)
            ours = {name for link in links for name in link.foreign_names}
            if heads <= ours | copies_in_heads(self.family, with_heads).keys():
                self.model = with_heads
                return self._copies_in_heads()
        if heads and drop is False:
            raise ConversionError(
                f"{self.folder.path}: {min(heads)} and {len(heads) - 1} more are of heads for "
                "later tokens (multi-token prediction), which are not converted; give "
                "--drop-token-heads to leave them out [token-heads]"
            )
        if heads:
            self.notes.append(f"{len(heads)} tensors of heads for later tokens are left out")
        return heads

    def _copies_in_heads(self) -> set[str]:
        """Copies of embedding and output matrix in heads. Raises ConversionError where one is not:
        all depths share them here."""
        shared = copies_in_heads(self.family, self.model)
        for name, original in shared.items():
            if name in self.headers and not torch.equal(self.read(name), self.read(original)):
                raise ConversionError(
                    f"{self.folder.path}: {name} is not {original}, which the heads share here; "
                    "give --drop-token-heads to leave them out [token-heads]"
                )
        return shared.keys() & self.headers.keys()

    def _check_constants(self) -> None:
        """The file's constants must have the values that our layers compute with, but for
        rounding."""
        for name, value in self.constants.items():
            if name not in self.headers:
                continue
            shape = self.headers[name][1]
            rounded = [torch.tensor(value, dtype=dtype).item() for dtype in _ROUNDINGS]
            if shape or self.read(name).item() not in rounded:
                raise ConversionError(f"{self.folder.path}: {name} is not the scalar {value}")

    def read(self, name: str) -> torch.Tensor:
        """One of its tensors by its full name."""
        return self.folder.read(name.removeprefix(self.family.optional) if self.short else name)

    def incoming(self) -> list[Entry]:
        """Our tensors, made of its."""
        return [
            Entry(
                link.native_name,
                self.headers[link.foreign_names[0]][0],
                link.shape,
                partial(self._joined, link),
            )
            for link in self.links
        ]

    def outgoing(self) -> list[Entry]:
        """Its own tensors under their full names, without buffers, and copies in heads alone."""
        return [
            Entry(name, *self.headers[name], partial(self.read, name))
            for link in self.links
            for name in link.foreign_names
        ] + [
            Entry(name, *self.headers[name], partial(self.read, name))
            for name in self.headers.keys()
            & (self.constants.keys() | copies_in_heads(self.family, self.model).keys())
        ]

    def _joined(self, link: Link) -> torch.Tensor:
        return link.join([self.read(name) for name in link.foreign_names])


def copies_in_heads(family: Family, model: ModelConfig) -> dict[str, str]:
    """Names of embedding and output matrix in the heads for later tokens, of what they are
    copies."""
    if not model.mtp_num_layers or DEPTHS in family.names:
        return {}
    embedding, output = (
        family.names[name][0][0] + ".weight"
        for name in ("embedding.word_embeddings", "output_layer")
    )
    return {
        f"model.layers.{number}.{name}.weight": original
        for number in model.mtp_layers
        for name, original in (("embed_tokens", embedding), ("shared_head.head", output))
    }


def hf_import(
    source: Path | RemoteFolder,
    target: Path,
    *,
    ignored: tuple[str, ...] = (),
    max_positions: int | None = None,
    tokenizer: bool = True,
    drop_token_heads: bool = False,
) -> str:
    """Make a run directory of a Hugging Face folder. Returns what to say of it."""
    new_folder(target)
    with HFModel(source, ignored, max_positions, drop_token_heads) as model:
        folder = model.folder.path
        files = [folder / CONFIG, *(side_files(folder) if tokenizer else [])]
        flags: dict[str, Any] = (
            {} if tokenizer else {"tokenizer_type": "NullTokenizer", "vocab_size": model.rows}
        )
        weights = model.incoming()
        written = write_checkpoint(
            target,
            model.model,
            weights,
            model.rows,
            model.family.model_type,
            files,
            flags=flags,
            check=model.folder.check_unchanged,
        )
        count = sum(torch.Size(weight.shape).numel() for weight in weights)
        return "\n".join(
            [
                f"{written}: {model.family.model_type}, {len(weights)} tensors, {count:,} "
                "parameters",
                *(f"note: {note}" for note in model.notes),
            ]
        )


@dataclass(frozen=True)
class AsHF:
    """A checkpoint of ours seen as a Hugging Face model: config.json, tensors, and the other files
    them."""

    config: dict[str, Any]
    tensors: list[Entry]
    files: Mapping[str, Path | bytes]


def as_hf(
    native: NativeModel, family_name: str | None = None, vocab_size: int | None = None
) -> AsHF:
    """What hf-export writes. Raises ConversionError where no family, or not this one, is this
    model."""
    base = native.base
    rows = native.vocab_size(vocab_size)
    family = family_of(native.model, base, family_name)
    if base.get("model_type") != family.model_type:
        base = {key: base[key] for key in base if key.endswith("_token_id")} or native.special_ids()
    tensors = hf_tensors(native, family, rows)
    dtype = tensors[0].dtype
    config = as_written(
        config_for(family, native.model, rows, base), native.model.mtp_num_layers or 0
    )
    dtype_name = str(dtype).removeprefix("torch.")
    config = config | {"dtype" if "dtype" in config else "torch_dtype": dtype_name}
    files = _files_of(native.base_folder) if native.base_folder else _own_files(native)
    card = {model_card.NAME: model_card.card(native, config, tensors)}
    return AsHF(config, tensors, {**files, **card})


def hf_tensors(native: NativeModel, family: Family, rows: int) -> list[Entry]:
    """The tensors of a model of this family, by layers, with so many rows of the vocabulary."""
    tensors = native.outgoing(links_of(native.model, rows, family.names), rows)
    dtype = tensors[0].dtype
    by_name = {entry.key: entry for entry in tensors}
    tensors += [
        replace(by_name[original], key=name)
        for name, original in copies_in_heads(family, native.model).items()
        if original in by_name
    ]
    return tensors + [
        Entry(name, dtype, (), partial(torch.tensor, value, dtype=dtype))
        for name, value in family.constant_names(native.model).items()
    ]


def _files_of(folder: Path) -> dict[str, Path]:
    return {file.name: file for file in side_files(folder)}


def _own_files(native: NativeModel) -> dict[str, Path | bytes]:
    """The tokenizer files of a model that was trained here, under the names that transformers
    knows; none where the tokenizer's own are not on this machine."""
    try:
        contents = hf_tokenizer.files(native.tokenizer(), native.model.max_position_embeddings)
    except ConversionError:
        return {}
    return contents | _copied_files(native.config.data)


def _copied_files(d: TokenizerConfig) -> dict[str, Path]:
    sources: dict[str, str | None] = {}
    if d.tokenizer == "HuggingFaceTokenizer" and d.tokenizer_model:
        path = Path(d.tokenizer_model)
        return _files_of(path if path.is_dir() else path.parent)
    if d.tokenizer == "GPT2BPETokenizer":
        sources = {"vocab.json": d.vocab_file, "merges.txt": d.merge_file}
    elif d.tokenizer in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        sources = {"tokenizer.model": d.tokenizer_model}
    return {name: Path(path) for name, path in sources.items() if path and Path(path).is_file()}


def hf_export(
    source: Path,
    target: Path | Remote,
    *,
    step: int | None = None,
    family: str | None = None,
    vocab_size: int | None = None,
    chat_template: str | None = None,
    tokenizer: Mapping[str, Any] = MappingProxyType({}),
    shard_bytes: int,
    check: Callable[[AsHF, ModelConfig], None] | None = None,
) -> str:
    """Write a Hugging Face folder of a checkpoint of ours, unless `check` raises. Returns what to
    say of it."""
    new_target(target)
    with NativeCheckpoint(source, step, tokenizer) as native:
        model = as_hf(native, family, vocab_size)
        if chat_template:
            from ..finetuning.encode import template_for

            template = template_for(native.tokenizer(), chat_template, None)
            model = replace(
                model, files={**model.files, "chat_template.jinja": template.source.encode()}
            )
        if check:
            check(model, native.model)
        names = write_folder(
            target, model.config, model.tensors, model.files, shard_bytes, native.identity
        )
        copied = ", ".join(model.files) or "no tokenizer files"
        report = (
            f"{target}: {model.config['model_type']}, {len(model.tensors)} tensors in {len(names)} "
            f"file{'s' * (len(names) > 1)}; with it: {copied}"
        )
        return "\n".join(
            [report, *(f"note: {note}" for note in notes_on(model.config, native.model))]
        )
