"""Schedules against Megatron's golden numbers, their load rules with the printed lines, and bad
values."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from megatron.optimizer.saved_schedule import load
from megatron.optimizer.scheduler import ScheduleSteps
from tests import problems
from tests.core.optimizer.builders import (
    STEPS,
    dynamic_scaler,
    optimizer_of,
    scheduler_of,
    steps_of,
)

SEED = {
    "init_lr": 0.0,
    "max_lr": 1.5e-4,
    "min_lr": 1e-5,
    "lr_warmup_steps": 25600.0,
    "lr_decay_steps": 2560000,
    "lr_decay_style": "cosine",
    "start_wd": 0.01,
    "end_wd": 0.01,
    "wd_incr_steps": 8000,
    "wd_incr_style": "constant",
}


def build(groups=None, **values):
    optimizer = SimpleNamespace(param_groups=groups or [{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    return scheduler_of(optimizer, **{**SEED, **values})


def lr_at(scheduler, samples):
    scheduler.step(samples - scheduler.num_steps)
    return scheduler.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("style", "golden"),
    [
        (
            "cosine",
            {
                0: 0.0,
                8: 4.6874999999999995e-08,
                80: 4.6874999999999996e-07,
                8000: 4.6875e-05,
                25600: 1.5e-4,
                25608: 0.00014999999999655808,
                1000000: 0.00010485229590390178,
                2560008: 1e-05,
                10**9: 1e-05,
            },
        ),
        ("linear", {25608: 0.00014999955808080807, 1000000: 9.617424242424241e-05, 2560008: 1e-05}),
        (
            "inverse-square-root",
            {25608: 0.00014997656799173393, 1000000: 2.3999999999999997e-05, 2560008: 1e-05},
        ),
        ("constant", {8: 4.6874999999999995e-08, 25608: 1.5e-4, 10**9: 1.5e-4}),
    ],
)
def test_the_seeds_schedule_to_the_last_digit(style, golden):
    """Megatron's numbers; megatron-core agrees (tests/peers)."""
    scheduler = build(lr_decay_style=style)
    assert {samples: lr_at(scheduler, samples) for samples in golden} == golden


def test_wsd_inverse_anneals_linearly_in_one_over_the_rate():
    scheduler = build(
        [{}, {"max_lr": 0.5, "min_lr": 0.25}],
        lr_decay_style="WSD",
        lr_wsd_decay_style="inverse",
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=10,
        lr_decay_steps=100,
        wsd_decay_steps=20,
    )
    for n, rates in {80: (1.0, 0.5), 85: (1 / 3.25, 0.4), 90: (1 / 5.5, 1 / 3)}.items():
        scheduler.step(n - scheduler.num_steps)
        groups = scheduler.optimizer.param_groups
        assert [group["lr"] for group in groups] == pytest.approx(rates, rel=1e-14)
    assert lr_at(scheduler, 100) == pytest.approx(0.1, rel=1e-14) and lr_at(scheduler, 101) == 0.1


