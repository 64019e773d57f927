"""Counters of a run that Megatron-LM or Megatron-DeepSpeed has saved: iteration, samples, schedule,
updates of the optimizer, loss scale."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.state import RunState

from .links import ConversionError

_SCHEDULE = (
    *("max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr"),
    *("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps"),
)


@dataclass(frozen=True)
class RunCounters:
    """Reads them from a checkpoint at `source`; `remedy` ends each message."""

    source: Any
    remedy: str

    def run_state(
        self,
        root: Mapping[str, Any],
        args: Mapping[str, Any],
        schedule: Mapping[str, Any],
        updates: Collection[float],
        scaler: Mapping[str, Any] | None,
    ) -> RunState:
        """The state of a run. `root`: has the iteration; `args`: arguments with the samples;
        `updates`: every number of updates that is found in the files; `scaler`: the dynamic loss
        scale. Raises ConversionError for what is missing."""
        lacking = [name for name in _SCHEDULE if not _usable(schedule.get(name))]
        if lacking:
            raise self._wrong(f"its opt_param_scheduler lacks {', '.join(lacking)}")
        self._count(schedule, "num_steps")
        value = next(iter(updates)) if len(updates) == 1 else -1
        if not 0 <= value < 1 << 62 or value != int(value):
            raise self._wrong(
                f"its optimizer's number of updates is {sorted(updates) or 'missing'}, should be "
                "one number"
            )
        return RunState(
            iteration=self._count(root, "iteration"),
            consumed_train_samples=self._count(args, "consumed_train_samples"),
            consumed_valid_samples=self._count(args, "consumed_valid_samples", 0),
            skipped_train_samples=self._count(args, "skipped_train_samples", 0),
            scheduler={name: schedule[name] for name in _SCHEDULE},
            optimizer={
                "optimizer": "adam",
                "step": int(value),
                "grad_scaler": self._loss_scale(scaler),
            },
        )

    def _loss_scale(self, scaler: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if scaler is None:
            return None
        value = scaler.get("scale")
        if not isinstance(value, (int, float)) or not 0 < value < 1 << 62:
            raise self._wrong(f"its loss scale is {value!r}")
        trackers = {name: self._count(scaler, name) for name in scaler if name != "scale"}
        return {"scale": float(value)} | trackers

    def _count(self, table: Mapping[str, Any], name: str, default: int | None = None) -> int:
        value = table.get(name, default)
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise self._wrong(f"{name} is {value!r}, should be a number")
        return value

    def _wrong(self, text: str) -> ConversionError:
        return ConversionError(f"{self.source}: {text}; {self.remedy}")


def _usable(value: Any) -> bool:
    """Is it a finite number, or a word?"""
    return type(value) is str or (type(value) in (int, float) and -math.inf < value < math.inf)


def dicts(tree: Any) -> Iterator[dict[str, Any]]:
    """All dicts in nested dicts and lists."""
    if isinstance(tree, dict):
        yield tree
    if isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from dicts(item)
