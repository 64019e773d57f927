"""Megatron's torch_dist checkpoints: global tensors in the files of torch.distributed.checkpoint,
and which of them our weights are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.checkpoint.state import RunState
from megatron.checkpoint.tensor_slices import (
    whole,
)
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import WORD_EMBEDDING, ParameterSpec
from megatron.model.blocks.moe.facts import EXPERT_BIAS

from .config_keys import read_json
from .links import ConversionError, optimizer_entries
from .megatron_names import our_name
from .torch_dist_optimizer import (
    BUFFER,
    BY_NAME,
    KINDS,
    REMEDY,
    FlatBuffers,
    check_format,
    run_state,
)
from .torch_dist_tensor import StoredTensor, read_index
from .torch_files import read_file

METADATA = "metadata.json"
COMMON = "common.pt"
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_SHOWN = 20  # reasons of one error
_LAYER = re.compile(r"((?:decoder|mtp)\.layers\.)(?:(\d+)\.)?(.+)")
_EXPERTS = re.compile(r"(|transformer_layer\.)mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_HALVES = {"_w": 0, "_v": 1}  # gate and up, as tensors of their own


@dataclass(frozen=True)
class StoredSlice:
    """All of a stored tensor, or what it holds at an index of its first dim."""

    tensor: StoredTensor
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the indexed dim."""
        return self.tensor.shape if self.layer is None else self.tensor.shape[1:]

    def read(self) -> torch.Tensor:
        """It."""
        box = whole(self.tensor.shape)
        if self.layer is not None:
            box = ((self.layer, self.layer + 1), *box[1:])
        return self.tensor.read(box)


# of one of our tensors: expert, or -1 for all, and half of a gated matrix, or -1 for both
ExpertHalf = tuple[int, int]
Slices = dict[str, dict[ExpertHalf, StoredSlice]]


def _merged(shape: Sequence[int], slices: Sequence[StoredSlice]) -> torch.Tensor:
    """One of our tensors of its pieces, which are in order."""
    flat = torch.empty(prod(shape), dtype=slices[0].tensor.dtype)
    start = 0
    for stored_slice in slices:
        size = prod(stored_slice.shape)
        flat[start : start + size] = stored_slice.read().flatten()
        start += size
    return flat.view(shape)


