"""Choosing and generating tokens: greedy, top-p and seeds by hand-made logits, windows and stops on
a small model."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from megatron.inference.generate import Sampling, choose, generate
from tests.model.tiny import VOCAB, tiny_model


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
    problems = Sampling(temperature=-1.0, top_p=0.0, seed=-1).problems()
    assert [line.split()[0] for line in problems] == ["--temperature", "--top-p", "--seed"]
    assert Sampling(temperature=float("nan")).problems() and not Sampling().problems()


def test_each_new_token_is_the_choice_after_all_before_it():
    model = tiny_model(scramble=True)
    new = list(generate(model, [1, 2, 3], 6, Sampling(temperature=0.0)))
    tokens = [1, 2, 3]
    with torch.no_grad():
        for token in new:
            assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
            tokens.append(token)
    assert len(new) == 6


def test_a_long_text_is_read_through_the_window_of_the_model():
    model = tiny_model(scramble=True)
    prompt = [i % VOCAB for i in range(40)]
    assert list(generate(model, prompt, 3, Sampling(temperature=0.0))) == list(
        generate(model, prompt[-16:], 3, Sampling(temperature=0.0))
    )


def test_the_seed_decides_and_the_stop_token_ends_it_unseen():
    model = tiny_model(scramble=True)
    runs = [list(generate(model, [5], 8, Sampling(seed=seed))) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    stopped = list(generate(model, [5], 8, Sampling(seed=1), stop_at=runs[0][3]))
    assert stopped == runs[0][: runs[0].index(runs[0][3])]
