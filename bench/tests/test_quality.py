"""bench/quality.py: its statistics, which runs it makes, and that it makes none twice."""

from __future__ import annotations

import json
import math

import pytest

from bench import quality
from bench.quality import Trial

BEST = {"adam": 0.008, "muon": 0.016}
RATIO = 0.4
RATES = quality.RATES["1M"]


@pytest.fixture
def runs(monkeypatch):
    """Trials that were trained, in turn. Losses fall with log steps, best at BEST and the smaller
    weight decay; Muon's are those of Adam after more steps."""
    trained = []

    def train(self, trial):
        trained.append(trial)
        part = RATIO if trial.optimizer == "muon" else 1.0
        loss = 3.0 - 0.5 * math.log(trial.steps / part / 100) + 1e-3 * (trial.seed % 3)
        loss += 0.1 * abs(math.log2(trial.lr / BEST[trial.optimizer])) + trial.weight_decay / 100
        return {"loss": loss, "cpu_seconds": 60.0, "losses": [loss] * trial.steps}

    monkeypatch.setattr(quality.Trainer, "train", train)
    monkeypatch.setattr(quality.Trainer, "prepare", lambda self: None)
    return trained


def test_the_whole_measurement(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["--folder", str(tmp_path), "--steps", "400", "--seeds", "4"]
    assert quality.main(words) == 0
    found = json.loads((tmp_path / "1M/results.json").read_text())
    tuning = [trial for trial in runs if trial.seed == quality.TUNING_SEED]
    each = len(RATES) + len(quality.WEIGHT_DECAYS) - 1
    assert [sum(t.optimizer == name for t in tuning) for name in BEST] == [each, each]
    further = [trial for trial in runs if trial.seed != quality.TUNING_SEED]
    assert {(t.optimizer, t.lr, t.weight_decay) for t in further} == {
        (name, rate, 0.1) for name, rate in BEST.items()
    }
    assert {(t.optimizer, t.steps): t for t in further}.keys() == {
        ("adam", 400),
        *(("muon", steps) for steps in (100, 200, 400)),
    }
    assert len(further) == 4 * 4
    assert found["ratio"] == pytest.approx(RATIO)
    low, high = found["interval"]
    assert RATIO * 0.99 < low < RATIO < high < RATIO * 1.01
    assert found["cpu_minutes"] == len(runs) == len(found["runs"])
    assert (tmp_path / "1M/quality.png").stat().st_size > 10_000
    assert capsys.readouterr().out
    count = len(runs)
    assert quality.main(words) == 0
    assert len(runs) == count, "a finished run was trained again"


def test_the_grids_of_both_grow_where_the_best_of_one_is_at_an_end(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(BEST, "muon", 0.064)
    rates, best = quality.tuned(quality.Trainer(tmp_path, "1M").loss, 400, RATES)
    assert rates == [*RATES, 0.064, 0.128]
    assert {name: trial.lr for name, trial in best.items()} == pytest.approx(BEST)
    assert sum(t.optimizer == "adam" for t in runs) == len(rates) + len(quality.WEIGHT_DECAYS) - 1


def test_an_illustration_takes_the_best_of_7m(runs, tmp_path):
    pytest.importorskip("matplotlib")
    assert quality.main(["--size", "7M", "--folder", str(tmp_path), "--steps", "40"]) == 0
    count = len(runs)
    assert quality.main(["--size", "30M", "--folder", str(tmp_path), "--steps", "40"]) == 0
    assert [(t.optimizer, t.lr, t.weight_decay, t.steps, t.seed) for t in runs[count:]] == [
        (name, rate, 0.1, quality.ILLUSTRATION, 1) for name, rate in BEST.items()
    ]
    found = json.loads((tmp_path / "30M/results.json").read_text())
    assert "ratio" not in found and len(found["runs"]) == 2
    assert (tmp_path / "30M/quality.png").stat().st_size > 10_000


def test_a_measurement_that_was_interrupted_goes_on(runs, tmp_path):
    trial = Trial("adam", 0.1, 0.2, 10, 3)
    first = quality.Trainer(tmp_path, "1M").loss(trial)
    assert quality.Trainer(tmp_path, "1M").loss(trial) == first
    assert runs == [trial]
    quality.Trainer(tmp_path, "7M").loss(trial)
    assert runs == [trial, trial], "a run of another size"


@pytest.mark.parametrize(
    ("goal", "steps"),
    [(3.0, 100), (2.0, 200), (1.5, 200 * 2**0.5), (1.0, 400), (0.0, 800), (3.5, 50 * 2**0.5)],
)
def test_steps_to_a_loss(goal, steps):
    """Within the runs, and where the nearest line goes on."""
    losses = {100: 3.0, 200: 2.0, 400: 1.0}
    assert quality.steps_to(goal, losses) == pytest.approx(steps)
