"""Learning rate and weight decay as functions of the samples consumed, written into param groups.

The formulas give Megatron's numbers bit for bit. The loop calls `after_iteration` once per
iteration, also for iterations that make no update.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron import log
from megatron.config.optimizer import ANNEALED, OptimizerConfig
from megatron.config.plan.plan import Plan
from megatron.config.training import TrainingConfig
from megatron.config.tree import Config


class HasParamGroups(Protocol):
    """What the scheduler needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class ScheduleSteps:
    """The horizons of a schedule, in samples. A warmup given as a fraction stays a float (25600.0),
    as in Megatron."""

    lr_warmup_steps: float
    lr_decay_steps: int
    wd_incr_steps: int
    wsd_decay_steps: int | None = None
    zero_lr_steps: int = 0
    lr_warmup_lead: int = 0
    per_iteration: int | None = None  # samples, where the flags count iterations
    wsd_decay_ends: tuple[int, ...] = ()  # of WSD-S, without the last, lr_decay_steps
    power_scale: float = 0.0  # the rate of the power scheduler after one sample


def schedule_steps(
    config: OptimizerConfig, training: TrainingConfig, global_batch_size: int, seq_length: int
) -> ScheduleSteps:
    """The horizons in samples: those of --train-samples where it is set, else iterations x
    `global_batch_size`. A sample has `seq_length` tokens."""
    if training.train_samples:
        total = training.train_samples
        decay = total if config.lr_decay_samples is None else config.lr_decay_samples
        warmup: float = config.lr_warmup_samples
        wsd = config.lr_wsd_decay_samples
        ends = config.lr_wsd_decay_end_samples or ()
    else:
        assert training.train_iters, training
        iterations = training.train_iters
        total = iterations * global_batch_size
        decay_iters = iterations if config.lr_decay_iters is None else config.lr_decay_iters
        decay = decay_iters * global_batch_size
        warmup = config.lr_warmup_iters * global_batch_size
        wsd_iters = config.lr_wsd_decay_iters
        wsd = None if wsd_iters is None else wsd_iters * global_batch_size
        ends = tuple(end * global_batch_size for end in config.lr_wsd_decay_end_iters or ())
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay
    if config.lr_decay_style != "WSD-S":
        ends = ()
    power = 0.0
    if config.lr_decay_style == "power":
        power = config.lr_power_amplitude * global_batch_size * seq_length**config.lr_power_exponent
    return ScheduleSteps(
        warmup,
        decay,
        total,
        wsd,
        zero_lr_steps=config.lr_init_iters * global_batch_size,
        lr_warmup_lead=global_batch_size if config.lr_warmup_first_step else 0,
        per_iteration=None if training.train_samples else global_batch_size,
        wsd_decay_ends=ends,
        power_scale=power,
    )


