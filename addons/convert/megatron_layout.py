"""megatron-import and megatron-export: Megatron-LM's mp_rank_XX folders (--ckpt-format torch), at
any TP x PP; megatron-import also of torch_dist checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron.arguments import build_parser, parse_typed
from megatron.checkpoint import tensor_slices
from megatron.checkpoint.filesystem import DISK
from megatron.checkpoint.safetensors_file import Entry
from megatron.checkpoint.state import RunState
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import (
    LAYER_PREFIX,
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    Chunk,
    ParameterSpec,
    parameter_table,
    stage_table,
)
from megatron.features.registry import RunConfig
from megatron.small_files import path_inside, read_text
from tools.shared.progress import Progress, counted

from . import torch_dist
from .hf_files import new_folder, work_folder
from .links import ConversionError, Shape, is_vocabulary, joined
from .megatron_names import TIED_COPY, args_for, flags_from, legacy_path, our_name
from .native import NativeCheckpoint, write_checkpoint
from .torch_dist_export import Exported, save, write_torch_dist
from .torch_files import StoredPart, TorchFile, read_all

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_CHUNK = re.compile(r"model(\d*)\.(.+)")


def checkpoint_folder(source: Path) -> Path:
    """The checkpoint's folder, of a run directory or an iter_XXXXXXX / release folder."""
    tracker = source / TRACKER
    if tracker.is_file():
        word = read_text(path_inside(source, TRACKER), errors="replace").strip()
        if word != "release" and not word.isdecimal():
            raise ConversionError(
                f"{tracker} holds {word[:40]!r}, neither an iteration nor release"
            )
        source = source / (word if word == "release" else f"iter_{int(word):07d}")
    return source


def find_ranks(source: Path) -> dict[tuple[int, int], Path]:
    """{(tp rank, pp rank): file} of a checkpoint's folder."""
    files = {}
    for path in sorted(source.iterdir()) if source.is_dir() else []:
        match = _RANK.fullmatch(path.name)
        if match and match[3]:
            raise ConversionError(
                f"{path}: the third number is an expert-parallel rank; experts are converted from "
                "--ckpt-format torch_dist alone"
            )
        if match:
            file = path_inside(source, f"{path.name}/{FILE}", below=True)
            files[int(match[1]), int(match[2] or 0)] = file
    if not files and (source / ".metadata").exists():
        raise ConversionError(
            f"{source}: has no {torch_dist.METADATA}, so its format is fsdp_dtensor or another of "
            "torch.distributed.checkpoint, which is not read; save it with --ckpt-format "
            "torch_dist [checkpoint-format-not-read]"
        )
    if not files:
        raise ConversionError(
            f"{source}: holds neither mp_rank_XX folders nor the {torch_dist.METADATA} of "
            "--ckpt-format torch_dist"
        )
    tp, pp = (1 + max(numbers) for numbers in zip(*files, strict=True))
    missing = [
        f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1)
        for t in range(tp)
        for p in range(pp)
        if (t, p) not in files
    ]
    missing += [file.parent.name for file in files.values() if not file.is_file()]
    if missing:
        raise ConversionError(
            f"{source}: missing or without {FILE}: {', '.join(missing)}, of {tp} tensor x {pp} "
            "pipeline ranks"
        )
    return files


