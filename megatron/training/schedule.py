"""The schedule of learning rate and weight decay that a command line asks for. Loads no torch."""

from __future__ import annotations

from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.optimizer.scheduler import HasParamGroups, OptimizerParamScheduler, schedule_steps


def build_scheduler(
    config: Config, plan: Plan, optimizer: HasParamGroups
) -> OptimizerParamScheduler:
    """Learning rate and weight decay over the run, in samples."""
    o = config.optimizer
    t = config.training
    steps = schedule_steps(
        global_batch_size=plan.batch.final_global_batch_size,
        train_iters=t.train_iters,
        train_samples=t.train_samples,
        lr_decay_iters=o.lr_decay_iters,
        lr_decay_samples=o.lr_decay_samples,
        lr_warmup_fraction=o.lr_warmup_fraction,
        lr_init_iters=o.lr_init_iters,
        lr_warmup_iters=o.lr_warmup_iters,
        lr_warmup_samples=o.lr_warmup_samples,
        lr_wsd_decay_iters=o.lr_wsd_decay_iters,
        lr_wsd_decay_samples=o.lr_wsd_decay_samples,
    )
    constant = o.weight_decay_incr_style == "constant"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=o.lr_warmup_init,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=steps.lr_warmup_steps,
        zero_lr_steps=steps.zero_lr_steps,
        lr_warmup_lead=plan.batch.final_global_batch_size if o.lr_warmup_first_step else 0,
        lr_decay_steps=steps.lr_decay_steps,
        lr_decay_style=o.lr_decay_style,
        start_wd=o.weight_decay if constant else o.start_weight_decay,
        end_wd=o.weight_decay if constant else o.end_weight_decay,
        wd_incr_steps=steps.wd_incr_steps,
        wd_incr_style=o.weight_decay_incr_style,
        wsd_decay_steps=steps.wsd_decay_steps,
        lr_wsd_decay_style=o.lr_wsd_decay_style,
        use_checkpoint_opt_param_scheduler=o.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=o.override_opt_param_scheduler,
    )