def _decay_coefficient(style: str, ratio: float) -> float:
    """Share of the way from the end value back to the peak when `ratio` of the decay is over (1 ->
    0)."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(ratio)


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of every param group of `optimizer`, at once and at each `step`.

    All *_steps are samples. The rate is 0 for `zero_lr_steps`, then rises over `lr_warmup_steps`
    (its place in them is `lr_warmup_lead` ahead with --lr-warmup-first-step), then decays. A group
    may carry its own `max_lr`, `min_lr` (decoupled learning rate), `lr_mult` and `wd_mult`.
    """

    def __init__(
        self, optimizer: HasParamGroups, config: OptimizerConfig, steps: ScheduleSteps
    ) -> None:
        assert config.lr is not None and config.lr_warmup_init <= config.lr, config
        assert 0.0 <= config.min_lr <= config.lr, config
        self.optimizer = optimizer
        self.init_lr = config.lr_warmup_init
        self.max_lr = float(config.lr)
        self.min_lr = config.min_lr
        self.lr_decay_style = config.lr_decay_style
        self.lr_wsd_decay_style = config.lr_wsd_decay_style
        self.start_wd, self.end_wd = config.weight_decay_range
        self.wd_incr_style = config.weight_decay_incr_style
        self.use_checkpoint = config.use_checkpoint_opt_param_scheduler
        self.override = config.override_opt_param_scheduler
        self.lr_warmup_steps = steps.lr_warmup_steps
        self.lr_decay_steps = steps.lr_decay_steps
        self.wd_incr_steps = steps.wd_incr_steps
        self.wsd_decay_steps = steps.wsd_decay_steps or 0
        self.wsd_decay_ends = [*steps.wsd_decay_ends]
        self.power_scale = steps.power_scale
        self.power_exponent = config.lr_power_exponent
        self.zero_lr_steps = steps.zero_lr_steps
        self.lr_warmup_lead = steps.lr_warmup_lead
        self.per_iteration = steps.per_iteration
        self.num_steps = 0
        assert 0 <= self.lr_warmup_steps < self.lr_decay_steps - self.zero_lr_steps, steps
        assert 0.0 <= self.start_wd <= self.end_wd and self.wd_incr_steps > 0, config
        if self.lr_decay_style in ANNEALED:
            assert 0 < self.wsd_decay_steps <= self.lr_decay_steps, steps
        self.step(0)

    def get_lr(self, group: Mapping[str, Any] | None = None) -> float:
        """The learning rate at `num_steps`, with the limits of `group` where it has its own
        (without its lr_mult)."""
        group = group or {}
        min_lr = group.get("min_lr", self.min_lr)
        n = self.num_steps
        warmup = self.lr_warmup_steps
        # the anneal that n is in, or else the next
        anneal_end = next((end for end in self.wsd_decay_ends if n < end), self.lr_decay_steps)
        anneal_start = anneal_end - self.wsd_decay_steps
        max_lr = group.get("max_lr", self.max_lr)
        if self.lr_decay_style == "power":
            # the warm-up rises to the power law, the anneal falls from it
            step = min(max(n, warmup + self.zero_lr_steps), anneal_start)
            max_lr = max(min_lr, max_lr * self._power(max(step, 1)))
        decay = self.lr_decay_steps
        if n < self.zero_lr_steps:
            return 0.0
        rise = n - self.zero_lr_steps + self.lr_warmup_lead
        if warmup > 0 and rise <= warmup and self.lr_warmup_lead and not self.init_lr:
            return max_lr * (rise / warmup)
        if warmup > 0 and rise <= warmup:
            return self.init_lr + (max_lr - self.init_lr) * rise / warmup
        warmup += self.zero_lr_steps
        if self.lr_decay_style == "constant":
            return max_lr
        if n > decay:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * max(warmup, 1) ** 0.5 / max(n, 1) ** 0.5)
        if self.lr_decay_style in ANNEALED:
            ratio = (n - anneal_start) / self.wsd_decay_steps
            if n <= anneal_start:
                coefficient = 1.0
            elif self.lr_wsd_decay_style == "inverse":
                return 1.0 / (ratio / min_lr + (1.0 - ratio) / max_lr)
            else:
                coefficient = _decay_coefficient(self.lr_wsd_decay_style, ratio)
        else:
            coefficient = _decay_coefficient(self.lr_decay_style, (n - warmup) / (decay - warmup))
        return min_lr + coefficient * (max_lr - min_lr)

    def _power(self, samples: float) -> float:
        """The power scheduler's rate after `samples`, as a share of --lr."""
        rate = self.power_scale * samples**self.power_exponent
        return rate / self.max_lr if rate < self.max_lr else 1.0

    def get_wd(self) -> float:
        """The weight decay at `num_steps` (a group multiplies it by its wd_mult)."""
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return self.end_wd
        ratio = self.num_steps / self.wd_incr_steps
        if self.wd_incr_style == "linear":
            coefficient = ratio
        else:
            coefficient = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.start_wd + coefficient * (self.end_wd - self.start_wd)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and write the rates of the NEXT update into the groups."""
        self.num_steps += increment
        weight_decay = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)

    def after_iteration(self, samples: int, *, overflow: bool = False) -> None:
        """Advance past an iteration of `samples` samples, trained on or skipped.

        An iteration that made an update advances the schedule, and so does one the user skipped
        (--train-range-to-skip): the rate stays a function of the iteration. An fp16 `overflow` does
        not, as in Megatron: that iteration counts its samples, but the rate stays.
        """
        if not overflow:
            self.step(samples)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, with Megatron's keys (the initial rate and the WSD values are not among
        them), and what makes WSD-S and the power scheduler, which Megatron has not."""
        more = {"WSD-S": _WSD_S, "power": _POWER}.get(self.lr_decay_style, ())
        return {name: getattr(self, name) for name in more} | {
            "max_lr": self.max_lr,
            "lr_warmup_steps": self.lr_warmup_steps,
            "num_steps": self.num_steps,
            "lr_decay_style": self.lr_decay_style,
            "lr_decay_steps": self.lr_decay_steps,
            "min_lr": self.min_lr,
            "start_wd": self.start_wd,
            "end_wd": self.end_wd,
            "wd_incr_style": self.wd_incr_style,
            "wd_incr_steps": self.wd_incr_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's schedule and resume at its `num_steps`.

        Each value: with --override-opt_param-scheduler this run's stays; else, unless
        --use-checkpoint-opt_param-scheduler is given, the two must be equal (ValueError listing all
        that differ), and the checkpoint's is taken. The length of a constant rate or weight decay
        and the minimum of a constant rate have no effect and may differ. Understands Megatron's old
        key names. A state without weight-decay keys leaves those.
        """
        problem = self.problem(state)
        if problem:
            raise ValueError(problem)
        before = copy.copy(self)  # with the checkpoint's values
        for name, label, _, saved in _saved(state):
            setattr(before, name, saved)
            if self.override:
                log.detail(f" > overriding {label} value to {getattr(self, name)}")
            else:
                log.detail(f" > using checkpoint value {saved} for {label}")
                setattr(self, name, saved)
        self.num_steps = 0
        self.step(_first(state, ("num_iters", "num_steps")))
        before.num_steps = self.num_steps
        if not math.isclose(before.get_lr(), self.get_lr(), rel_tol=1e-3):
            log.print_rank_0(
                f" learning rate: {self.get_lr():.4g} from here on, {before.get_lr():.4g} by the "
                "checkpoint's schedule (--override-opt_param-scheduler)"
            )

    def problem(self, state: Mapping[str, Any]) -> str | None:
        """Why this schedule cannot resume from the checkpoint's without a flag that chooses
        between the two; None if it can."""
        unused = self._unused(state)
        different = []
        for name, label, flags, saved in _saved(state):
            current = getattr(self, name)
            if current != saved and name not in unused:
                value = self._with_unit(name, current)
                saved = self._with_unit(name, saved)
                different.append(
                    f"{_SAMPLES.get(name, label)} is {value} ({flags}) and {saved} in the "
                    "checkpoint"
                )
        if not different or self.override or self.use_checkpoint:
            return None
        return (
            f"the schedule differs from the checkpoint's: {'; '.join(different)}. Give "
            "--override-opt_param-scheduler to keep the command line's values or "
            "--use-checkpoint-opt_param-scheduler to take the checkpoint's "
            "[schedule-differs-from-checkpoint]"
        )

    def _with_unit(self, name: str, value: Any) -> str:
        """A value as it was typed: samples, or iterations of full batches."""
        if isinstance(value, list):
            return ", ".join(self._with_unit(name, number) for number in value)
        if name not in _SAMPLES:
            return str(value)
        if self.per_iteration and value % self.per_iteration == 0:
            n = self.per_iteration
            return f"{value // n:.0f} iterations of {n} sample{'s' * (n > 1)}"
        return f"{value} samples"

    def _unused(self, state: Mapping[str, Any]) -> set[str]:
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
            if getattr(self, style) == "constant" == saved.get(style)
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
_ANNEAL = ("lr_wsd_decay_style", "wsd_decay_steps")
_WSD_S = (*_ANNEAL, "wsd_decay_ends")
_POWER = (*_ANNEAL, "power_scale", "power_exponent")
# What is counted in samples, whose names in Megatron's messages speak of iterations.
_SAMPLES = {
    "lr_warmup_steps": "the warm-up",
    "lr_decay_steps": "the learning rate decay",
    "wd_incr_steps": "the weight decay increase",
    "wsd_decay_steps": "the final decay",
    "wsd_decay_ends": "the end of each earlier decay",
}


def build_scheduler(
    config: Config, plan: Plan, optimizer: HasParamGroups
) -> OptimizerParamScheduler:
    """Learning rate and weight decay over the run, in samples."""
    steps = schedule_steps(
        config.optimizer,
        config.training,
        plan.batch.final_global_batch_size,
        config.model.seq_length,
    )
    return OptimizerParamScheduler(optimizer, config.optimizer, steps)
