"""How many Python functions a training step calls: what the host does while a GPU waits for it."""

import sys
from types import FrameType

import pytest
import torch

from megatron.kernels import attention, gelu, qkv
from megatron.kernels.cpu import native
from megatron.parallel import layers
from megatron.training import step
from tests.core.training.tiny_run import make_run, micro_batches, samples
from tests.runs import plot

LAYERS = 12
MICRO_BATCHES = 16


def calls_of_a_step(monkeypatch: pytest.MonkeyPatch, **flags: object) -> float:
    """Of forward and backward, a layer and micro-batch, with the rest of the model."""
    sizes = dict(hidden_size=64, num_attention_heads=4, micro_batch_size=1, fp64=False)
    run = make_run(num_layers=LAYERS, global_batch_size=MICRO_BATCHES, **sizes, **flags)
    tokens = samples(MICRO_BATCHES)
    forward_backward = step.forward_backward
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    def counted(*arguments: object) -> None:
        sys.setprofile(see)
        try:
            forward_backward(*arguments)
        finally:
            sys.setprofile(None)

    step.train_step(run, plot().forward_step, micro_batches(tokens, 1), 1)
    monkeypatch.setattr(step, "forward_backward", counted)
    step.train_step(run, plot().forward_step, micro_batches(tokens, 1), 2)
    return count / LAYERS / MICRO_BATCHES


def take_all_for_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of large layers, whatever the sizes."""
    monkeypatch.setattr(layers, "FEW_MULTIPLICATIONS", 0)
    monkeypatch.setattr(gelu, "FEW", 0)
    monkeypatch.setattr(qkv, "FEW", 0)
    monkeypatch.setattr(attention, "CPP_FROM", 0)


LLAMA = dict(
    swiglu=True, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False
)


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.mark.parametrize(
    ("flags", "of_ours", "of_torch"),
    [
        pytest.param({}, 400, 130, id="gpt", marks=pytest.mark.campaign),
        # 400, and a few that another processor may have
        pytest.param(LLAMA, 410, 210, id="llama"),
        pytest.param(DROPOUT, 600, 350, id="dropout", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_calls_a_layer_and_micro_batch(monkeypatch, flags, of_ours, of_torch, large):
    """With the operations of large layers and those of small ones, most of which are torch's. On
    2026-11-29, with torch 2.13 on an AMD EPYC: 358, 398 and 560 of large ones, with dropout 711
    before; 105 and 187 of small ones."""
    if reason := native.unavailable_reason(torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    if large:
        take_all_for_large(monkeypatch)
    most = of_ours if large else of_torch
    assert most / 2 < calls_of_a_step(monkeypatch, **flags) <= most


@pytest.mark.parametrize("flags", [{}, LLAMA, {"geglu": True}])
def test_small_layers_compute_what_large_ones_do(monkeypatch, flags):
    """Loss and norm of the gradients of several micro-batches, in fp64."""
    results = []
    for large in (False, True):
        if large:
            take_all_for_large(monkeypatch)
        run = make_run(ffn_hidden_size=32, **flags)
        done = step.train_step(run, plot().forward_step, micro_batches(samples(), 1), 1)
        results.append((done.loss, done.grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-12)
