"""How many Python functions a training step calls: what the host does while a GPU waits for it."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch

from megatron.kernels.cpu import native
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


LLAMA = dict(
    swiglu=True, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False
)


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ({}, 400),
        (LLAMA, 410),  # 400, and a few that another processor may have
        ({"hidden_dropout": 0.1, "attention_dropout": 0.1}, 600),
    ],
    ids=["gpt", "llama", "dropout"],
)
def test_calls_a_layer_and_micro_batch(monkeypatch, flags, most):
    """On 2026-11-29, with torch 2.13 on an AMD EPYC: 358, 398 and 560; with dropout 711 before."""
    if reason := native.unavailable_reason(torch.device("cpu"), torch.float32):
        pytest.skip(reason)
    assert 200 < calls_of_a_step(monkeypatch, **flags) <= most
