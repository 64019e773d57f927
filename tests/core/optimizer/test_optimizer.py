"""The whole step: order of its parts, precision, what an overflow leaves alone, and state there and
back."""

import json
import math
from contextlib import contextmanager

import pytest
import torch

from megatron.optimizer.scaler import ConstantGradScaler
from tests.core.optimizer.builders import dynamic_scaler, load_state, optimizer_of


def build(params, lr=1e-2, weight_decay=0.1, **values):
    optimizer = optimizer_of(params, **values)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, weight_decay * group["wd_mult"]
    return optimizer


def adamw_in_float64(
    weights, decayed, steps, lr=1e-2, wd=0.1, clip=1.0, betas=(0.9, 0.999), eps=1e-8
):
    """AdamW with global clipping over lists of float64 weights; the norms before clipping beside
    the weights."""
    weights = [weight.clone() for weight in weights]
    norms = []
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    for t, grads in enumerate(steps, start=1):
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
        norms.append(norm)
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for index, grad in enumerate(grads):
            m, v = moments[index]
            m.mul_(betas[0]).add_((1 - betas[0]) * factor * grad)
            v.mul_(betas[1]).add_((1 - betas[1]) * (factor * grad) ** 2)
            if decayed[index]:
                weights[index] *= 1 - lr * wd
            update = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
            weights[index] -= lr * update
    return weights, norms


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e4])
def test_float64_training_equals_the_formula(make_params, fill_grads, decayed_names, clip):
    params = make_params(torch.float64)
    start = [param.detach().clone() for param in params]
    optimizer = build(params, clip_grad=clip)
    steps = []
    norms = []
    for number in range(6):
        steps.append(fill_grads(params, number))
        result = optimizer.step()
        assert result.ok and result.num_zeros is None
        norms.append(result.grad_norm)
    decayed = [param.sharding.name in decayed_names for param in params]
    weights, expected = adamw_in_float64(start, decayed, steps, clip=clip)
    for param, weight in zip(params, weights, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=1e-11, atol=1e-12)
    if clip:
        assert norms == pytest.approx(expected, rel=1e-12)
    else:
        assert norms == [None] * 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_the_rounded_main_weights(make_params, fill_grads, dtype):
    params = make_params(dtype)
    exact = make_params(torch.float32)
    for param, twin in zip(params, exact, strict=True):
        twin.data.copy_(param.data)
    optimizer = build(params, lr=1e-4)
    reference = build(exact, lr=1e-4)
    for number in range(20):
        fill_grads(params, number)
        fill_grads(exact, number)
        optimizer.step()
        reference.step()
    tensors = optimizer.tensors()
    for param, twin in zip(params, exact, strict=True):
        main = tensors[f"optimizer.fp32_param.{param.sharding.name}"]
        assert main.dtype == torch.float32
        assert torch.equal(main, twin)
        assert torch.equal(param, twin.to(dtype))
        assert not torch.equal(main, param.float())  # the main weight holds more than the model's


def test_half_precision_gradient_buffers_are_widened_before_anything_else(make_params, fill_grads):
    narrow = make_params(torch.float16, grad_dtype=torch.float16)
    wide = make_params(torch.float16)
    first = build(narrow)
    second = build(wide)
    for number in range(3):
        fill_grads(narrow, number, size=30.0)  # squares of these overflow fp16
        for param, twin in zip(wide, narrow, strict=True):
            param.main_grad.copy_(twin.main_grad)
        assert first.step() == second.step()
    for one, two in zip(narrow, wide, strict=True):
        assert torch.equal(one, two)


