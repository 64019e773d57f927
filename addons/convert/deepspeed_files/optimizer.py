"""The optimizer of Megatron-DeepSpeed's checkpoints with ZeRO 1 or 2:
zero_pp_rank_{d}_mp_rank_{m}_optim_states.pt, of every data-parallel rank and model-parallel rank.

Each file has flat buffers (fp32 weights, Adam's moments) of one data-parallel part of each group of
parameters; param_slice_mappings says by name where a parameter is in them. A parameter that crosses
the end of a part continues in the next rank's file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.safetensors_file import Entry, row_major
from megatron.checkpoint.state import RunState
from megatron.config.plan.parameters import ParameterSpec

from ..links import ConversionError, joined
from ..run_counters import RunCounters, dicts
from ..torch_files import StoredPart, TorchFile, read_all

_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ROOT = "optimizer_state_dict"
_GROUPS = "single_partition_of_fp32_groups"
_MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("fp32_param", *_MOMENTS)
_REMEDY = "give --no-load-optim to convert the weights alone"
_BY_TOKENS = ("lr_warmup_tokens", "lr_decay_tokens")
_TIED = "tied_modules."  # its prefix of parameters that several pipeline stages have

Parts = list[StoredPart]


def _chained(parts: Parts) -> torch.Tensor:
    """The numbers that the data-parallel ranks of a tensor-parallel rank hold."""
    return torch.cat([part.read() for part in parts])


@dataclass
class ZeroOptimizer:
    """The open files of `tp` x `pp` model-parallel ranks; raises ConversionError for what cannot be
    converted."""

    source: Path
    tp: int
    pp: int
    files: dict[tuple[int, int], TorchFile] = field(default_factory=dict)

    @classmethod
    def open(cls, source: Path, tp: int, pp: int) -> ZeroOptimizer | None:
        """The optimizer of a folder, or None without files of one."""
        paths = {
            (int(match[2]), int(match[1])): path
            for path in (source.iterdir() if source.is_dir() else ())
            if (match := _FILE.fullmatch(path.name))
        }
        if not paths:
            return None
        optimizer = cls(source, tp, pp)
        strange = [path.name for (m, _), path in sorted(paths.items()) if m >= tp * pp]
        if strange:
            raise optimizer.wrong(
                f"{strange[0]} is of no rank of {tp} tensor x {pp} pipeline ranks"
            )
        for m in range(tp * pp):
            ranks = sorted(d for rank, d in paths if rank == m)
            if not ranks or ranks != list(range(len(ranks))):
                raise optimizer.wrong(
                    f"the optimizer's files of mp_rank_{m:02d} are those of the data-parallel "
                    f"ranks {ranks}, should be 0, 1, 2, ..."
                )
        optimizer.files = read_all(dict(sorted(paths.items())), (f"{_ROOT}.",))
        for (m, _), file in optimizer.files.items():
            world = optimizer._state(file).get("partition_count")
            if isinstance(world, list) and world and world[0] != optimizer.ranks(m):
                raise optimizer.wrong(
                    f"{file.path.name} is one of {world[0]} data-parallel ranks, "
                    f"{optimizer.ranks(m)} are there"
                )
        return optimizer

    def wrong(self, text: str) -> ConversionError:
        """The error that says it."""
        return ConversionError(f"{self.source}: {text}; {_REMEDY}")

    def ranks(self, m: int) -> int:
        """Data-parallel ranks of a model-parallel rank."""
        return sum(rank == m for rank, _ in self.files)

    def _state(self, file: TorchFile) -> Mapping[str, Any]:
        state = file.values.get(_ROOT)
        if not isinstance(state, dict):
            raise self.wrong(f"{file.path.name} has no {_ROOT}")
        return state

    def parts(self, names: Mapping[str, str]) -> dict[str, dict[str, list[Parts]]]:
        """By kind and our name, of each tensor-parallel rank the parts, in order. `names`: ours by
        theirs."""
        by_kind: dict[str, dict[str, list[Parts]]] = {kind: {} for kind in KINDS}
        for t in range(self.tp):
            in_stages: set[str] = set()
            for p in range(self.pp):
                stage: dict[str, dict[str, Parts]] = {kind: {} for kind in KINDS}
                for d in range(self.ranks(p * self.tp + t)):
                    for kind, zero_name, part in self._slices(self.files[p * self.tp + t, d]):
                        if zero_name not in names:
                            raise self.wrong(f"{zero_name} is in the optimizer, and no weight")
                        stage[kind].setdefault(zero_name, []).append(part)
                for kind, tensors in stage.items():
                    for zero_name, parts in tensors.items():
                        if p and zero_name.startswith(_TIED) and names[zero_name] in in_stages:
                            continue  # the last stage's copy of a tied embedding
                        by_kind[kind].setdefault(names[zero_name], []).append(parts)
                in_stages |= {names[zero_name] for zero_name in stage[KINDS[0]]}
        return by_kind

    def _slices(self, file: TorchFile) -> Iterator[tuple[str, str, StoredPart]]:
        """(kind, their name, part) of a file."""
        state = self._state(file)
        groups = state.get("param_slice_mappings")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise self.wrong(
                f"{file.path.name} has no param_slice_mappings (DeepSpeed writes them since 0.7)"
            )
        elastic = "" if isinstance(state.get("base_optimizer_state"), list) else ".state"
        for number, group in enumerate(groups):
            paths = {
                "fp32_param": f"{_ROOT}.{_GROUPS}.{number}",
                **{
                    kind: f"{_ROOT}.base_optimizer_state{elastic}.{number}.{kind}"
                    for kind in _MOMENTS
                },
            }
            for name, bounds in group.items():
                bounds = bounds if isinstance(bounds, dict) else {}
                start: Any = bounds.get("start")
                size: Any = bounds.get("numel")
                for kind, path in paths.items():
                    buffer = file.tensors.get(path)
                    if buffer is None or buffer.dtype != torch.float32 or len(buffer.shape) != 1:
                        raise self.wrong(f"{file.path.name}: {path} is no flat buffer in float32")
                    if not _within(start, size, buffer.shape[0]):
                        raise self.wrong(
                            f"{file.path.name}: {name} is at {start!r}, {size!r} numbers, in a "
                            f"buffer of {buffer.shape[0]}"
                        )
                    yield kind, name, buffer.part(start, (size,))

    def tensors(
        self,
        table: Mapping[str, ParameterSpec],
        names: Mapping[str, str],
        weights: Mapping[str, Entry],
    ) -> dict[str, dict[str, Callable[[], torch.Tensor]]]:
        """By kind and our name, what makes each tensor. `weights` make the weights, which the fp32
        weights must be after rounding."""
        by_kind = self.parts(names)
        for kind, tensors in by_kind.items():
            strange = sorted(tensors.keys() ^ table.keys())
            if strange:
                raise self.wrong(f"{kind} of {strange[0]} is missing")
            for name, ranks in tensors.items():
                size = math.prod(table[name].local_shape({"tp": self.tp}))
                sizes = [sum(part.shape[0] for part in parts) for parts in ranks]
                if sizes != [size] * self.tp:
                    raise self.wrong(
                        f"{kind} of {name} has {sizes} numbers on the tensor ranks, should be "
                        f"{size} on each of {self.tp}"
                    )
        makers: dict[str, dict[str, Callable[[], torch.Tensor]]] = {
            kind: {
                name: partial(joined, table[name], [partial(_chained, parts) for parts in ranks])
                for name, ranks in tensors.items()
            }
            for kind, tensors in by_kind.items()
        }
        for name, weight in weights.items():
            if not torch.equal(makers["fp32_param"][name]().to(weight.dtype), row_major(weight)):
                raise self.wrong(f"the optimizer's fp32 weights of {name} are not the weights")
        return makers

    def run_state(self, root: Mapping[str, Any], args: Mapping[str, Any]) -> RunState:
        """Counters from the root of a file of weights and its arguments."""
        schedule = root.get("lr_scheduler") or root.get("opt_param_scheduler")
        schedule = schedule if isinstance(schedule, dict) else {}
        for name in _BY_TOKENS:
            if schedule.get(name) is not None:
                raise self.wrong(
                    f"its learning rate follows from tokens ({name} {schedule[name]!r}), which "
                    "has no flag here"
                )
        scaler = self._loss_scale()
        return RunCounters(self.source, _REMEDY).run_state(
            root, args, schedule, self._updates(), scaler
        )

    def _updates(self) -> set[float]:
        """How many updates the optimizer has made; one number in a good checkpoint."""
        updates = set()
        for file in self.files.values():
            state = self._state(file)
            for table in dicts(state.get("base_optimizer_state")):
                if isinstance(table.get("step"), (int, float)):
                    updates.add(table["step"])
            if isinstance(state.get("base_optimizer_state_step"), (int, float)):
                updates.add(state["base_optimizer_state_step"])
            updates |= {
                float(part.read())
                for name, part in file.tensors.items()
                if name.endswith(".step") and math.prod(part.shape) == 1
            }
        return updates

    def _loss_scale(self) -> dict[str, Any] | None:
        """The dynamic loss scale; it counts iterations since the last overflow, we count updates
        since the last change."""
        scaler = self._state(self.files[0, 0]).get("loss_scaler")
        if not isinstance(scaler, dict) or not scaler.get("dynamic"):
            return None
        numbers: dict[str, Any] = {
            name: scaler.get(name)
            for name in ("cur_iter", "last_overflow_iter", "scale_window", "cur_hysteresis")
        }
        if (
            any(type(number) is not int for number in numbers.values())
            or numbers["scale_window"] < 1
        ):
            raise self.wrong(f"its loss_scaler has {numbers}")
        stable = numbers["cur_iter"] - numbers["last_overflow_iter"] - 2
        return {
            "scale": scaler.get("cur_scale"),
            "growth_tracker": max(0, stable) % numbers["scale_window"],
            "hysteresis_tracker": max(1, numbers["cur_hysteresis"]),
        }


def _within(start: Any, size: Any, length: int) -> bool:
    return type(start) is int and type(size) is int and 0 <= start and 0 < size <= length - start
