"""Gradients and Adam moments in 16 bits against the same update on fp32 state that is rounded after
each step."""

import math

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer import adam
from megatron.optimizer import precision_aware as moments
from tests import problems
from tests.core.optimizer.builders import dynamic_scaler, load_state, optimizer_of

RATES = {"lr": 1e-2, "weight_decay": 0.1}
BOTH_BF16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
PRECISION_AWARE = {"use_precision_aware_optimizer": True}


def set_rates(optimizer):
    for group in optimizer.param_groups:
        group.update(RATES)


def round_state(optimizer, dtypes):
    """What storage in these dtypes leaves of fp32 moments."""
    for state in optimizer.inner.state.values():
        for key, dtype in dtypes.items():
            stored = torch.empty_like(state[key], dtype=dtype)
            moments.store(key, state[key].clone(), stored)
            state[key].copy_(moments.widen(key, stored, torch.float32))


@pytest.mark.parametrize("piece", [2**22, 64], ids=["one piece", "many pieces"])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize(
    "dtypes",
    [
        {},
        {"exp_avg": torch.bfloat16},
        {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
        {"exp_avg": torch.float16, "exp_avg_sq": torch.float16},
    ],
    ids=lambda found: " ".join(map(str, found.values())) or "fp32",
)
def test_update_is_that_of_fp32_between_two_roundings(
    make_params, fill_grads, monkeypatch, piece, dtype, grad_dtype, dtypes
):
    """Clipped, with weight decay: bit for bit."""
    monkeypatch.setattr(moments, "CHUNK", piece)
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    flags = {f"{key}_dtype": names[value] for key, value in dtypes.items()}
    params, twins = (make_params(dtype, grad_dtype=grad_dtype) for _ in range(2))
    ours = optimizer_of(params, **PRECISION_AWARE, **flags, log_num_zeros_in_grad=True)
    wide = optimizer_of(twins, log_num_zeros_in_grad=True)
    set_rates(ours)
    set_rates(wide)
    for step in range(4):
        fill_grads(params, step, size=3.0)
        fill_grads(twins, step, size=3.0)
        grads = [param.main_grad.clone() for param in params]
        got, expected = ours.step(0.5), wide.step(0.5)
        assert got == expected and got.ok
        round_state(wide, dtypes)
        assert all(torch.equal(p.main_grad, g) for p, g in zip(params, grads, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    for name, tensor in ours.tensors().items():
        key = name.split(".")[1]
        assert tensor.dtype == dtypes.get(key, torch.float32), name
        if key in adam.MOMENTS:
            tensor = moments.widen(key, tensor, torch.float32)
        assert torch.equal(tensor, wide.tensors()[name]), name


def test_loss_scale_and_overflow(make_params, fill_grads):
    """fp16 gradients are unscaled in fp32; an overflow changes nothing but the scale."""
    params, twins = (make_params(torch.float16, grad_dtype=torch.float16) for _ in range(2))
    flags = BOTH_BF16 | PRECISION_AWARE
    ours = optimizer_of(params, grad_scaler=dynamic_scaler(2.0**10, hysteresis=1), **flags)
    wide = optimizer_of(twins, grad_scaler=dynamic_scaler(2.0**10, hysteresis=1))
    set_rates(ours)
    set_rates(wide)
    for step in range(3):
        fill_grads(params, step, size=100.0)
        fill_grads(twins, step, size=100.0)
        if step == 1:
            params[3].main_grad[2] = math.inf
            twins[3].main_grad[2] = math.inf
        before = {name: tensor.clone() for name, tensor in ours.tensors().items()}
        assert ours.step() == wide.step()
        assert ours.loss_scale == wide.loss_scale == (2.0**10 if step < 1 else 2.0**9)
        if step == 1:
            assert all(torch.equal(t, before[name]) for name, t in ours.tensors().items())
        round_state(wide, {key: torch.bfloat16 for key in adam.MOMENTS})
        assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_fp16_stores_moments_of_small_and_of_the_largest_gradients():
    """Squares of gradients of 1e-7 underflow in fp16; the largest clipped gradient is 1."""
    values = torch.tensor([0.0, 1e-8, 1e-7, 1e-4, 1.0])
    for key, wide in (("exp_avg", values), ("exp_avg_sq", values.square())):
        stored = torch.empty(5, dtype=torch.float16)
        moments.store(key, wide.clone(), stored)
        torch.testing.assert_close(
            moments.widen(key, stored, torch.float32), wide, rtol=2e-3, atol=0.0
        )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_state_of_other_dtypes_is_converted(make_params, fill_grads, dtype):
    """fp32 moments into 16 bits are rounded once; back, nothing changes any more."""
    narrow = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype} | PRECISION_AWARE
    params = make_params(torch.bfloat16)
    wide = optimizer_of(params)
    fill_grads(params, 0)
    wide.step()
    low = optimizer_of(make_params(torch.bfloat16), **narrow)
    load_state(low, *wide.state())
    back = optimizer_of(make_params(torch.bfloat16))
    load_state(back, *low.state())
    again = optimizer_of(make_params(torch.bfloat16), **narrow)
    load_state(again, *back.state())
    for name, tensor in wide.tensors().items():
        torch.testing.assert_close(back.tensors()[name], tensor, rtol=2.0**-8, atol=0.0)
        assert torch.equal(again.tensors()[name], low.tensors()[name])
    assert back.counters() == wide.counters()


def test_moments_that_exceed_fp16_are_refused(make_params):
    wide = optimizer_of(make_params(), clip_grad=0.0)
    wide.tensors()["optimizer.exp_avg.output_layer.weight"].fill_(100.0)
    low = optimizer_of(make_params(), exp_avg_dtype="fp16", **PRECISION_AWARE)
    with problems.raises(ValueError, "checkpoint-moments-exceed-fp16", "exp_avg.output_layer"):
        load_state(low, *wide.state())


def test_fp8_moments_are_stored_in_bf16():
    config = OptimizerConfig(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8", **PRECISION_AWARE)
    param = torch.zeros(8, requires_grad=True)
    state = adam.build_adam([{"params": [param]}], config).state[param]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
