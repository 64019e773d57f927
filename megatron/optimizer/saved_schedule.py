"""A checkpoint's schedule: how it may differ from that of a run that resumes, and which counts."""

import copy
import math
from collections.abc import Mapping
from typing import Any

from megatron import log
from megatron.optimizer.scheduler import OptimizerParamScheduler


def load(scheduler: OptimizerParamScheduler, state: Mapping[str, Any]) -> None:
    """Take a checkpoint's schedule and resume at its `num_steps`.

    Each value: with --override-opt_param-scheduler this run's stays; else, unless
    --use-checkpoint-opt_param-scheduler is given, the two must be equal (ValueError listing all
    that differ), and the checkpoint's is taken. The length of a constant rate or weight decay
    and the minimum of a constant rate have no effect and may differ. Understands Megatron's old
    key names. A state without weight-decay keys leaves those.
    """
    if wrong := problem(scheduler, state):
        raise ValueError(wrong)
    before = copy.copy(scheduler)  # with the checkpoint's values
    for name, label, _, saved in _saved(state):
        setattr(before, name, saved)
        if scheduler.override:
            log.detail(f" > overriding {label} value to {getattr(scheduler, name)}")
        else:
            log.detail(f" > using checkpoint value {saved} for {label}")
            setattr(scheduler, name, saved)
    scheduler.num_steps = 0
    scheduler.step(_first(state, ("num_iters", "num_steps")))
    before.num_steps = scheduler.num_steps
    if not math.isclose(before.get_lr(), scheduler.get_lr(), rel_tol=1e-3):
        log.print_rank_0(
            f" learning rate: {scheduler.get_lr():.4g} from here on, {before.get_lr():.4g} by the "
            "checkpoint's schedule (--override-opt_param-scheduler)"
        )


def problem(scheduler: OptimizerParamScheduler, state: Mapping[str, Any]) -> str | None:
    """Why this schedule cannot resume from the checkpoint's without a flag that chooses
    between the two; None if it can."""
    unused = _unused(scheduler, state)
    different = []
    for name, label, flags, saved in _saved(state):
        current = getattr(scheduler, name)
        if current != saved and name not in unused:
            value = _with_unit(scheduler, name, current)
            saved = _with_unit(scheduler, name, saved)
            different.append(
                f"{_SAMPLES.get(name, label)} is {value} ({flags}) and {saved} in the checkpoint"
            )
    if not different or scheduler.override or scheduler.use_checkpoint:
        return None
    return (
        f"the schedule differs from the checkpoint's: {'; '.join(different)}. Give "
        "--override-opt_param-scheduler to keep the command line's values or "
        "--use-checkpoint-opt_param-scheduler to take the checkpoint's "
        "[schedule-differs-from-checkpoint]"
    )


def _with_unit(scheduler: OptimizerParamScheduler, name: str, value: Any) -> str:
    """A value as it was typed: samples, or iterations of full batches."""
    if isinstance(value, list):
        return ", ".join(_with_unit(scheduler, name, number) for number in value)
    if name not in _SAMPLES:
        return str(value)
    if scheduler.per_iteration and value % scheduler.per_iteration == 0:
        n = scheduler.per_iteration
        return f"{value // n:.0f} iterations of {n} sample{'s' * (n > 1)}"
    return f"{value} samples"


def _unused(scheduler: OptimizerParamScheduler, state: Mapping[str, Any]) -> set[str]:
    """Attributes that neither of the two schedules uses: the length and the end of what stays
    constant."""
    both = {
        "lr_decay_steps": "lr_decay_style",
        "min_lr": "lr_decay_style",
        "wd_incr_steps": "wd_incr_style",
    }
    saved = {name: value for name, _, _, value in _saved(state)}
    return {
        length
        for length, style in both.items()
        if getattr(scheduler, style) == "constant" == saved.get(style)
    }


def _saved(state: Mapping[str, Any]) -> list[tuple[str, str, str, Any]]:
    """(attribute, Megatron's name, flags, value) of each value that a checkpoint's state has."""
    return [
        (*row, _first(state, keys))
        for *row, keys in _STATE_ROWS
        if any(key in state for key in keys)
    ]


def _first(state: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first of `keys` (oldest name first) that the checkpoint has."""
    return next(state[key] for key in keys if key in state)


# attribute, name in Megatron's messages, flags, keys in a checkpoint (old names first); the order
# is that of the lines
_STATE_ROWS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("max_lr", "learning rate", "--lr", ("start_lr", "max_lr")),
    ("min_lr", "minimum learning rate", "--min-lr", ("min_lr",)),
    (
        "lr_warmup_steps",
        "warmup iterations",
        "--lr-warmup-iters, -samples or -fraction",
        ("warmup_iter", "warmup_steps", "lr_warmup_steps"),
    ),
    (
        "lr_decay_steps",
        "total number of iterations",
        "--lr-decay-iters, by default --train-iters",
        ("end_iter", "decay_steps", "lr_decay_steps"),
    ),
    (
        "lr_decay_style",
        "learning rate decay style",
        "--lr-decay-style",
        ("decay_style", "lr_decay_style"),
    ),
    ("start_wd", "start weight decay", "--start-weight-decay or --weight-decay", ("start_wd",)),
    ("end_wd", "end weight decay", "--end-weight-decay or --weight-decay", ("end_wd",)),
    (
        "wd_incr_steps",
        "total number of weight decay iterations",
        "--train-iters",
        ("wd_incr_steps",),
    ),
    ("wd_incr_style", "weight decay incr style", "--weight-decay-incr-style", ("wd_incr_style",)),
    (
        "lr_wsd_decay_style",
        "learning rate anneal style",
        "--lr-wsd-decay-style",
        ("lr_wsd_decay_style",),
    ),
    (
        "wsd_decay_steps",
        "number of anneal iterations",
        "--lr-wsd-decay-iters or -samples",
        ("wsd_decay_steps",),
    ),
    (
        "wsd_decay_ends",
        "iterations at which anneals end",
        "--lr-wsd-decay-end-iters or -samples",
        ("wsd_decay_ends",),
    ),
    (
        "power_scale",
        "learning rate of the power law after one sample",
        "--lr-power-amplitude, --global-batch-size and --seq-length",
        ("power_scale",),
    ),
    (
        "power_exponent",
        "exponent of the learning rate",
        "--lr-power-exponent",
        ("power_exponent",),
    ),
)
# What is counted in samples, whose names in Megatron's messages speak of iterations.
_SAMPLES = {
    "lr_warmup_steps": "the warm-up",
    "lr_decay_steps": "the learning rate decay",
    "wd_incr_steps": "the weight decay increase",
    "wsd_decay_steps": "the final decay",
    "wsd_decay_ends": "the end of each earlier decay",
}
