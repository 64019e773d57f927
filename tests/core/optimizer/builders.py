"""Optimizers, loss scales and schedules of a few values, in the names of flags and of Megatron."""

from typing import Any

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.optimizer import precision_aware as moments
from megatron.optimizer.optimizer import MixedPrecisionOptimizer, ModelRanks
from megatron.optimizer.scaler import DynamicGradScaler
from megatron.optimizer.scheduler import OptimizerParamScheduler, ScheduleSteps, schedule_steps

# what MixedPrecisionOptimizer takes besides its config
OTHERS = (
    "grad_scaler embed_grad_scale log_num_zeros_in_grad counts reduce_sum reduce_max span"
).split()
STEPS = (
    "lr_warmup_steps lr_decay_steps wd_incr_steps wsd_decay_steps zero_lr_steps lr_warmup_lead "
    "wsd_decay_ends power_scale"
)


def optimizer_of(params: Any, **values: Any) -> MixedPrecisionOptimizer:
    """An optimizer; `values` are fields of its config or arguments of its constructor."""
    others = {name: values.pop(name) for name in OTHERS if name in values}
    ranks = ModelRanks(**{name: others.pop(name) for name in ModelRanks._fields if name in others})
    return MixedPrecisionOptimizer(params, OptimizerConfig(**values), ranks=ranks, **others)


def dynamic_scaler(initial_loss_scale: float, **values: Any) -> DynamicGradScaler:
    """A dynamic loss scale of these flags."""
    return DynamicGradScaler(PrecisionConfig(initial_loss_scale=initial_loss_scale, **values))


def steps_of(global_batch_size: int, seq_length: int = 1, **flags: Any) -> ScheduleSteps:
    """The horizons of these flags."""
    training = {name: flags.pop(name) for name in ("train_iters", "train_samples") if name in flags}
    return schedule_steps(
        OptimizerConfig(**flags), TrainingConfig(**training), global_batch_size, seq_length
    )


def scheduler_of(optimizer: Any, **values: Any) -> OptimizerParamScheduler:
    """A scheduler of the keyword arguments of Megatron's OptimizerParamScheduler, and of this
    suite's horizons."""
    steps = ScheduleSteps(**{name: values.pop(name) for name in STEPS.split() if name in values})
    names = {
        "init_lr": "lr_warmup_init",
        "max_lr": "lr",
        "wd_incr_style": "weight_decay_incr_style",
    }
    start, end = values.pop("start_wd"), values.pop("end_wd")
    decay = {"weight_decay": start, "start_weight_decay": start, "end_weight_decay": end}
    flags = {names.get(name, name): value for name, value in values.items()}
    return OptimizerParamScheduler(optimizer, OptimizerConfig(**decay, **flags), steps)


def load_state(
    optimizer: MixedPrecisionOptimizer,
    tensors: dict[str, torch.Tensor],
    counters: dict[str, object],
) -> None:
    """Copy a state (of `state`) into place, as a checkpoint is loaded, then the main weights
    to the model."""
    with torch.no_grad():
        for name, tensor in optimizer.tensors().items():
            tensor.copy_(moments.convert(name, tensors[name], tensor.dtype))
        optimizer.load_counters(counters)
        optimizer._copy_main_to_model()
