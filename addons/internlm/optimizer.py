"""The optimizer of InternLM's training checkpoints: optimizer_tp{t}_pp{p}_zo{z}.pt and context.pt.

Each ZeRO rank has flat buffers (fp32 weights, Adam's moments) of some parameters of its tensor and
pipeline rank, one behind the other, largest first. Which ones follows from the sizes, by one of two
rules, and the files do not say which: the fp32 weights must be the weights of the model, bit by bit
after rounding, or nothing is converted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.arguments import build_parser, config_from, parse_typed
from megatron.checkpoint.state import RunState
from megatron.config import architecture
from megatron.config.model import ModelConfig
from megatron.config.plan.zero_partition import whole_parameters
from megatron.config.tree import Config
from megatron.features.registry import RunConfig
from megatron.optimizer.scheduler import OptimizerParamScheduler, schedule_steps

from ..convert.config_keys import MAX_INTEGER
from ..convert.links import ConversionError
from ..convert.run_counters import RunCounters
from ..convert.torch_files import StoredPart, TorchFile, read_all, read_file

_FILE = re.compile(r"optimizer_tp(\d+)_pp(\d+)_zo(\d+)\.pt")
CONTEXT = "context.pt"
_ADAM = "base_optim_states.state.0."
# Our kinds of tensors and the flat buffers of a file.
_BUFFERS = {
    "fp32_param": "flat_fp32_weights.0",
    "exp_avg": _ADAM + "exp_avg",
    "exp_avg_sq": _ADAM + "exp_avg_sq",
}
_RAMPS = ("rampup_batch_size", "rampup_micro_batches", "step_batch_size_schedule")
_REMEDY = "omit --args to convert the weights alone"

Ranks = dict[tuple[int, int], dict[str, StoredPart]]


@dataclass(frozen=True)
class Shards:
    """By kind and parameter its parts on the tensor ranks; numbers of updates; loss scale."""

    parts: Mapping[str, Mapping[str, list[StoredPart]]]
    updates: Collection[float]
    scaler: Mapping[str, float]


def has_optimizer(source: Path) -> bool:
    """Has the folder files of the optimizer?"""
    return any(_FILE.fullmatch(path.name) for path in source.iterdir())


def read_flags(path: Path) -> Config:
    """The run's configuration from a file of flags. Raises ConversionError."""
    values = parse_typed(build_parser(RunConfig, prog="args", description=""), [f"@{path}"])
    config = config_from(RunConfig, values)
    o, t = config.optimizer, config.training
    lacking = [
        flag
        for flag, value in (
            ("--global-batch-size", t.global_batch_size),
            ("--lr", o.lr),
            ("--train-iters", t.train_iters),
        )
        if value is None
    ]
    if lacking:
        raise ConversionError(f"--args {path}: {', '.join(lacking)} missing; add it")
    if o.optimizer != "adam":
        raise ConversionError(f"--args {path}: --optimizer {o.optimizer}, InternLM's is adam")
    ramps = [name for name in _RAMPS if values.get(name) is not None]
    if ramps:
        flag = "--" + ramps[0].replace("_", "-")
        raise ConversionError(
            f"--args {path}: {flag}: the samples that a growing batch has read are not in "
            f"InternLM's files; {_REMEDY}"
        )
    return config


def optimizer_parts(source: Path, ranks: Ranks) -> Shards:
    """Where the optimizer's tensors are. Raises ConversionError unless the fp32 weights are the
    weights of `ranks`."""
    files = {
        (int(m[1]), int(m[2]), int(m[3])): path
        for path in source.iterdir()
        if (m := _FILE.fullmatch(path.name))
    }
    zero = 1 + max((z for _, _, z in files), default=-1)
    wanted = {(t, p, z) for t, p in ranks for z in range(zero)}
    if not files or files.keys() != wanted:
        wrong = sorted(wanted ^ files.keys()) or [(0, 0, 0)]
        name = "optimizer_tp{}_pp{}_zo{}.pt".format(*wrong[0])
        problem = "is of another layout than the model" if wrong[0] in files else "is missing"
        raise ConversionError(f"{source}: {name} {problem}; {_REMEDY}")
    parts: dict[str, dict[str, list[StoredPart]]] = {kind: {} for kind in _BUFFERS}
    by_rank = read_all(dict(sorted(files.items())))
    opened = list(by_rank.values())
    for (t, p), model in ranks.items():
        shards = [by_rank[t, p, z] for z in range(zero)]
        for name, (file, start) in _located(shards, model).items():
            for kind, path in _BUFFERS.items():
                part = file.tensors[path].part(start, model[name].shape)
                parts[kind].setdefault(name, []).append(part)
    counts = [
        _scalar(file, _ADAM + "step") for file in opened if _BUFFERS["exp_avg"] in file.tensors
    ]
    updates = {-1 if count is None else count for count in counts}
    names = ("_scale", "_growth_step", "_hysteresis_step")
    scaler = {name: _scalar(opened[0], f"grad_scaler.{name}") for name in names}
    return Shards(
        parts, updates, {name: number for name, number in scaler.items() if number is not None}
    )