def test_fp32_gradients_are_used_where_they_lie(make_params, fill_grads):
    params = make_params(torch.bfloat16)
    optimizer = build(params)
    fill_grads(params, 0)
    before = [param.main_grad.data_ptr() for param in params]
    seen = []
    real = optimizer.inner.step
    optimizer.inner.step = lambda: (
        seen.extend(main.grad.data_ptr() for main in optimizer._main),
        real(),
    )
    optimizer.step()
    assert sorted(seen) == sorted(before)
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_changes_nothing_but_the_scale(make_params, fill_grads, bad):
    params = make_params(torch.float16)
    scaler = dynamic_scaler(8.0, min_loss_scale=1.0, loss_scale_window=100, hysteresis=1)
    optimizer = build(params, grad_scaler=scaler, log_num_zeros_in_grad=True)
    fill_grads(params, 0)
    assert optimizer.step().ok
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    weights = [param.detach().clone() for param in params]
    fill_grads(params, 1)
    params[3].main_grad.view(-1)[5] = bad
    assert optimizer.step() == (False, None, None)
    assert (optimizer.loss_scale, optimizer.step_count) == (4.0, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.tensors().items())
    assert all(torch.equal(old, param) for old, param in zip(weights, params, strict=True))
    assert all(state["step"].item() == 1 for state in optimizer.inner.state.values())
    fill_grads(params, 2)
    assert optimizer.step().ok and optimizer.step_count == 2


def test_scaled_gradients_give_the_unscaled_step(make_params, fill_grads):
    plain = make_params()
    scaled = make_params()
    first = build(plain)
    second = build(scaled, grad_scaler=ConstantGradScaler(2.0**20))
    for number in range(4):
        fill_grads(plain, number)
        fill_grads(scaled, number, size=2.0**20)
        one = first.step()
        two = second.step()
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
    for one, two in zip(plain, scaled, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_a_gradient_factor_is_the_same_as_scaling_beforehand(make_params, fill_grads):
    params = make_params(torch.float64)
    twins = make_params(torch.float64)
    first = build(params, clip_grad=100.0)
    second = build(twins, clip_grad=100.0)
    fill_grads(params, 0)
    fill_grads(twins, 0)
    for param in params:
        param.main_grad.mul_(1 / 24)
    one = first.step()
    two = second.step(grad_factor=1 / 24)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-13)
    for mine, other in zip(params, twins, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-14)


def test_copies_that_do_not_count_are_clipped_but_not_measured(make_params, fill_grads):
    params = make_params()
    optimizer = build(
        params,
        counts=lambda param: param.sharding.name != "output_layer.weight",
        log_num_zeros_in_grad=True,
    )
    fill_grads(params, 0)
    params[-1].main_grad[:10] = 0.0
    params[0].main_grad[0] = 0.0
    grads = [param.main_grad.to(torch.float64, copy=True) for param in params]
    counted = math.sqrt(sum(grad.square().sum().item() for grad in grads[:-1]))
    result = optimizer.step()
    assert result.grad_norm == pytest.approx(counted, rel=1e-6)
    assert result.num_zeros == 8
    factor = 1.0 / (counted + 1e-6)
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(param.main_grad.double(), grad * factor, rtol=1e-5, atol=1e-9)
    weights = math.sqrt(sum(param.detach().double().square().sum().item() for param in params[:-1]))
    assert optimizer.params_norm() == pytest.approx(weights, rel=1e-6)


def test_zeros_are_counted_after_unscaling_and_clipping(make_params):
    params = make_params()
    optimizer = build(params, clip_grad=1.0, log_num_zeros_in_grad=True)
    for param in params:
        param.main_grad.fill_(1e10)
    # clipping by about 1e-12 takes this below fp32's smallest number
    params[0].main_grad[0, 0] = 1e-36
    assert optimizer.step().num_zeros == 1


def test_other_ranks_are_asked_for_sum_and_overflow(make_params, fill_grads):
    params = make_params(torch.float16)
    asked = []

    def reduce_sum(total):
        asked.append("sum")
        return total * 4.0

    def reduce_max(found):
        asked.append("max")
        assert found.item() == 0.0
        return torch.ones_like(found)

    optimizer = build(
        params, grad_scaler=ConstantGradScaler(1.0), reduce_sum=reduce_sum, reduce_max=reduce_max
    )
    fill_grads(params, 0)
    assert optimizer.step() == (False, None, None)  # the overflow was another rank's
    assert asked == ["sum", "max"]
    optimizer = build(make_params(), reduce_sum=reduce_sum)
    grads = fill_grads(optimizer._params, 0)
    full = math.sqrt(sum(grad.square().sum().item() for grad in grads))
    assert optimizer.step().grad_norm == pytest.approx(2.0 * full, rel=1e-6)


