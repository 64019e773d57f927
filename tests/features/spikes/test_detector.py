"""The detector on made-up runs: what it flags, what it must not, and what it
forgets."""

import json
import math

import numpy as np
import pytest

from megatron.features.spikes.detector import LEAST, LEVEL_SHIFT, WINDOW, Finding, SpikeDetector

SIGMA = 0.02


def curve(seed: int, steps: int = 2500) -> np.ndarray:
    """The losses of a healthy run: a power law with normal noise."""
    return (
        1.7
        + 10 * np.arange(1, steps + 1) ** -0.25
        + np.random.default_rng(seed).normal(0, SIGMA, steps)
    )


def judged(losses: np.ndarray, norms: np.ndarray | None = None) -> list[Finding]:
    detector = SpikeDetector()
    return [
        detector.check(float(y), None if norms is None else float(norms[i]))
        for i, y in enumerate(losses)
    ]


def test_a_healthy_run_has_no_spike():
    assert not any(
        finding.spike for seed in range(5) for finding in judged(curve(seed, 20_000)[:5000])
    )


@pytest.mark.parametrize(
    ("height", "least"),
    [
        (7, 15),
        pytest.param(10, 20, marks=pytest.mark.campaign),
        pytest.param(25, 20, marks=pytest.mark.campaign),
    ],
)
def test_single_spikes_are_found(height, least):
    found = 0
    for seed in range(20):
        losses = curve(100 + seed)
        losses[2000] += height * SIGMA
        spikes = [i for i, finding in enumerate(judged(losses)) if finding.spike]
        assert spikes in ([], [2000])
        found += bool(spikes)
    assert found >= least


def test_a_large_spike_does_not_hide_a_smaller_one_behind_it():
    for seed in range(20):
        losses = curve(200 + seed)
        losses[2000] += 100 * SIGMA
        losses[2050] += 20 * SIGMA
        assert [i for i, finding in enumerate(judged(losses)) if finding.spike] == [2000, 2050]


def test_every_iteration_of_a_cluster_is_found():
    losses = curve(300)
    losses[2000:2030] += 0.5
    assert [i for i, finding in enumerate(judged(losses)) if finding.spike] == list(
        range(2000, 2030)
    )


def test_a_new_level_is_taken_for_what_it_is():
    losses = curve(400)
    losses[2000:] *= 1.2
    findings = judged(losses)
    assert [i for i, finding in enumerate(findings) if finding.spike] == list(
        range(2000, 2000 + LEVEL_SHIFT)
    )
    assert findings[2000 + LEVEL_SHIFT].kind == "level shift"


@pytest.mark.parametrize(
    "loss, norm", [(math.nan, 1.0), (math.inf, 1.0), (5.0, math.nan), (5.0, math.inf)]
)
def test_what_is_not_finite_is_a_spike_and_leaves_no_trace(loss, norm):
    detector = SpikeDetector()
    untouched = SpikeDetector()
    for y in curve(500)[:1000]:
        assert detector.check(float(y), 1.0) == untouched.check(float(y), 1.0)
    assert detector.check(loss, norm) == Finding("non-finite")
    assert detector.state_dict() == untouched.state_dict()
    assert SpikeDetector().check(loss, norm).spike, "from the first iteration on"


def test_the_gradient_norm_alone_is_enough_and_only_upwards():
    losses = curve(600)
    norms = np.exp(np.random.default_rng(0).normal(0, 0.1, 2500))
    norms[1500], norms[2000] = 12.0, 1 / 12.0
    found = {i: finding.kind for i, finding in enumerate(judged(losses, norms)) if finding.spike}
    assert found == {1500: "grad-norm"}
    losses[2200] -= 100 * SIGMA
    assert {i for i, finding in enumerate(judged(losses, norms)) if finding.spike} == {1500}


def test_small_excess_and_small_ratio_are_no_spikes_however_quiet_the_run():
    losses = np.full(300, 3.0) + np.random.default_rng(1).normal(0, 1e-4, 300)
    norms = np.ones(300) + np.random.default_rng(2).normal(0, 1e-4, 300)
    losses[200], norms[250] = 3.04, 9.8
    findings = judged(losses, norms)
    assert not any(finding.spike for finding in findings)
    assert findings[200].kind == findings[250].kind == "precursor"
    losses[200], norms[250] = 3.06, 10.2
    assert [finding.kind for finding in judged(losses, norms) if finding.spike] == [
        "loss",
        "grad-norm",
    ]


def test_nothing_is_said_while_there_is_too_little_to_compare_with():
    losses = np.full(LEAST + 1, 3.0) + np.random.default_rng(1).normal(0, 0.01, LEAST + 1)
    losses[LEAST - 1] += 5
    assert not any(finding.kind for finding in judged(losses)[:LEAST])
    losses = np.full(LEAST + 1, 3.0) + np.random.default_rng(1).normal(0, 0.01, LEAST + 1)
    losses[LEAST] += 5
    assert judged(losses)[LEAST].kind == "loss"


def test_its_state_goes_through_json_and_on():
    losses = curve(700)
    norms = np.exp(np.random.default_rng(3).normal(0, 0.1, 2500))
    losses[1200:1210] += 1.0
    whole = judged(losses, norms)
    for cut in (1, LEAST, 1205, 2000):
        first = SpikeDetector()
        second = SpikeDetector()
        parts = [first.check(float(losses[i]), float(norms[i])) for i in range(cut)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        parts += [second.check(float(losses[i]), float(norms[i])) for i in range(cut, 2500)]
        assert parts == whole
    assert len(first.state_dict()["loss"]) == WINDOW