class MegatronCheckpoint:
    """An open Megatron-LM checkpoint: arguments, and for each tensor of ours its parts by tensor
    rank. Its optimizer is not converted."""

    kind = "core"
    layer_name = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")

    def __init__(self, source: Path):
        self.source = source
        files = read_all(find_ranks(source), ("model",))
        self._read_args(files[0, 0])
        self._open(files)
        if any("language_model." in path for path in self.files[0, 0].tensors):
            self.kind = "legacy"

    def _read_args(self, file: TorchFile) -> None:
        """Note the arguments in a file. Raises ConversionError for one of an old version."""
        args = file.values.get("args")
        self.args: dict[str, Any] = args if isinstance(args, dict) else {}
        version = file.values.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 2.0:
            raise ConversionError(
                f"{file.path}: checkpoint_version {version!r}: queries, keys and values are in an "
                "older order; save it again with a Megatron of 2021 or later"
            )

    def _open(self, files: Mapping[tuple[int, int], TorchFile]) -> None:
        """Note where the tensors in the files of all (tensor, pipeline) ranks are."""
        self.files = files
        self.tp, self.pp = (1 + max(numbers) for numbers in zip(*files, strict=True))
        self.parts: dict[str, list[StoredPart]] = {}
        self.copies: dict[str, list[StoredPart]] = {}
        for tp in range(self.tp):
            self._sort(tp)

    @property
    def layout(self) -> str:
        """What it is, for the report."""
        return (
            f"{self.tp} tensor x {self.pp} pipeline ranks; the optimizer's state is not converted"
        )

    @property
    def state(self) -> RunState | None:
        """Counters of the run, where the optimizer is converted."""
        return None

    def optimizer(
        self,
        table: Mapping[str, ParameterSpec],
        model: ModelConfig,
        weights: Sequence[Entry],
    ) -> list[Entry]:
        """None."""
        return []

    def vocabulary_rows(self) -> int:
        """Rows of the word embedding, with padding."""
        embedding = self.parts.get(WORD_EMBEDDING)
        if not embedding:
            raise ConversionError(f"{self.source}: {WORD_EMBEDDING} is missing")
        return sum(part.shape[0] for part in embedding)

    def weights(self, table: Mapping[str, ParameterSpec], model: ModelConfig) -> list[Entry]:
        """Our tensors. Raises ConversionError unless theirs are exactly those of the table."""
        if model.num_experts is not None:
            raise ConversionError(
                f"{self.source}: num_experts {model.num_experts} cannot be represented here: "
                "experts are converted from --ckpt-format torch_dist alone"
            )
        sizes = {"tp": self.tp}
        table = {name: _as_split(spec) for name, spec in table.items()}
        expected = {
            name: _their_shape(spec, spec.local_shape(sizes), model) for name, spec in table.items()
        }
        check_parts(self, expected)
        _check_copies(self)
        return [
            Entry(
                name,
                self.parts[name][0].dtype,
                spec.shape,
                partial(joined, spec, [part.read for part in self.parts[name]], alike=True),
            )
            for name, spec in table.items()
        ]

    def _sort(self, tp: int) -> None:
        """Note where the tensors of this tensor rank lie, layers under their global numbers."""
        offset = 0
        tied = not self.args.get("untie_embeddings_and_output_weights")
        for pp, names in self._chunks(tp):
            layers: set[int] = set()
            for path, name in names:
                match = self.layer_name.fullmatch(name)
                if match:
                    layers.add(int(match[2]))
                    name = f"{match[1]}{int(match[2]) + offset}{match[3]}"
                copy = tied and name in (TIED_COPY, OUTPUT_LAYER)
                copy |= name == WORD_EMBEDDING and len(self.parts.get(name, ())) > tp
                stored = (self.copies if copy else self.parts).setdefault(name, [])
                if len(stored) > tp:
                    raise ConversionError(
                        f"{self.source}: {name} is there twice for tensor rank {tp}"
                    )
                stored.append(self.files[tp, pp].tensors[path])
            if layers and layers != set(range(len(layers))):
                raise ConversionError(
                    f"{self.source}: stage {pp} has the layers {sorted(layers)}, not 0, 1, 2, ..."
                )
            offset += len(layers)

    def _chunks(self, tp: int) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """(pipeline rank, [(path, our name with the chunk's own layer numbers)]) in the order of
        the layers: virtual stage by virtual stage, in each rank by rank."""
        chunks: dict[tuple[int, int], list[tuple[str, str]]] = {}
        for pp in range(self.pp):
            for path in self.files[tp, pp].tensors:
                match = _CHUNK.fullmatch(path)
                name = our_name(match[2]) if match else path
                if name is not None:
                    chunks.setdefault((int(match[1] or 0) if match else 0, pp), []).append(
                        (path, name)
                    )
        for (_, pp), names in sorted(chunks.items()):
            yield pp, names


def _as_split(spec: ParameterSpec) -> ParameterSpec:
    """As their ranks hold it: a column-parallel layer has multi-token prediction's eh_proj."""
    return replace(spec, splits=(("tp", 0),)) if ".eh_proj." in spec.name else spec


def _their_shape(spec: ParameterSpec, shape: Sequence[int], model: ModelConfig) -> tuple[int, ...]:
    """Their shape of a part of ours: gate and up rows are in one dim."""
    if not (model.gated and ".linear_fc1." in spec.name):
        return tuple(shape)
    lead = 1 if ".mlp.experts." in spec.name else 0  # dims before those of one matrix
    return (*shape[:lead], shape[lead] * shape[lead + 1], *shape[lead + 2 :])


def check_parts(
    checkpoint: MegatronCheckpoint,
    expected: Mapping[str, Shape],
    on_one_rank: Collection[str] = (),
    hint: Callable[[str], str] = lambda name: "",
) -> None:
    """Raise ConversionError unless the parts of a checkpoint's tensors have just these shapes, on
    every tensor rank; those `on_one_rank` may be on one. `hint`: more to say of one that has
    not."""
    source, tp = checkpoint.source, checkpoint.tp
    lines = [f"{source}: {name} is missing" for name in expected if name not in checkpoint.parts]
    lines += [
        f"{source}: {parts[0].path} is not a part of this model"
        for name, parts in checkpoint.parts.items()
        if name not in expected
    ]
    for name in expected.keys() & checkpoint.parts.keys():
        parts = checkpoint.parts[name]
        if len(parts) != tp and not (name in on_one_rank and len(parts) == 1):
            lines.append(f"{source}: {name} is on {len(parts)} of {tp} tensor ranks")
        lines += [
            f"{part.file}: {part.path} has shape {list(part.shape)}, should be "
            f"{list(expected[name])} by its arguments{hint(name)}"
            for part in parts
            if part.shape != expected[name]
        ]
        if len({part.dtype for part in parts}) > 1:
            lines.append(f"{source}: {name} has another dtype on each tensor rank")
    if lines:
        raise ConversionError(
            "\n".join(lines[:20] + [f"and {len(lines) - 20} more"] * (len(lines) > 20))
        )