class TorchDistCheckpoint:
    """An open torch_dist checkpoint: arguments, and for each tensor of ours the pieces that it is
    made of."""

    kind = "core"

    def __init__(self, source: Path, optimizer: bool = True):
        self.source = source
        backend = read_json(source / METADATA).get("sharded_backend")
        if backend != "torch_dist":
            raise ConversionError(
                f"{source}: its format is {backend!r}, which is not read; save it with "
                "--ckpt-format torch_dist [checkpoint-format-not-read]"
            )
        self._common = read_file(source / COMMON)
        args = self._common.values.get("args")
        self.args: dict[str, Any] = args if isinstance(args, dict) else {}
        self.slices: Slices = {}
        self._optimizer = optimizer
        self._states: dict[str, Slices] = {}
        tensors, self._objects = read_index(source)
        self._buffers = FlatBuffers(source, self.args)
        self._has_optimizer = False
        for name, tensor in tensors.items():
            of_optimizer = _OPTIMIZER.match(name)
            if name.startswith(("rng_state", "rerun_state_machine")) or (
                of_optimizer and not optimizer
            ):
                continue
            wrong = tensor.problem()
            if wrong:
                raise ConversionError(f"{source}: {name}: {wrong}")
            if of_optimizer:
                self._has_optimizer = True
                self._sort_optimizer(tensor)
            else:
                self._sort(tensor, name, self.slices)

    @property
    def layout(self) -> str:
        """What it is, for the report."""
        if self.state is not None:
            return (
                f"torch_dist with the optimizer's state, iteration {self.state.iteration}. Lost: "
                "Megatron's random states (dropout masks will be others); data order: give the "
                "flags of the data, and --seed, that it was trained with"
            )
        return "torch_dist" + "; the optimizer's state is not converted" * (not self._optimizer)

    @cached_property
    def state(self) -> RunState | None:
        """Counters of the run, where the optimizer is converted."""
        if not self._has_optimizer:
            return None
        file = self._common
        return run_state(self.source, file.values, self._objects, file, self.args)

    def optimizer(
        self,
        table: Mapping[str, ParameterSpec],
        model: ModelConfig,
        weights: Sequence[Entry],
    ) -> list[Entry]:
        """The optimizer's tensors under our names, or none. Raises ConversionError unless theirs
        are exactly those of the weights."""
        if not self._has_optimizer:
            return []
        check_format(self.source, self._common.values)
        trained = {name: tensor for name, tensor in table.items() if not name.endswith(EXPERT_BIAS)}
        by_name = {tensor.key: tensor for tensor in weights if tensor.key in trained}
        if self._buffers.by_kind:
            if self._states:
                raise ConversionError(f"{self.source}: has its optimizer's state twice; {REMEDY}")
            made = self._buffers.locate(trained, model, by_name)
            return optimizer_entries(made, trained, by_name)
        low = any(tensor.dtype != torch.float32 for tensor in by_name.values())
        states: list[Entry] = []
        for kind in ("fp32_param", "exp_avg", "exp_avg_sq"):
            if kind == "fp32_param" and kind not in self._states and not low:
                continue
            for tensor in self._incoming(self._states.get(kind, {}), trained, model):
                name = f"optimizer.{kind}.{tensor.key}"
                if tensor.dtype not in (torch.float32, torch.bfloat16):
                    raise ConversionError(f"{self.source}: {name} is {tensor.dtype}; {REMEDY}")
                # of an fp32 model the main weights are the weights
                if kind != "fp32_param" or by_name[tensor.key].dtype != torch.float32:
                    states.append(replace(tensor, key=name))
        return states

    def _sort_optimizer(self, tensor: StoredTensor) -> None:
        """Note a tensor of the optimizer. Raises ConversionError for one that is not Adam's."""
        by_name = BY_NAME.fullmatch(tensor.name)
        if by_name and by_name[1] in KINDS:
            slices = self._states.setdefault(KINDS[by_name[1]], {})
            self._sort(tensor, by_name[2], slices)
            return
        flat = BUFFER.fullmatch(tensor.name)
        if not flat:
            check_format(self.source, self._common.values)
            raise ConversionError(f"{self.source}: {tensor.name} is not known here; {REMEDY}")
        self._buffers.add(flat, tensor)

    def _sort(self, tensor: StoredTensor, megatron_name: str, table: Slices) -> None:
        """Note in `table` which of our tensors it is a part of."""

        def add(name: str, expert_half: ExpertHalf, stored_slice: StoredSlice) -> None:
            slices = table.setdefault(name, {})
            if expert_half in slices:
                raise ConversionError(
                    f"{self.source}: both {slices[expert_half].tensor.name} and "
                    f"{stored_slice.tensor.name} are {name}"
                )
            slices[expert_half] = stored_slice

        name = our_name(megatron_name)
        if name is None:
            return
        layer = _LAYER.fullmatch(name)
        if not layer:
            add(name, (-1, -1), StoredSlice(tensor))
            return
        prefix, of_one, tail = layer.groups()
        half = _HALVES.get(tail[-2:], -1) if re.fullmatch(r".+\.(weight|bias)_[wv]", tail) else -1
        if half >= 0:
            tail = tail[:-2]
        experts = _EXPERTS.fullmatch(tail)
        expert = -1
        if experts:
            tail = f"{experts[1]}mlp.experts.{experts[3]}"
            expert = -1 if experts[2] is None else int(experts[2])
        if of_one is not None:
            add(f"{prefix}{int(of_one)}.{tail}", (expert, half), StoredSlice(tensor))
            return
        if not tensor.shape or not tensor.shape[0]:
            add(name, (-1, -1), StoredSlice(tensor))
            return
        for number in range(tensor.shape[0]):
            add(f"{prefix}{number}.{tail}", (expert, half), StoredSlice(tensor, number))

    def vocabulary_rows(self) -> int:
        """Rows of the word embedding, with padding."""
        slices = self.slices.get(WORD_EMBEDDING)
        if not slices:
            raise ConversionError(f"{self.source}: {WORD_EMBEDDING} is missing")
        shape = slices[-1, -1].shape
        return shape[0] if shape else 0

    def weights(self, table: Mapping[str, ParameterSpec], model: ModelConfig) -> list[Entry]:
        """Our tensors. Raises ConversionError unless theirs are exactly those of the table."""
        if model.num_experts is not None and model.mlp_bias:
            raise ConversionError(
                f"{self.source}: num_experts {model.num_experts} with biases (add_bias_linear) is "
                "not converted; import the model from Hugging Face [config-key-not-supported]"
            )
        return self._incoming(self.slices, table, model)

    def _incoming(
        self, stored: Slices, table: Mapping[str, ParameterSpec], model: ModelConfig
    ) -> list[Entry]:
        lines = [
            f"{next(iter(slices.values())).tensor.name} is not a part of this model"
            for name, slices in stored.items()
            if name not in table
        ]
        weights = []
        for name, spec in table.items():
            wrong = _problem(spec, stored.get(name, {}), model)
            if wrong:
                lines.append(wrong)
                continue
            made_of = [stored_slice for _, stored_slice in sorted(stored[name].items())]
            merged = partial(_merged, spec.shape, made_of)
            weights.append(Entry(name, made_of[0].tensor.dtype, spec.shape, merged))
        if lines:
            further = [f"{self.source}: and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
            raise ConversionError(
                "\n".join([f"{self.source}: {line}" for line in lines[:_SHOWN]] + further)
            )
        return weights


def _problem(
    spec: ParameterSpec, slices: Mapping[ExpertHalf, StoredSlice], model: ModelConfig
) -> str | None:
    """Why a tensor of ours cannot be made, or None."""
    if not slices:
        return f"{spec.name} is missing"
    experts = range(spec.shape[0]) if any(expert >= 0 for expert, _ in slices) else (-1,)
    gated = model.gated and ".linear_fc1." in spec.name
    halves = (0, 1) if any(half >= 0 for _, half in slices) else (-1,)
    want = [(expert, half) for expert in experts for half in halves]
    if sorted(slices) != want or (halves != (-1,) and not gated):
        return f"{spec.name}: its experts or halves are not complete, or are there twice"
    lead = spec.shape[:1] if ".mlp.experts." in spec.name else ()
    shape = spec.shape[len(lead) :]
    if gated:
        shape = (shape[0] * shape[1] // len(halves), *shape[2:])
    if experts == (-1,):
        shape = (*lead, *shape)
    for stored_slice in slices.values():
        if stored_slice.shape != shape:
            return (
                f"{stored_slice.tensor.name} has shape {list(stored_slice.tensor.shape)}, of which "
                f"{list(stored_slice.shape)} should be {list(shape)} by its arguments"
            )
    dtypes = {stored_slice.tensor.dtype for stored_slice in slices.values()}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        return f"{spec.name} is {', '.join(sorted(map(str, dtypes)))}, should be one format"
    return None
