"""What makes a piece of text stand out among its neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.addons.spikes.text_anomalies import MOST, Measures, measure, rank

RANDOM = np.random.default_rng(0)


def prose(count: int = 200) -> np.ndarray:
    return RANDOM.zipf(1.5, count).clip(1, 5000).astype(np.int64)


def text_of(ids: np.ndarray) -> str:
    return " ".join(f"w{token}" for token in ids)


@pytest.mark.parametrize("period", [1, 3, 13])
def test_repeats_are_counted_with_their_period(period):
    pattern = np.arange(10, 10 + period)
    whole = np.tile(pattern, 40)
    assert (measure(whole, None).repeated, measure(whole, None).period) == (1.0, period)
    half = np.concatenate([np.arange(100, 100 + 40 * period), whole])
    assert (
        measure(half, None).repeated == pytest.approx(0.5) and measure(half, None).period == period
    )
    assert measure(np.tile(pattern, 31), None).repeated == 0.0, "32 times count, fewer do not"
    assert measure(np.tile(np.arange(14), 40), None).repeated == 0.0, "14 tokens are no pattern"


def test_characters_that_are_no_text():
    assert measure(prose(), "plain\ttext\nof ünïcödé 文字 😀").junk == 0.0
    assert (
        measure(prose(), "\x00\x01ab").junk == 0.5 and measure(prose(), "\ufffd\ufffd").junk == 1.0
    )
    assert measure(prose(), "").junk == measure(prose(), None).per_character == 0.0


def ranked(odd: np.ndarray, text: str | None) -> tuple[float, str, float]:
    """(score of the odd one, its reason, largest score of the others)."""
    texts = [prose() for _ in range(20)]
    found = rank([*(measure(ids, text_of(ids)) for ids in texts), measure(odd, text)])
    return found[-1].score, found[-1].reason, max(one.score for one in found[:-1])


def test_each_reason_stands_out_and_says_so():
    score, reason, others = ranked(np.tile([7], 200), text_of(np.tile([7], 200)))
    assert score == MOST and "100%" in reason and others < 6
    ids = prose()
    score, reason, others = ranked(ids, "\x00" * 300 + text_of(ids))
    assert score > others and reason.endswith(" no text")
    score, reason, others = ranked(ids, text_of(ids)[:150])
    assert score == MOST and "per character" in reason
    ids = RANDOM.integers(0, 1 << 31, 200)
    score, reason, others = ranked(ids, text_of(ids % 5000))
    assert score > others and "compressed" in reason


def test_short_pieces_are_compared_with_nothing():
    few = measure(np.arange(31), "x" * 1000)
    others = [measure(ids, text_of(ids)) for ids in (prose(), prose())]
    assert rank([*others, few])[-1].score == 0.0
    assert rank([few])[0].score == 0.0
    assert rank([]) == []
    assert isinstance(measure(np.zeros(0, np.int64), ""), Measures)