def _located(
    shards: Sequence[TorchFile], model: Mapping[str, StoredPart]
) -> dict[str, tuple[TorchFile, int]]:
    """(file, first number) of each parameter of a tensor and pipeline rank."""
    lengths = [_length(file) for file in shards]
    sizes = {name: math.prod(part.shape) for name, part in model.items()}
    largest_first = sorted(sizes, key=lambda name: -sizes[name])
    in_order = whole_parameters([*sizes], [(size,) for size in sizes.values()], len(shards))
    walked = zip(sizes, in_order.owners, strict=True)  # with overlap_sync_param
    rules = (
        _least_loaded(sizes, largest_first, len(shards)),
        {name: rank for name, ((_, rank),) in walked},
    )
    for owner in rules:
        ends = [0] * len(shards)
        locations = {}
        for name in largest_first:
            locations[name] = shards[owner[name]], ends[owner[name]]
            ends[owner[name]] += sizes[name]
        if ends == lengths and _same_weights(locations, model):
            return locations
    raise ConversionError(
        f"{shards[0].path}: its fp32 weights are not the weights of the model, in neither of "
        f"InternLM's two orders; {_REMEDY}"
    )


def _length(file: TorchFile) -> int:
    """Numbers in each flat buffer of a file, 0 where it has none."""
    flat = [
        name
        for name in file.tensors
        if name.startswith(("flat_fp32_weights.", "base_optim_states."))
    ]
    several = sorted(
        name
        for name in flat
        if name not in _BUFFERS.values()
        and name != _ADAM + "step"
        and math.prod(file.tensors[name].shape) > 0
    )
    if several:
        raise ConversionError(
            f"{file.path}: {several[0]}: several groups of parameters, or another optimizer than "
            f"Adam, are not read; {_REMEDY}"
        )
    buffers = [file.tensors.get(path) for path in _BUFFERS.values()]
    layouts = {buffer and (buffer.dtype, buffer.shape) for buffer in buffers}
    if layouts == {None}:
        return 0
    dtype, shape = layouts.pop() or (None, ())
    if layouts or dtype != torch.float32 or len(shape) != 1:
        raise ConversionError(
            f"{file.path}: its buffers are not three flat ones of one length in float32; {_REMEDY}"
        )
    return shape[0]


def _least_loaded(
    sizes: Mapping[str, int], largest_first: Sequence[str], ranks: int
) -> dict[str, int]:
    """Each parameter, largest first, on the rank with the fewest numbers."""
    held = [0] * ranks
    owner = {}
    for name in largest_first:
        owner[name] = held.index(min(held))
        held[owner[name]] += sizes[name]
    return owner


def _same_weights(
    locations: Mapping[str, tuple[TorchFile, int]], model: Mapping[str, StoredPart]
) -> bool:
    for name, (file, start) in locations.items():
        part = file.tensors[_BUFFERS["fp32_param"]].part(start, model[name].shape)
        if not torch.equal(part.read().to(model[name].dtype), model[name].read()):
            return False
    return True


def _scalar(file: TorchFile, path: str) -> float | None:
    """A number of a file, whether it is a tensor there or a plain value."""
    if path in file.tensors:
        tensor = file.tensors[path].read()
        value: Any = float(tensor) if tensor.numel() == 1 else None
    else:
        value = file.values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
    if type(value) not in (int, float):
        return None
    if not abs(value) < MAX_INTEGER:
        raise ConversionError(f"{file.path}: {path} is {value}; {_REMEDY}")
    return float(value)


def run_state(source: Path, run: Config, model: ModelConfig, shards: Shards) -> RunState:
    """Counters of the run. `run`: its flags; what InternLM does not save follows from them."""
    differ = architecture.differences(model, run.model)
    if differ:
        lines = "; ".join(
            f"{difference.name} is {difference.saved}, --args has {difference.now}"
            for difference in differ
        )
        raise ConversionError(f"{source}: {lines}; give the flags of this run")
    context = read_file(source / CONTEXT).values
    for name in ("batch_count", "step_count"):
        if type(context.get(name)) is not int or not 0 <= context[name] < 1 << 48:
            raise ConversionError(
                f"{source / CONTEXT}: {name} is {context.get(name)!r}, should be a number; "
                f"{_REMEDY}"
            )
    size = run.training.global_batch_size
    assert size is not None, "read_flags refuses flags without it"
    steps = schedule_steps(run.optimizer, run.training, size, run.model.seq_length)
    schedule = OptimizerParamScheduler(SimpleNamespace(param_groups=[]), run.optimizer, steps)
    iteration = context["batch_count"] + 1  # InternLM's is the number of the last batch
    counters = schedule.state_dict() | {"num_steps": context["step_count"] * size}
    saved = shards.scaler
    scaler = None
    if run.precision.fp16 and run.precision.loss_scale is None:
        scaler = {
            "scale": saved.get("_scale"),
            "growth_tracker": int(saved.get("_growth_step", 0)),
            # InternLM counts overflows up, we count down from --hysteresis
            "hysteresis_tracker": run.precision.hysteresis - int(saved.get("_hysteresis_step", 0)),
        }
    state = RunCounters(source, _REMEDY).run_state(
        {"iteration": iteration},
        {"consumed_train_samples": iteration * size},
        counters,
        shards.updates,
        scaler,
    )
    return replace(state, scheduler=counters)
