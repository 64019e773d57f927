"""A run state comes back exactly, and what would not come back exactly is refused when it is
written."""

import json
import math
import random
import struct

import numpy as np
import pytest
import torch

from megatron.checkpoint import state_reader
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.state import RunState
from megatron.training.checkpointing.saved_args import ABSENT, differences
from tests import problems


def full() -> RunState:
    return RunState(
        iteration=20,
        consumed_train_samples=320,
        consumed_valid_samples=7,
        skipped_train_samples=16,
        num_floating_point_operations=10**30 + 1,
        scheduler={"num_steps": 320, "max_lr": 0.1 + 0.2, "style": "cosine"},
        scaler={"scale": 2.0**32, "growth_tracker": 3},
        optimizer={"groups": [{"wd_mult": 1.0, "step": 20}]},
        rng={"philox": (1 << 200) - 1},
        data={"split": "969,30,1", "files": [["a", 1]]},
        skips=[[3, 7], "loss"],
        layout={"world": 4, "tp": 2},
        versions={"torch": "2.13"},
    )


def test_round_trip_of_everything():
    state = full()
    again = state_reader.parse(state.dump(), "x")
    assert again == state and again.dump() == state.dump()
    assert json.loads(state.dump())["num_floating_point_operations"] == 10**30 + 1
    assert state_reader.parse(RunState().dump(), "x") == RunState()
    assert set(RunState().versions) == {"python", "torch", "numpy", "suite", "commit"}


def test_floats_come_back_bit_for_bit():
    rng = random.Random(3)
    values = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(2000)]
    values = [value for value in values if not math.isnan(value)] + [
        0.0,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        1e16,
        3.0,
    ]
    again = state_reader.parse(RunState(scheduler={"v": values}).dump(), "x").scheduler["v"]
    assert [struct.pack("<d", one) for one in again] == [struct.pack("<d", one) for one in values]
    assert all(type(one) is float for one in again)
    text = RunState(scheduler={"best": math.nan}).dump()
    assert b"NaN" not in text and math.isnan(state_reader.parse(text, "x").scheduler["best"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.float64(1), "scheduler.a is a numpy.float64"),
        (np.int64(1), "scheduler.a is a numpy.int64"),
        (torch.tensor(1.0), "scheduler.a is a torch.Tensor"),
        ({1: 2}, "scheduler.a: key 1 "),
        ([{"x": {1}}], r"scheduler.a\[0\].x is a builtins.set"),
        (b"x", "is a builtins.bytes"),
        ({"float": 1.0}, "only key"),
    ],
)
def test_what_would_come_back_changed_is_refused(value, words):
    with pytest.raises(TypeError, match=words):
        RunState(scheduler={"a": value}).dump()


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        (b"", "checkpoint-damaged", ""),
        (b"[]", "checkpoint-damaged", ""),
        (b"{}", "checkpoint-damaged", "'version'"),
        (b"\xff", "checkpoint-damaged", "0xff"),
        (b"[" * 100_000, "checkpoint-damaged", ""),
        (b'{"version": 2}', "checkpoint-version-unknown", "version 2"),
        (b'{"version": 1, "later": 1}', "checkpoint-version-unknown", "['later']"),
        (b'{"version": 1, "features": {}, "later": {}}', "checkpoint-version-unknown", "['later']"),
        (b'{"version": 1, "iteration": "3"}', "checkpoint-damaged", ": iteration "),
        (b'{"version": 1, "iteration": true}', "checkpoint-damaged", " bool, "),
        (b'{"version": 1, "skips": {}}', "checkpoint-damaged", ": skips "),
    ],
)
def test_bad_texts_are_one_clear_error(text, code, named):
    with problems.raises(CheckpointError, code, "/run/state.json", named):
        state_reader.parse(text, "/run/state.json")


def test_the_state_of_a_feature_is_kept_whatever_it_is():
    """Earlier programs wrote it among the others."""
    old = state_reader.parse(b'{"version": 1, "iteration": 5, "spikes": {"marks": [1]}}', "x")
    assert old.features == {"spikes": {"marks": [1]}} and old.iteration == 5
    assert state_reader.parse(old.dump(), "x") == old


def test_entries_added_later_have_defaults():
    assert state_reader.parse(b'{"version": 1, "iteration": 5}', "x").iteration == 5


def test_differences_names_both_sides_in_order():
    saved = {"num_layers": 2, "lr": 1e-4, "betas": [0.9, 0.95], "split": "969,30,1", "old": 1}
    now = {"num_layers": 4, "lr": 1e-4, "betas": (0.9, 0.95), "split": None, "new": 2}
    names = ["split", "num_layers", "lr", "betas", "old", "new", "nowhere"]
    assert differences(saved, now, names) == [
        ("split", "969,30,1", None),
        ("num_layers", 2, 4),
        ("old", 1, ABSENT),
        ("new", ABSENT, 2),
    ]
