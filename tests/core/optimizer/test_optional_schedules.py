"""Optional schedules: learning rate, second moment, loss scale, decay of all parameters, gradients of
embeddings."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from tests.core.optimizer.builders import (
    dynamic_scaler,
    load_state,
    optimizer_of,
    scheduler_of,
    steps_of,
)

BATCH = 64


def rates(
    total: int, warmup: int, init: int = 0, lr: float = 1e-4, count: int | None = None
) -> list[float]:
    """The rates used at steps 0, 1, ... by our scheduler."""
    steps = steps_of(BATCH, train_iters=total, lr_warmup_iters=warmup, lr_init_iters=init)
    optimizer = SimpleNamespace(param_groups=[{}])
    scheduler = scheduler_of(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=1e-5,
        lr_warmup_steps=steps.lr_warmup_steps,
        lr_decay_steps=steps.lr_decay_steps,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=steps.wd_incr_steps,
        wd_incr_style="constant",
        zero_lr_steps=steps.zero_lr_steps,
        lr_warmup_lead=BATCH,
    )
    found = []
    for _ in range(total + 1 if count is None else count):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.after_iteration(BATCH)
    return found


def formula(
    total: int, warmup: int, init: int, step: int, lr: float = 1e-4, eta_min: float = 1e-5
) -> float:
    """The formula, written out."""
    end = warmup + init
    if step < init:
        return 0.0
    if step < end:
        return lr * (step + 1 - init) / warmup
    return eta_min + (lr - eta_min) * (1 + math.cos(math.pi * (step - end) / (total - end))) / 2


def test_the_logged_rates_of_the_30b_demo():
    assert [f"{rate:.6e}" for rate in rates(10, 0)[1:7]] == [
        "9.779754e-05",
        "9.140576e-05",
        "8.145034e-05",
        "6.890576e-05",
        "5.500000e-05",
        "4.109424e-05",
    ]


@pytest.mark.parametrize(
    ("total", "warmup", "init"), [(50, 5, 0), (50, 5, 7), (50, 0, 3), (40, 1, 0)]
)
def test_the_whole_schedule_is_the_formula(total, warmup, init):
    for step, rate in enumerate(rates(total, warmup, init)):
        assert rate == pytest.approx(formula(total, warmup, init, step), rel=1e-12, abs=1e-18), step


def test_the_warmup_has_the_digits_of_the_demos_logs():
    """The rates after the first six of 50,000 steps, 500 of them warm-up."""
    logged = "4.0000000000000003e-07 6.000000000000001e-07 8.000000000000001e-07 "
    logged += "1.0000000000000002e-06 1.2000000000000002e-06 1.4000000000000001e-06"
    assert [str(rate) for rate in rates(50000, 500, count=7)[1:]] == logged.split()


def test_beta2_rises_with_the_updates(make_params, fill_grads):
    params = make_params()
    optimizer = optimizer_of(params, adam_beta2=0.95, adam_beta2_schedule_c=0.8)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    golden = {0: 0.95, 1: 0.95, 42: 0.95, 43: 0.950657, 100: 0.974881}
    for step in range(101):
        if step in golden:
            assert optimizer.adam_beta2 == pytest.approx(golden[step], abs=5e-7)
        fill_grads(params, step)
        optimizer.step()
        assert optimizer.param_groups[0]["betas"] == (
            0.9,
            max(0.95, 1 - step**-0.8 if step else 0.0),
        )
    again = optimizer_of(make_params(seed=2), adam_beta2=0.95, adam_beta2_schedule_c=0.8)
    load_state(again, optimizer.tensors(), json.loads(json.dumps(optimizer.counters())))
    assert again.adam_beta2 == optimizer.adam_beta2 > 0.9748
    optimizer.step_count = 50000
    assert optimizer.adam_beta2 == pytest.approx(0.999826, abs=5e-7)


def test_factors_and_ceiling_of_the_loss_scale():
    scaler = dynamic_scaler(
        8.0,
        loss_scale_window=1,
        hysteresis=1,
        loss_scale_growth_factor=4.0,
        loss_scale_backoff_factor=0.25,
        max_loss_scale=64.0,
    )
    found = []
    for overflow in (False, False, False, True):
        scaler.update(overflow)
        found.append(scaler.scale)
    assert found == [32.0, 64.0, 64.0, 16.0]


def test_everything_can_be_decayed(make_params):
    groups = optimizer_of(make_params(), apply_wd_to_all=True).param_groups
    assert [group["wd_mult"] for group in groups] == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_embedding_and_output_layer_are_scaled_before_the_norm(
    make_params, fill_grads, dtype
):
    params = make_params(dtype)
    optimizer = optimizer_of(params, embed_grad_scale=0.25, clip_grad=1e9)
    ends = ("embeddings.weight", "output_layer.weight")
    squares = sum(
        (grad * (0.25 if param.sharding.name.endswith(ends) else 1.0)).square().sum()
        for param, grad in zip(params, fill_grads(params, 3), strict=True)
    )
    assert optimizer.step().grad_norm == pytest.approx(squares.sqrt().item(), rel=1e-6)