def _check_copies(checkpoint: MegatronCheckpoint) -> None:
    """The copies of the embedding on the last stage must be the embedding."""
    embedding = checkpoint.parts.get(WORD_EMBEDDING, [])
    for copies in checkpoint.copies.values():
        for rank, (copy, part) in enumerate(zip(copies, embedding, strict=True)):
            if not torch.equal(copy.read(), part.read()):
                raise ConversionError(
                    f"{copy.file}: {copy.path} is not the word embedding of the first stage "
                    f"(tensor rank {rank}), although the arguments say they are one"
                )


def megatron_import(
    source: Path,
    target: Path,
    *,
    args_file: Path | None = None,
    tokenizer: bool = True,
    vocab_size: int | None = None,
    optimizer: bool = True,
    ignored: Collection[str] = (),
    kind: Callable[[Path], MegatronCheckpoint] = MegatronCheckpoint,
) -> str:
    """Make a run directory of a Megatron-LM checkpoint, of mp_rank_XX folders (or of the files that
    another `kind` reads) or torch_dist (of that with the `optimizer`). `args_file`: flags that
    count more than its arguments; `ignored`: unknown arguments that may be set; without `tokenizer`
    ids are plain numbers, `vocab_size` of them. Returns what to say of it."""
    new_folder(target)
    null_tokenizer = {"tokenizer_type": "NullTokenizer"}
    folder_of_checkpoint = checkpoint_folder(source)
    sharded = (folder_of_checkpoint / torch_dist.METADATA).is_file()
    checkpoint = (
        torch_dist.TorchDistCheckpoint(folder_of_checkpoint, optimizer)
        if sharded
        else kind(folder_of_checkpoint)
    )
    typed = (
        parse_typed(build_parser(RunConfig, prog="args", description=""), [f"@{args_file}"])
        if args_file
        else {}
    )
    flags = flags_from(
        checkpoint.args,
        str(checkpoint.source),
        overrides=typed,
        ignored=ignored,
        kind=checkpoint.kind,
    )
    checkpoint.args |= typed
    model = ModelConfig(
        **{name: flags.pop(name) for name in list(flags) if name in vars(ModelConfig())}
    )
    rows = checkpoint.vocabulary_rows()
    table = {spec.name: spec for spec in parameter_table(model, rows, rows)}
    weights = checkpoint.weights(table, model)
    state = checkpoint.state
    weights += checkpoint.optimizer(table, model, weights)
    if not tokenizer or "tokenizer_type" not in flags:
        flags = null_tokenizer | {"vocab_size": vocab_size or rows}
    elif flags["tokenizer_type"] == "NullTokenizer":
        flags = null_tokenizer | {"vocab_size": checkpoint.args.get("vocab_size") or rows}
    written = write_checkpoint(
        target, model, weights, rows, "megatron", [], flags=flags, state=state
    )
    return (
        f"{written}: {len(weights)} tensors, tokenizer {flags['tokenizer_type']}, from "
        f"{checkpoint.layout}"
    )


# --- export


def megatron_export(
    source: Path,
    target: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    kind: str = "core",
    sharded: bool = False,
    layers: str = "transformer_engine",
    step: int | None = None,
) -> str:
    """Write a Megatron-LM run directory with a `release` checkpoint for tp x pp ranks; `kind` is
    core or legacy. `sharded`: as torch_dist, for all sizes (tp decides about the padding of the
    vocabulary alone), with experts for its `layers` of transformer_engine or local. One rank's part
    is in memory at a time. Returns what to say of it."""
    if sharded and kind != "core":
        raise ConversionError("--ckpt-format torch_dist: has no older model; omit --model legacy")
    new_folder(target)
    with NativeCheckpoint(source, step) as native:
        table, rows, args = _export_plan(native, tp, pp, sharded, kind)
        with work_folder(target, "partial") as work:
            release = work / "run" / "release"
            release.mkdir(parents=True)
            total = sum(
                prod(spec.shape) * native.reader.dtype(spec.name).itemsize for spec in table
            )
            progress = Progress(total)
            if sharded:
                parts = [_exported(native, spec, progress) for spec in table]
                args |= {"transformer_impl": layers}
                write_torch_dist(release, parts, native.model, args)
            for p in range(0 if sharded else pp):
                numbers = range(
                    p * native.model.num_layers // pp, (p + 1) * native.model.num_layers // pp
                )
                stage = stage_table(table, Chunk(numbers, p == 0, p == pp - 1, p == pp - 1))
                for t in range(tp):
                    folder = release / (f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1))
                    folder.mkdir()
                    progress.update(
                        total * (p * tp + t) // (pp * tp), f"rank {p * tp + t + 1} of {pp * tp}"
                    )
                    save(_rank(native, stage, numbers.start, t, tp, p, kind), args, folder / FILE)
            progress.clear()
            (work / "run" / TRACKER).write_text("release")
            DISK.rename(work / "run", target)
    layout = "torch_dist" if sharded else f"{tp} tensor x {pp} pipeline ranks, {kind} model"
    return f"{target}: {len(table)} tensors for {layout}, {rows} rows of the vocabulary"