def test_wsds_is_wsd_to_each_end_and_the_peak_in_between():
    """Up to an end as a run of WSD that ends there; from the end on the stable rate again."""
    wsd = {"max_lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 10, "wsd_decay_steps": 20}
    scheduler = build(
        lr_decay_style="WSD-S", lr_decay_steps=200, wsd_decay_ends=(40, 60, 120), **wsd
    )
    ends = {
        end: build(lr_decay_style="WSD", lr_decay_steps=end, **wsd) for end in (40, 60, 120, 200)
    }
    begin = 0
    for end, alone in ends.items():
        assert lr_at(scheduler, begin) == (1.0 if begin else 0.0)
        for n in range(begin + 1, end):
            assert lr_at(scheduler, n) == lr_at(alone, n), n
        assert lr_at(scheduler, end - 1) < 0.2
        begin = end
    assert lr_at(scheduler, 200) == lr_at(scheduler, 201) == 0.1


@pytest.mark.parametrize("a", [0.05, 0.005])
@pytest.mark.parametrize("samples", [False, True])
def test_power_is_the_papers_formula(samples, a):
    """min(lr, B a n^b) over n tokens, a linear warm-up to it, and the anneal from it."""
    batch, seq_length, total, warmup, anneal = 8, 32, 100, 5, 20
    lr, floor, b = 0.01, 1e-4, -0.4
    flags = {
        "lr_decay_style": "power",
        "lr_wsd_decay_style": "linear",
        "lr_power_amplitude": a,
        "lr_power_exponent": b,
    }
    unit, times = ("samples", batch) if samples else ("iters", 1)
    lengths = {
        f"train_{unit}": total * times,
        f"lr_warmup_{unit}": warmup * times,
        f"lr_wsd_decay_{unit}": anneal * times,
    }
    steps = steps_of(batch, seq_length, **flags, **lengths)
    values = {name: getattr(steps, name) for name in STEPS.split()}
    groups = [{}, {"max_lr": 10 * lr}, {"lr_mult": 0.5}]
    scheduler = build(groups, max_lr=lr, min_lr=floor, **flags, **values)

    def power(iteration):
        tokens = iteration * batch * seq_length
        return min(lr, batch * a * tokens**b)

    below = 0
    for iteration in range(total):
        rate = power(max(iteration, warmup))
        if iteration < warmup:
            rate *= iteration / warmup
        elif iteration > total - anneal:
            rest = (total - iteration) / anneal
            rate = floor + rest * (power(total - anneal) - floor)
        below += rate < lr
        assert groups[0]["lr"] == pytest.approx(rate, rel=1e-12)
        assert groups[2]["lr"] == pytest.approx(rate / 2, rel=1e-12)
        if iteration <= total - anneal:
            assert groups[1]["lr"] == pytest.approx(10 * rate, rel=1e-12)
        scheduler.after_iteration(batch)
    assert below == total if a < 0.01 else warmup + anneal < below < total  # in the minimum


NEW_STYLES = [
    {"lr_decay_style": "WSD-S", "wsd_decay_steps": 8000, "wsd_decay_ends": (64000, 80000)},
    {"lr_decay_style": "power", "wsd_decay_steps": 8000, "power_scale": 0.01},
]


@pytest.mark.parametrize("flags", NEW_STYLES, ids=["WSD-S", "power"])
def test_a_resume_knows_the_whole_schedule(flags):
    """With the checkpoint's values every later rate is the same, whatever the command line has."""
    source = build(**flags)
    source.step(30000)
    state = json.loads(json.dumps(source.state_dict()))
    same = build(**flags)
    load(same, state)
    other = build(use_checkpoint_opt_param_scheduler=True)
    load(other, state)
    for n in (30000, 60000, 63999, 64000, 79000, 2555000, 2560000):
        rates = {lr_at(one, n) for one in (source, same, other)}
        assert len(rates) == 1
    assert other.state_dict() == source.state_dict()


@pytest.mark.parametrize(
    ("flags", "change", "named"),
    [
        (NEW_STYLES[0], {"wsd_decay_ends": (64000,)}, "--lr-wsd-decay-end-iters"),
        (NEW_STYLES[0], {"wsd_decay_steps": 4000}, "--lr-wsd-decay-iters"),
        (NEW_STYLES[0], {"lr_wsd_decay_style": "linear"}, "--lr-wsd-decay-style"),
        (NEW_STYLES[1], {"power_scale": 0.02}, "--lr-power-amplitude"),
        (NEW_STYLES[1], {"lr_power_exponent": -0.5}, "--lr-power-exponent"),
    ],
)
def test_another_anneal_or_power_law_is_refused_on_resume(flags, change, named):
    state = json.loads(json.dumps(build(**flags).state_dict()))
    with problems.raises(ValueError, "schedule-differs-from-checkpoint", named):
        load(build(**{**flags, **change}), state)
    other = build(**{**flags, **change}, override_opt_param_scheduler=True)
    load(other, state)
    assert other.state_dict() == build(**{**flags, **change}).state_dict()


def test_steps_of_the_seed_are_samples_with_a_float_warmup():
    steps = steps_of(
        8,
        train_iters=1000,
        lr_decay_iters=320000,
        lr_warmup_fraction=0.01,
        lr_warmup_iters=7,
    )
    assert steps == ScheduleSteps(25600.0, 2560000, 8000, None, per_iteration=8)
    assert isinstance(steps.lr_warmup_steps, float)


def test_steps_in_iterations_and_in_samples():
    assert steps_of(8, train_iters=100, lr_warmup_iters=5, lr_wsd_decay_iters=10) == ScheduleSteps(
        40, 800, 800, 80, per_iteration=8
    )
    assert steps_of(
        8, train_samples=1001, lr_warmup_samples=50, lr_wsd_decay_samples=30
    ) == ScheduleSteps(50, 1001, 1001, 30)
    assert steps_of(8, train_samples=1001, lr_decay_samples=900).lr_decay_steps == 900
    ends = {"lr_wsd_decay_end_iters": (10, 20), "lr_wsd_decay_end_samples": (30,)}
    wsds = {"lr_decay_style": "WSD-S", **ends}
    assert steps_of(8, train_iters=100, **wsds).wsd_decay_ends == (80, 160)
    assert steps_of(8, train_samples=1001, **wsds).wsd_decay_ends == (30,)
    assert steps_of(8, train_iters=100, lr_decay_style="WSD", **ends).wsd_decay_ends == ()


def test_an_overflow_holds_the_rate_and_a_skipped_iteration_does_not(make_params, fill_grads):
    params = make_params(torch.float16)
    optimizer = optimizer_of(params, grad_scaler=dynamic_scaler(8.0))
    scheduler = scheduler_of(optimizer, **SEED)
    rates = []
    for number in range(6):
        if number == 4:  # the user skips this one: no step at all
            scheduler.after_iteration(8)
        else:
            fill_grads(params, number)
            if number in (1, 2):
                params[0].main_grad[0, 0] = math.inf
            scheduler.after_iteration(8, overflow=not optimizer.step().ok)
        rates.append(scheduler.num_steps // 8)
    assert rates == [1, 1, 1, 2, 3, 4]
    assert optimizer.param_groups[0]["lr"] == 1.5e-4 * 32 / 25600.0
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_different_values_are_refused_all_at_once():
    rising = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_style": "linear"}
    state = build(**rising).state_dict()
    other = build(max_lr=2e-4, lr_decay_steps=1280000, wd_incr_steps=4000, **rising)
    with pytest.raises(ValueError) as caught:
        load(other, state)
    for part in (
        "learning rate is 0.0002 (--lr) and 0.00015 in the checkpoint",
        " is 1280000 samples (--lr-decay-iters, by default --train-iters) and 2560000 samples in "
        "the checkpoint",
        " is 4000 samples (--train-iters) and 8000 samples in the checkpoint",
        "--override-opt_param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
    ):
        assert part in str(caught.value)
    assert "minimum" not in str(caught.value)
    assert (other.num_steps, other.max_lr) == (0, 2e-4)


@pytest.mark.parametrize(
    ("change", "constant"),
    [
        ({"wd_incr_steps": 16000}, {}),
        ({"lr_decay_steps": 5120000}, {"lr_decay_style": "constant"}),
        ({"min_lr": 1e-6}, {"lr_decay_style": "constant"}),
    ],
)
def test_the_length_of_what_stays_constant_may_change(change, constant):
    """--train-iters may be raised where nothing follows from it; with a slope it may not."""
    source = build(**constant)
    source.step(8000)
    other = build(**change, **constant)
    load(other, source.state_dict())
    assert other.optimizer.param_groups == source.optimizer.param_groups
    slope = (
        {"lr_decay_style": "linear"} if constant else {"wd_incr_style": "linear", "end_wd": 0.02}
    )
    with problems.raises(ValueError, "schedule-differs-from-checkpoint"):
        load(build(**change, **slope), build(**slope).state_dict())


def test_override_keeps_this_runs_values(capsys):
    state = {**build().state_dict(), "num_steps": 30000}
    other = build(
        max_lr=2e-4, end_wd=0.1, wd_incr_style="linear", override_opt_param_scheduler=True
    )
    capsys.readouterr()
    load(other, state)
    jump, *lines = sorted(capsys.readouterr().out.splitlines(), key=lambda line: line[1] == ">")
    assert f"{other.get_lr():.4g} from" in jump and f"{build().max_lr:.4g} by" in jump
    assert len(lines) == 9
    assert lines[0] == " > overriding learning rate value to 0.0002"
    assert lines[6] == " > overriding end weight decay value to 0.1"
    assert (other.max_lr, other.end_wd, other.num_steps) == (2e-4, 0.1, 30000)


def test_old_key_names_are_understood():
    state = {
        "start_lr": 1.5e-4,
        "min_lr": 1e-5,
        "warmup_iter": 25600,
        "end_iter": 2560000,
        "decay_style": "cosine",
    }
    for old in (state, {**state, "warmup_steps": 25600, "decay_steps": 2560000}):
        scheduler = build()
        load(scheduler, {**old, "num_iters": 8000})
        assert scheduler.num_steps == 8000
    scheduler = build(use_checkpoint_opt_param_scheduler=True)
    load(scheduler, {**state, "start_lr": 3e-4, "warmup_iter": 100, "num_steps": 50})
    assert scheduler.optimizer.param_groups[0]["lr"] == 3e-4 * 50 / 100
