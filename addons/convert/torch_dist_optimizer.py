"""The optimizer of a torch_dist checkpoint: its counters, and where Adam's moments and the main
weights are in the buffers of Megatron's distributed optimizer.

By name (fully_reshardable, and every optimizer that is not distributed) the tensors are stored as
the weights are; torch_dist.py reads them. By buffer (dp_reshardable, Megatron-LM's default) each
model-parallel rank has flat buffers of its parameters, last parameter first, each at a multiple of
64 numbers. Nothing there says which parameter is where: the order is that of the modules, and the
main weights must be the weights, bit by bit, or nothing is converted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron.checkpoint.safetensors_file import Entry, row_major
from megatron.checkpoint.state import RunState
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import (
    LAYER_PREFIX,
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    ParameterSpec,
)

from .links import ConversionError, joined
from .run_counters import RunCounters, dicts
from .torch_dist_tensor import StoredTensor
from .torch_files import TorchFile

# Names of the tensors of one parameter, theirs and ours.
KINDS = {
    "param": "fp32_param",
    "fp32_param": "fp32_param",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
}
BY_NAME = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
BUFFER = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\."
    r"(\w+)"
)
REMEDY = (
    "save it with Megatron-LM's --dist-ckpt-optim-fully-reshardable, or give --no-load-optim to "
    "convert the weights alone"
)
_READ = ("fully_reshardable", "dp_reshardable", None)
_ALIGNMENT = 64  # numbers, of each parameter in a buffer
_COUNTS = ("step", "common_step")
_MODULES = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.linear_q_proj", "self_attention.linear_q_down_proj"),
    *("self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj"),
    "self_attention.linear_kv_up_proj",
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "self_attention.kv_layernorm"),
    *("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"),
)
# Transformer Engine's layers have the norm inside the matrix behind it.
_ORDERS = (_MODULES, (_MODULES[1], _MODULES[0], *_MODULES[2:]))


Make = Callable[[], torch.Tensor]
Buffers = dict[str, dict[tuple[int, int], dict[int, StoredTensor]]]


class FlatBuffers:
    """Flat buffers of all model-parallel ranks: by kind, by (rank, buffer), by bucket."""

    def __init__(self, source: Any, args: Mapping[str, Any]):
        self.source = source
        self.by_kind: Buffers = {}
        self._dtypes: dict[tuple[int, int], str] = {}
        self._args = args

    def add(self, match: re.Match[str], tensor: StoredTensor) -> None:
        """Note a bucket, whose name matched BUFFER."""
        group, buffer, bucket = int(match[1]), int(match[2]), int(match[4])
        if match[5] not in KINDS:
            raise self._wrong(f"{tensor.name} is no state of Adam")
        if self._dtypes.setdefault((group, buffer), match[3]) != match[3] or len(tensor.shape) != 1:
            raise self._wrong(f"{tensor.name} is not one flat buffer of one dtype")
        kind = self.by_kind.setdefault(KINDS[match[5]], {})
        kind.setdefault((group, buffer), {})[bucket] = tensor

    def _wrong(self, text: str) -> ConversionError:
        return ConversionError(f"{self.source}: {text}; {REMEDY}")

    def locate(
        self, table: Mapping[str, ParameterSpec], model: ModelConfig, weights: Mapping[str, Entry]
    ) -> dict[str, dict[str, Make]]:
        """By kind and name, what makes each parameter's tensor. `weights` make the weights. Raises
        ConversionError where the main weights are not those."""
        if model.num_experts or model.mtp_num_layers:
            what = "experts" if model.num_experts else "multi-token prediction"
            raise self._wrong(f"buffers of models with {what} are not read")
        tp, pp = (self._size(f"{word}_model_parallel_size") for word in ("tensor", "pipeline"))
        keys = set(self.by_kind.get("fp32_param", {}))
        buffers = 1 + max((buffer for _, buffer in keys), default=-1)
        want = {(group, buffer) for group in range(tp * pp) for buffer in range(buffers)}
        kinds = ("fp32_param", "exp_avg", "exp_avg_sq")
        if not keys or any(self.by_kind.get(kind, {}).keys() != want for kind in kinds):
            raise self._wrong(f"its buffers are not those of {tp} tensor x {pp} pipeline ranks")
        if model.num_layers % (pp * buffers):
            raise self._wrong(f"{model.num_layers} layers on {pp} stages are not read")
        for order in _ORDERS:
            walks = {kind: self._walk(kind, table, (tp, pp, buffers), order) for kind in kinds}
            located = {kind: walk for kind, walk in walks.items() if walk}
            if len(located) == len(kinds) and all(
                torch.equal(located["fp32_param"][name]().to(weight.dtype), row_major(weight))
                for name, weight in weights.items()
            ):
                return located
        raise self._wrong("the main weights in its buffers are not the weights of the model")

    def _size(self, name: str) -> int:
        value = self._args.get(name)
        if type(value) is not int or not 1 <= value < 1 << 20:
            raise self._wrong(f"its arguments have {name} {value!r}")
        return value

    def _walk(
        self,
        kind: str,
        table: Mapping[str, ParameterSpec],
        sizes: tuple[int, int, int],
        order: Sequence[str],
    ) -> dict[str, Make] | None:
        """Where each parameter is if the modules are in this order; None where they do not fit."""
        tp, pp, buffers = sizes
        spans: dict[str, list[Make]] = {}
        for group, buffer in sorted(self.by_kind[kind]):
            stage = buffer * pp + group // tp
            names = _names(table, stage, pp * buffers, order)
            buckets = self.by_kind[kind][group, buffer]
            located = _spans([buckets[number] for number in sorted(buckets)], table, names, tp)
            if located is None:
                return None
            for name, span in located:
                spans.setdefault(name, []).append(span)
        return {name: partial(joined, table[name], made[:tp]) for name, made in spans.items()}


def _names(
    table: Mapping[str, ParameterSpec], stage: int, stages: int, order: Sequence[str]
) -> list[str]:
    """Parameters of a stage in the order of its modules."""
    by_layer: dict[int, list[str]] = {}
    for name, spec in table.items():
        if spec.layer is not None:
            by_layer.setdefault(spec.layer, []).append(name)

    def sort_key(name: str) -> tuple[int, bool]:
        module, _, kind = name.split(".", 3)[3].rpartition(".")
        return order.index(module), kind == "bias"

    count = len(by_layer) // stages
    names = [name for name in table if name.startswith("embedding.")] if stage == 0 else []
    for layer in range(stage * count, (stage + 1) * count):
        names += sorted(by_layer[layer], key=sort_key)
    if stage == stages - 1:
        outside_layers = [
            name for name in table if not name.startswith(("embedding.", LAYER_PREFIX))
        ]
        copy = OUTPUT_LAYER not in table and stages > 1  # of a tied embedding
        names += sorted(
            outside_layers, key=lambda name: (name == OUTPUT_LAYER, name.endswith("bias"))
        )
        names += [WORD_EMBEDDING] * copy
    return names


def _spans(
    buckets: Sequence[StoredTensor],
    table: Mapping[str, ParameterSpec],
    names: Sequence[str],
    tp: int,
) -> list[tuple[str, Make]] | None:
    """(parameter, what reads its numbers), last parameter first, or None where the buckets do not
    hold just these."""
    spans: list[tuple[str, Make]] = []
    position = number = 0
    for name in reversed(names):
        size = math.prod(table[name].local_shape({"tp": tp}))
        position = -(-position // _ALIGNMENT) * _ALIGNMENT
        if number < len(buckets) and position >= buckets[number].shape[0]:
            position = 0
            number += 1
        if number >= len(buckets) or position + size > buckets[number].shape[0]:
            return None
        spans.append((name, partial(buckets[number].read, ((position, position + size),))))
        position += size
    ended = number == len(buckets) - 1 and buckets[number].shape[0] - position < _ALIGNMENT
    return spans if ended else None


def check_format(source: Any, common: Mapping[str, Any]) -> None:
    """Raise ConversionError for a format of the distributed optimizer that is not read."""
    for table in dicts(common.get("optimizer")):
        kind = table.get("param_state_sharding_type")
        if kind not in _READ:
            raise ConversionError(f"{source}: its optimizer is in the format {kind!r}; {REMEDY}")


def run_state(
    source: Any,
    common: Mapping[str, Any],
    objects: Mapping[str, Any],
    file: TorchFile,
    args: Mapping[str, Any],
) -> RunState:
    """Counters of the run and of the optimizer from common.pt. Raises ConversionError for what is
    missing."""
    counters = RunCounters(source, REMEDY)
    schedule = common.get("opt_param_scheduler")
    scaler = None
    grown = next(
        (
            table["grad_scaler"]
            for table in dicts(common.get("optimizer"))
            if "grad_scaler" in table
        ),
        None,
    )
    if isinstance(grown, dict):
        scale = next((name for name in file.tensors if name.endswith("grad_scaler.scale")), None)
        value = float(file.tensors[scale].read()) if scale else grown.get("scale")
        trackers = ("growth_tracker", "hysteresis_tracker")
        scaler = {"scale": value} | {name: grown[name] for name in trackers if name in grown}
    return counters.run_state(
        common,
        args,
        schedule if isinstance(schedule, dict) else {},
        _updates(common, objects, file),
        scaler,
    )


def _updates(common: Mapping[str, Any], objects: Mapping[str, Any], file: TorchFile) -> set[float]:
    """How many updates the optimizer has made; one number in a good checkpoint."""
    updates = {
        state[name]
        for table in (common.get("optimizer"), *objects.values())
        for state in dicts(table)
        for name in _COUNTS
        if isinstance(state.get(name), (int, float))
    }
    endings = tuple(f".{count}" for count in _COUNTS)
    for name, part in file.tensors.items():
        if name.startswith("optimizer.") and name.endswith(endings) and math.prod(part.shape) == 1:
            updates.add(float(part.read()))
    return updates
