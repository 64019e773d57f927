"""Choosing tokens from given logits: greedy, temperature, top-k, top-p, penalty, seeds."""

import math
from collections import Counter

import pytest
import torch

from megatron.inference.choose import choose, log_probabilities
from megatron.inference.sampling import Sampling


def draw(logits: list[float], sampling: Sampling, times: int = 2000) -> Counter:
    generator = torch.Generator().manual_seed(3)
    return Counter(choose(torch.tensor(logits), sampling, generator) for _ in range(times))


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals():
    assert draw([0.0, 2.0, 1.0, 2.0], Sampling(temperature=0.0), 5) == {1: 5}


def test_draws_follow_the_probabilities():
    shares = [0.5, 0.3, 0.2]
    counts = draw([math.log(p) + 7.0 for p in shares], Sampling())
    for token, share in enumerate(shares):
        assert abs(counts[token] / 2000 - share) < 0.04


def test_a_low_temperature_sharpens():
    logits = [math.log(0.6), math.log(0.4)]
    share = 0.6**4 / (0.6**4 + 0.4**4)
    assert abs(draw(logits, Sampling(temperature=0.25))[0] / 2000 - share) < 0.03


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {3}), (0.5, {3}), (0.51, {3, 1}), (0.8, {3, 1}), (0.81, {0, 1, 3})]
)
def test_top_p_keeps_the_smallest_set_that_holds_the_share(top_p, kept):
    counts = draw([math.log(p) for p in (0.15, 0.3, 0.05, 0.5)], Sampling(top_p=top_p))
    assert set(counts) == kept


def test_wrong_settings_are_all_named():
    wrong = Sampling(temperature=-1.0, top_k=-1, top_p=0.0, seed=-1, repetition_penalty=0.0)
    assert [line.split()[0] for line in wrong.problems()] == [
        "--temperature",
        "--top-k",
        "--top-p",
        "--repetition-penalty",
        "--seed",
    ]
    assert Sampling(temperature=float("nan")).problems() and not Sampling().problems()


def test_top_k_keeps_the_most_likely_and_top_p_chooses_among_them():
    logits = [math.log(p) for p in (0.15, 0.3, 0.05, 0.5)]
    assert set(draw(logits, Sampling(top_k=2))) == {1, 3}
    assert set(draw(logits, Sampling(top_k=3, top_p=0.6))) == {1, 3}
    assert set(draw(logits, Sampling(top_k=9))) == {0, 1, 2, 3}


def test_top_p_of_a_flat_distribution_keeps_more_than_the_first_look():
    counts = draw([0.0] * 1000, Sampling(top_p=0.9), 750)
    assert 375 < len(counts) <= 900


def test_the_repetition_penalty_is_for_tokens_that_have_occurred():
    logits = torch.tensor([2.0, 1.5, -1.0, -1.1])
    greedy = Sampling(temperature=0.0, repetition_penalty=2.0)
    generator = torch.Generator()
    assert choose(logits, greedy, generator) == 0
    assert choose(logits, greedy, generator, [0, 0]) == 1
    assert choose(torch.tensor([-1.0, -1.5, -1.9, -3.0]), greedy, generator, [0, 1]) == 2
    assert logits[0] == 2.0


def test_the_seed_decides():
    logits = torch.zeros(100)
    draws = [
        [choose(logits, Sampling(), torch.Generator().manual_seed(seed)) for _ in range(3)]
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_a_very_low_temperature_is_greedy():
    assert draw([1000.0, 999.0], Sampling(temperature=1e-300), 20) == {0: 20}


def test_log_probabilities():
    value, best = log_probabilities(torch.tensor([0.1, 0.7, 0.2]).log(), 0, 2)
    assert value == pytest.approx(math.log(0.1)) and [token for token, _ in best] == [1, 2]
    assert log_probabilities(torch.zeros(4), 2, 9)[1][3][1] == pytest.approx(-math.log(4))
    assert log_probabilities(torch.zeros(4), 2, 0)[1] == ()
