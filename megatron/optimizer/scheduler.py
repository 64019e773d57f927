"""Learning rate and weight decay as functions of the samples consumed, written into param groups.

The formulas give Megatron's numbers bit for bit. The loop calls `after_iteration` once per
iteration, also for iterations that make no update.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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


_ANNEAL = ("lr_wsd_decay_style", "wsd_decay_steps")
_WSD_S = (*_ANNEAL, "wsd_decay_ends")
_POWER = (*_ANNEAL, "power_scale", "power_exponent")


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
