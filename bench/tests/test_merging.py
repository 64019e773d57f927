"""bench/merging.py: which runs it makes, that it makes none twice, and its statistics."""

from __future__ import annotations

import json

import pytest

from bench import merging

LOSSES = {"constant": 3.0, "decay": 2.5, "linear": 2.6, "cosine": 2.7, "1-sqrt": 2.8}


@pytest.fixture
def done(monkeypatch):
    """Runs that were trained, and merges: their flags in turn."""
    calls = []

    def train(self, flags, *more):
        calls.append(dict(flags))
        load = str(flags.get("--load", "/constant"))
        name = "decay" if "--ckpt-step" in flags else load.rpartition("/")[2]
        return LOSSES[name] + 0.1 * flags["--seed"]

    def call(program, *words):
        calls.append(dict(zip(words[1::2], words[2::2], strict=True)))

    monkeypatch.setattr(merging.Study, "train", train)
    monkeypatch.setattr(merging, "call", call)
    monkeypatch.setattr(merging.Trainer, "prepare", lambda self: None)
    return calls


def test_the_whole_study(done, tmp_path):
    words = ["--folder", str(tmp_path), "--steps", "405", "--window", "4"]
    assert merging.main(words) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    # saved every 20 steps; the rate decays over the last 80 of 400, of which 4 are merged
    constant, decay, merge = done[:3]
    assert (constant["--train-iters"], constant["--save-interval"]) == (400, 20)
    assert (decay["--ckpt-step"], decay["--lr-wsd-decay-iters"]) == (320, 80)
    assert (merge["--merge-window"], merge["--merge-weights"]) == (4, "linear")
    assert len(done) == 3 * (2 + 2 * len(merging.WEIGHTS))
    for name, loss in LOSSES.items():
        mean = found["mean"][name]
        assert mean["mean"] == pytest.approx(loss + 0.2)
        assert mean["deviation"] == pytest.approx(0.1)
        assert mean["above_decay"] == pytest.approx(loss - LOSSES["decay"])
        assert mean["deviation_above_decay"] == pytest.approx(0.0, abs=1e-12)
    count = len(done)
    assert merging.main(words) == 0
    assert len(done) == count, "a finished seed was trained again"


def test_one_seed_has_no_spread(done, tmp_path):
    words = ["--folder", str(tmp_path), "--size", "7M", "--seeds", "1", "--steps", "400"]
    assert merging.main(words) == 0
    of_decay = json.loads((tmp_path / "results.json").read_text())["mean"]["decay"]
    assert of_decay["deviation"] is None
    assert of_decay["mean"] == pytest.approx(LOSSES["decay"] + 0.1)
