"""A resume on another processor, device, kernel or torch is no longer bit for bit, and says so."""

from dataclasses import replace

import pytest
import torch

from megatron.checkpoint import state_reader
from megatron.checkpoint.state import RunState
from megatron.training.checkpointing import hardware, load
from tests.core.training.tiny_run import make_run
from tests.problems import code_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved():
    run = make_run()
    state = RunState(hardware=hardware.hardware(run.kernels, CPU))
    return run.kernels, state_reader.parse(state.dump(), "state.json")


def test_the_same_hardware_is_not_mentioned(saved):
    kernels, state = saved
    assert state.hardware["processor"].split() and state.hardware["kernels"]
    assert load.other_hardware(kernels, CPU, state) is None


def test_an_older_checkpoint_does_not_say(saved):
    kernels, state = saved
    assert load.other_hardware(kernels, CPU, replace(state, hardware={})) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"processor": "another one"},
        {"device": "NVIDIA H100"},
        {"kernels": {"attention": "Transformer Engine"}},
        {"torch": None},
    ],
)
def test_other_hardware_is_named(saved, changed):
    kernels, state = saved
    assert "attention" in kernels
    if "torch" in changed:
        state = replace(state, versions=state.versions | {"torch": "1.0"})
    else:
        state = replace(state, hardware=state.hardware | changed)
    line = load.other_hardware(kernels, CPU, state)
    assert code_of(line) == "resume-not-bit-for-bit"
    old = changed.get("kernels", {}).get("attention") or changed.get("processor") or ""
    assert old in line and "->" in line
