"""Schedules and batch sizes equal to megatron-core 0.16.1, double for double and sample for
sample."""

import random
from types import SimpleNamespace

import pytest

from megatron.config.plan.batch_size import build_batch_size_schedule
from megatron.optimizer import saved_schedule
from tests.core.optimizer.builders import scheduler_of

pytestmark = pytest.mark.peers

scheduler_module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
batches_module = pytest.importorskip("megatron.core.num_microbatches_calculator")


def random_config(rng):
    decay = rng.randint(2, 10 ** rng.randint(1, 9))
    warmup = rng.choice([0, rng.randrange(decay), rng.random() * decay])
    max_lr = 10 ** rng.uniform(-6, 0)
    style = rng.choice(["constant", "linear", "cosine", "inverse-square-root", "WSD"])
    wd_style = rng.choice(["constant", "linear", "cosine"])
    start_wd = rng.random()
    return {
        "init_lr": rng.choice([0.0, rng.random() * max_lr]),
        "max_lr": max_lr,
        "min_lr": rng.choice([0.0, rng.random() * max_lr]),
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": style,
        "start_wd": start_wd,
        "end_wd": start_wd if wd_style == "constant" else start_wd + rng.random(),
        "wd_incr_steps": rng.randint(1, 2 * decay),
        "wd_incr_style": wd_style,
        "wsd_decay_steps": rng.randint(1, decay) if style == "WSD" else None,
        "lr_wsd_decay_style": rng.choice(["linear", "cosine", "exponential", "minus_sqrt"]),
    }


def random_groups(rng, max_lr):
    decoupled = {"wd_mult": 1.0, "max_lr": 0.5 * max_lr, "min_lr": 0.25 * max_lr}
    return [{"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 0.0, "lr_mult": 1.0}, decoupled][
        : rng.randint(1, 3)
    ]


def both(config, groups, **flags):
    mine, theirs = ([dict(group) for group in groups] for _ in range(2))
    flags = {
        "use_checkpoint_opt_param_scheduler": False,
        "override_opt_param_scheduler": False,
        **flags,
    }
    return (
        scheduler_of(SimpleNamespace(param_groups=mine), **config, **flags),
        scheduler_module.OptimizerParamScheduler(
            SimpleNamespace(param_groups=theirs), **config, **flags
        ),
    )


def test_rates_and_decay_are_equal_over_random_schedules():
    rng = random.Random(0)
    for _ in range(500):
        config = random_config(rng)
        mine, theirs = both(config, random_groups(rng, config["max_lr"]))
        decay = config["lr_decay_steps"]
        wd = config["wd_incr_steps"]
        edges = {
            0,
            int(config["lr_warmup_steps"]),
            decay,
            decay - (config["wsd_decay_steps"] or 0),
            wd,
        }
        steps = {edge + near for edge in edges for near in (-1, 0, 1)} | {
            rng.randint(0, 2 * decay) for _ in range(30)
        }
        for samples in sorted(n for n in steps if n >= 0):
            theirs.step(samples - theirs.num_steps)
            mine.step(samples - mine.num_steps)
            assert mine.optimizer.param_groups == theirs.optimizer.param_groups, (config, samples)
        assert mine.state_dict() == theirs.state_dict()


@pytest.mark.parametrize(
    "flag", ["use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"]
)
def test_loading_megatron_cores_state_goes_on_alike(flag):
    rng = random.Random(1)
    for _ in range(200):
        saved = random_config(rng)
        running = random_config(rng)
        running.update(
            {key: saved[key] for key in ("lr_decay_style", "wd_incr_style", "wsd_decay_steps")}
        )
        for key in ("start_wd", "end_wd"):
            running[key] = saved[key]
        running["lr_decay_steps"] = max(running["lr_decay_steps"], saved["lr_decay_steps"])
        running["lr_warmup_steps"] = min(running["lr_warmup_steps"], saved["lr_warmup_steps"])
        running["init_lr"] = 0.0
        groups = random_groups(rng, 1e-6)
        _, source = both(saved, groups)
        source.step(rng.randrange(saved["lr_decay_steps"]))
        mine, theirs = both(running, groups, **{flag: True})
        saved_schedule.load(mine, source.state_dict())
        theirs.load_state_dict(source.state_dict())
        assert mine.state_dict() == theirs.state_dict()
        # theirs applies a loaded weight decay from the next step on, ours at once
        for _ in range(5):
            mine.step(7)
            theirs.step(7)
            assert mine.optimizer.param_groups == theirs.optimizer.param_groups


def test_rampup_sizes_and_micro_batches_are_equal():
    rng = random.Random(3)
    for _ in range(300):
        mbs = rng.randint(1, 4)
        dp = rng.randint(1, 4)
        decrease = rng.random() < 0.3
        start = rng.randint(1, 12) * mbs * dp
        increment = rng.randint(1, 6) * mbs * dp
        if decrease:
            start = start + rng.randrange(mbs * dp)
            increment = rng.randint(1, 40)
        size = start + increment * rng.randint(1, 40)
        ramp = rng.randint(1, 10 ** rng.randint(1, 6))
        theirs = batches_module.RampupBatchsizeNumMicroBatchesCalculator(
            size, mbs, dp, decrease, 1, start, increment, ramp
        )
        mine = build_batch_size_schedule(
            micro_batch_size=mbs,
            data_parallel_size=dp,
            global_batch_size=size,
            rampup_batch_size=[start, increment, ramp],
            decrease_batch_size_if_needed=decrease,
        )
        consumed = 0
        for iteration in range(1, 200):
            theirs.update(consumed, consistency_check=True)
            assert mine.samples_before(iteration) == consumed
            assert (
                mine.nominal_global_batch_size(consumed) == theirs.get_current_global_batch_size()
            )
            assert (
                mine.global_batch_size(consumed) == theirs.get_current_running_global_batch_size()
            )
            assert mine.num_microbatches(consumed) == theirs.get()
            consumed += mbs * dp * theirs.get()
        edges = {threshold + near for threshold, _ in mine.steps for near in (-1, 0, 1)} | {
            ramp,
            ramp + 1,
        }
        for consumed in sorted(edge for edge in edges if edge >= 0):
            theirs.update(consumed, consistency_check=False)
            assert (
                mine.nominal_global_batch_size(consumed) == theirs.get_current_global_batch_size()
            )
