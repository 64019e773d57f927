"""Builds the schedule of learning rate and weight decay from a command line. Loads no torch."""

from __future__ import annotations

from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.optimizer.scheduler import HasParamGroups, OptimizerParamScheduler, schedule_steps


def build_scheduler(
    config: Config, plan: Plan, optimizer: HasParamGroups
) -> OptimizerParamScheduler:
    """Learning rate and weight decay over the run, in samples."""
    steps = schedule_steps(config.optimizer, config.training, plan.batch.final_global_batch_size)
    return OptimizerParamScheduler(optimizer, config.optimizer, steps)
