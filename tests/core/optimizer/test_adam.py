"""The inner updates against formulas written out in float64, and their state before the first
step."""

import inspect
import json
import math
import subprocess
import sys

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer import adam
from tests.forkrun import ROOT


def adamw_in_float64(weight, grads, lr, wd, beta1, beta2, eps):
    """AdamW as in Loshchilov and Hutter, algorithm 2, with Kingma and Ba's bias correction, step by
    step."""
    weight, m, v = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for t, grad in enumerate(grads, start=1):
        weight = weight - lr * wd * weight
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        weight = weight - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return weight, m, v


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_adam_equals_the_formula(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(31, 17, generator=generator, dtype=torch.float64)
    grads = [torch.randn(31, 17, generator=generator, dtype=torch.float64) for _ in range(12)]
    param = start.to(dtype, copy=True).requires_grad_()
    optimizer = adam.build_adam([{"params": [param]}], OptimizerConfig(adam_beta2=0.95))
    optimizer.param_groups[0].update(lr=1e-2, weight_decay=0.1)
    for grad in grads:
        param.grad = grad.to(dtype)
        optimizer.step()
    weight, m, v = adamw_in_float64(start, grads, 1e-2, 0.1, 0.9, 0.95, 1e-8)
    state = optimizer.state[param]
    for got, expected in ((param, weight), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
        torch.testing.assert_close(got.detach().double(), expected, rtol=tolerance, atol=tolerance)
    assert state["step"].item() == 12


def test_state_is_there_and_zero_before_the_first_step():
    param = torch.ones(5, 3).requires_grad_()
    state = adam.build_adam([{"params": [param]}], OptimizerConfig()).state[param]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
    assert all(torch.count_nonzero(tensor) == 0 for tensor in state.values())


def test_the_step_count_is_what_bias_correction_uses():
    updates = []
    for count in (0, 10_000):
        param = torch.zeros(4).requires_grad_()
        optimizer = adam.build_adam([{"params": [param]}], OptimizerConfig(adam_eps=0.0))
        adam.set_step_count(optimizer.state.values(), count)
        optimizer.param_groups[0]["lr"] = 1.0
        param.grad = torch.ones(4)
        optimizer.step()
        updates.append(-param[0].item())
    assert updates[0] == pytest.approx(1.0, rel=1e-5)
    assert updates[1] == pytest.approx(0.1 / math.sqrt(0.001), rel=1e-3)


def test_sgd_adds_decay_to_the_gradient_and_keeps_momentum():
    param = torch.full((3,), 2.0, dtype=torch.float64).requires_grad_()
    optimizer = adam.build_sgd([{"params": [param]}], OptimizerConfig(sgd_momentum=0.5))
    assert torch.count_nonzero(optimizer.state[param]["momentum_buffer"]) == 0
    optimizer.param_groups[0].update(lr=0.1, weight_decay=0.25)
    weight = 2.0
    buffer = 0.0
    for grad in (1.0, -3.0, 2.0):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
        buffer = 0.5 * buffer + grad + 0.25 * weight
        weight -= 0.1 * buffer
        assert param[0].item() == pytest.approx(weight, rel=1e-14)


def update(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> list[float]:
    """Three steps; the values of the parameter after them."""
    for step in range(3):
        optimizer.param_groups[0].update(lr=1e-2, weight_decay=0.1)
        param.grad = torch.sin(torch.arange(50.0) + step)
        optimizer.step()
    return param.tolist()


UPDATES = f"""
import json, sys, torch
from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer import adam
sys.modules["torch._dynamo"] = None             # who imports it fails
{inspect.getsource(update)}
params = [torch.linspace(-1, 1, 50).requires_grad_() for _ in range(3)]
optimizers = [adam.build_adam([{{"params": params[:1]}}], OptimizerConfig()), adam.build_sgd([{{"params": params[1:2]}}], OptimizerConfig())]
print(json.dumps([update(*pair) for pair in zip(optimizers, params)]))
try:
    update(torch.optim.AdamW(params[2:], fused=True), params[2])
except ImportError:
    print("torch's own loads it")
"""


def test_updates_are_torchs_and_load_no_compiler():
    """Bit for bit, in a process of its own, which has never loaded torch.compile's modules when
    they are made."""
    done = subprocess.run(
        [sys.executable, "-c", UPDATES], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    adam_and_sgd, last = done.stdout.splitlines()
    assert last == "torch's own loads it"
    params = [torch.linspace(-1, 1, 50).requires_grad_() for _ in range(2)]
    torchs = [
        torch.optim.AdamW(params[:1], lr=0.0, fused=True),
        torch.optim.SGD(params[1:], lr=0.0, momentum=0.9, fused=True),
    ]
    assert json.loads(adam_and_sgd) == [update(*pair) for pair in zip(torchs, params, strict=True)]


def test_without_fused_kernels_the_foreach_ones_give_the_same(monkeypatch):
    real = adam.AdamW

    def without_fused(*args, **how):
        if how.get("fused"):
            raise RuntimeError("`fused=True` requires all the params to be of some device")
        return real(*args, **how)

    weights = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(adam, "AdamW", without_fused)
        param = torch.linspace(-1, 1, 50, dtype=torch.float64).requires_grad_()
        optimizer = adam.build_adam([{"params": [param]}], OptimizerConfig())
        assert bool(optimizer.param_groups[0]["fused"]) is not patched
        optimizer.param_groups[0].update(lr=1e-2, weight_decay=0.1)
        for step in range(3):
            param.grad = torch.sin(torch.arange(50.0, dtype=torch.float64) + step)
            optimizer.step()
        weights.append(param.detach().clone())
    torch.testing.assert_close(*weights, rtol=1e-13, atol=1e-13)