def test_an_overflow_in_a_copy_that_does_not_count_is_found(make_params, fill_grads):
    params = make_params(torch.float16)
    optimizer = build(
        params, grad_scaler=ConstantGradScaler(1.0), counts=lambda param: param is not params[-1]
    )
    fill_grads(params, 0)
    params[-1].main_grad[3, 3] = math.inf
    assert not optimizer.step().ok


def test_without_a_scaler_a_nan_norm_is_reported_as_it_is(make_params, fill_grads):
    params = make_params(torch.bfloat16)
    optimizer = build(params)
    fill_grads(params, 0)
    params[0].main_grad[0, 0] = math.nan
    ok, norm, _ = optimizer.step()
    assert ok and math.isnan(norm)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("done", [0, 3])
def test_a_loaded_run_goes_on_bit_for_bit(make_params, fill_grads, kind, dtype, done):
    def fresh(seed):
        params = make_params(dtype, seed=seed)
        scaler = (
            dynamic_scaler(2.0**16, loss_scale_window=2, hysteresis=2)
            if dtype == torch.float16
            else None
        )
        return params, build(params, optimizer=kind, grad_scaler=scaler)

    def train(params, optimizer, numbers):
        for number in numbers:
            fill_grads(params, number)
            if number == 2:
                params[0].main_grad[0, 0] = math.inf if dtype == torch.float16 else 0.0
            optimizer.step()

    params, optimizer = fresh(seed=1)
    train(params, optimizer, range(done))
    tensors, counters = optimizer.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = [param.detach().clone() for param in params]
    others, resumed = fresh(seed=2)
    for other, weight in zip(others, weights, strict=True):
        other.data.copy_(weight)
    load_state(resumed, saved, json.loads(json.dumps(counters)))
    train(params, optimizer, range(done, 7))
    train(others, resumed, range(done, 7))
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))
    assert resumed.counters() == optimizer.counters()
    assert all(
        torch.equal(tensor, resumed.tensors()[name]) for name, tensor in optimizer.tensors().items()
    )


def test_state_has_one_tensor_per_name_and_kind_before_any_step(make_params):
    params = make_params(torch.bfloat16)
    tensors, counters = build(params).state()
    kinds = ("exp_avg", "exp_avg_sq", "fp32_param")
    assert set(tensors) == {
        f"optimizer.{kind}.{param.sharding.name}" for kind in kinds for param in params
    }
    assert counters == {"optimizer": "adam", "step": 0, "grad_scaler": None}
    assert not any(
        name.startswith("optimizer.fp32_param.") for name in build(make_params()).tensors()
    )
    assert build(make_params(), optimizer="sgd", sgd_momentum=0.0).tensors() == {}


def test_weights_loaded_without_optimizer_state_become_the_main_weights(make_params, fill_grads):
    params = make_params(torch.bfloat16, seed=1)
    twins = make_params(torch.bfloat16, seed=2)
    optimizer = build(params)
    expected = build(twins)
    for param, twin in zip(params, twins, strict=True):
        param.data.copy_(twin.data)
    optimizer.reload_model_params()
    fill_grads(params, 0)
    fill_grads(twins, 0)
    optimizer.step()
    expected.step()
    assert all(torch.equal(one, two) for one, two in zip(params, twins, strict=True))


def test_the_parts_of_a_step_are_named_in_megatrons_order(make_params, fill_grads):
    names = []

    @contextmanager
    def span(name):
        names.append(name)
        yield

    params = make_params(torch.float16)
    optimizer = build(
        params, grad_scaler=ConstantGradScaler(1.0), log_num_zeros_in_grad=True, span=span
    )
    fill_grads(params, 0)
    optimizer.step()
    parts = (
        "copy-to-main-grad",
        "unscale-and-check-inf",
        "clip-main-grad",
        "count-zeros",
        "inner-step",
    )
    assert names == [f"optimizer-{part}" for part in (*parts, "copy-main-to-model-params")]


def test_backward_after_a_step_starts_from_no_gradient(make_params, fill_grads):
    params = make_params(torch.float32)
    optimizer = build(params)
    fill_grads(params, 0)
    optimizer.step()
    before = [param.main_grad.clone() for param in params]
    sum(param.sum() for param in params).backward()
    assert all(torch.equal(param.grad, torch.ones_like(param)) for param in params)
    assert all(torch.equal(param.main_grad, old) for param, old in zip(params, before, strict=True))