def _exported(native: NativeCheckpoint, spec: ParameterSpec, progress: Progress) -> Exported:
    shape = _their_shape(spec, spec.shape, native.model)
    dtype = native.reader.dtype(spec.name)
    make = partial(_slice, native, spec, 0, 1, shape)
    return spec, dtype, shape, counted(make, prod(shape) * dtype.itemsize, progress)


def _export_plan(
    native: NativeCheckpoint, tp: int, pp: int, sharded: bool, kind: str
) -> tuple[list[ParameterSpec], int, dict[str, Any]]:
    """(our tensors, rows of the vocabulary padded for tp, their arguments). Raises ConversionError
    for a bad layout."""
    model = native.model
    size = native.vocab_size()
    if tp < 1 or pp < 1 or model.num_layers % pp or model.query_groups % tp or model.ffn % tp:
        raise ConversionError(
            f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}: "
            f"{model.num_layers} layers, {model.query_groups} key/value heads and an MLP of "
            f"{model.ffn} do not split so"
        )
    unit = model.make_vocab_size_divisible_by * tp
    rows = -(-size // unit) * unit
    d = native.config.data
    args = args_for(
        model,
        {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "padded_vocab_size": rows,
            "tokenizer_type": d.tokenizer,
            "vocab_file": d.vocab_file,
            "merge_file": d.merge_file,
            "tokenizer_model": d.tokenizer_model,
            "vocab_size": d.vocab_size,
        },
        experts=sharded,
        kind=kind,
    )
    table = parameter_table(model, rows, size)
    names = {spec.name for spec in table}
    strange = sorted(names ^ set(native.weights()))
    if strange:
        raise ConversionError(
            f"{native.checkpoint.directory}: is not the model of its args: {', '.join(strange[:5])}"
        )
    return table, rows, args


def _rank(
    native: NativeCheckpoint,
    stage: Sequence[ParameterSpec],
    first_layer: int,
    t: int,
    tp: int,
    p: int,
    kind: str,
) -> dict[str, Any]:
    """The tensors of one rank as Megatron nests them."""
    root: dict[str, Any] = {}
    for spec in map(_as_split, stage):
        name = spec.name
        if spec.layer is not None:
            tail = name.removeprefix(f"{LAYER_PREFIX}{spec.layer}.")
            name = f"{LAYER_PREFIX}{spec.layer - first_layer}.{tail}"
        names = [name]
        if p and name == WORD_EMBEDDING:  # where it is used behind the first stage
            names *= native.model.mtp_num_layers is not None
            names += [TIED_COPY if kind == "legacy" else OUTPUT_LAYER] * native.model.tied
        shape = _their_shape(spec, spec.local_shape({"tp": tp}), native.model)
        tensor = _slice(native, spec, t, tp, shape)
        for name in names:
            path = ("model", *legacy_path(name)) if kind == "legacy" else ("model", name)
            inner = root
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = tensor
    return root


def _slice(
    native: NativeCheckpoint, spec: ParameterSpec, rank: int, tp: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor rank's part of one of our tensors, in their shape; rows that we do not hold are
    0."""
    box = list(tensor_slices.whole(spec.shape))
    for _, dim in spec.splits:
        width_of_rank = spec.shape[dim] // tp
        box[dim] = (rank * width_of_rank, (rank + 1) * width_of_rank)
    rows = native.reader.shape(spec.name)[0]
    if not is_vocabulary(spec.name) or rows >= spec.shape[0]:
        return native.reader.read(spec.name, tuple(box)).reshape(shape)
    padded = torch.zeros(shape, dtype=native.reader.dtype(spec.name))
    start, stop = box[0]
    if start < rows:
        box[0] = (start, min(stop, rows))
        padded[: box[0][1] - start] = native.reader.read(spec.name, tuple(box))
    return padded
