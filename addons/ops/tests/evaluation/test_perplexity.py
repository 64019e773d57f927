"""Losses of texts against the model run on the context of every single token."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.addons.ops.perplexity import (
    TextReading,
    TextScore,
    TextWindow,
    prefix_and_targets,
    score,
    score_texts,
    windows,
)
from megatron.data.tokenizers.build import ByteTokenizer, NullTokenizer
from tests.core.model.tiny import tiny_model

EXPERTS = dict(  # in the second layer, with a capacity that would drop half of the tokens
    num_experts=4,
    moe_router_topk=2,
    moe_layer_freq="[0,1,0]",
    moe_expert_capacity_factor=0.5,
    add_bias_linear=False,
)
END = ByteTokenizer.eod
TEXTS = ["a", "Hello, world, this is a text.", "", "é" * 20, "x" * 7, "abcdefgh" * 6]


@pytest.fixture(scope="module")
def model():
    return tiny_model(torch.float64, scramble=True, vocab=257, padded=264, **EXPERTS)


def loss_of(model, context: list[int], token: int) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([context]))[0, -1]
    return float(torch.logsumexp(logits, 0) - logits[token]), int(logits.argmax()) == token


def contexts(ids: list[int], length: int, stride: int) -> list[list[int]]:
    """What each token is predicted from, by the definition."""
    stream = [END, *ids]
    found = []
    for place in range(len(ids)):
        if place < length:
            found.append(stream[: place + 1])
            continue
        window = (place - length) // stride
        end = min(length + (window + 1) * stride, len(ids))
        found.append(stream[end - length : place + 1])
    return found


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (16, 1), (9, 4)])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_document_by_itself(length, stride, batch_size, model):
    how = TextReading(length, stride, batch_size)
    found = list(score_texts(model, ByteTokenizer(), TEXTS, how))
    full = [text for text in TEXTS if text]
    assert len(found) == len(full)
    for one, text in zip(found, full, strict=True):
        ids = list(text.encode())
        expected = [
            loss_of(model, context, token)[0]
            for context, token in zip(contexts(ids, length, stride), ids, strict=True)
        ]
        assert (one.documents, one.tokens, one.text_bytes) == (1, len(ids), len(ids))
        assert one.nats == pytest.approx(math.fsum(expected), rel=1e-5)
        assert one.loss == pytest.approx(one.nats / len(ids))
        assert one.perplexity == pytest.approx(math.exp(one.loss))
        assert one.bits_per_byte == pytest.approx(one.nats / math.log(2) / len(ids))


def test_documents_joined_as_in_training(model):
    (found,) = score_texts(model, ByteTokenizer(), TEXTS, TextReading(16, 8, 3, joined=True))
    ids = [token for text in TEXTS if text for token in [*text.encode(), END]]
    expected = [
        loss_of(model, context, token)[0]
        for context, token in zip(contexts(ids, 16, 8), ids, strict=True)
    ]
    assert (found.documents, found.tokens, found.text_bytes) == (5, len(ids), len(ids) - 5)
    assert found.nats == pytest.approx(math.fsum(expected), rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 18, 31, 32, 33, 40])
def test_every_token_is_predicted_once_with_the_context_promised(size):
    ids = list(range(100, 100 + size))
    for stride in (1, 3, 16):
        found = list(windows(ids, 7, 16, stride))
        assert [token for window in found for token in window.targets] == ids
        for number, window in enumerate(found):
            assert len(window.inputs) <= 16 and len(window.targets) <= len(window.inputs)
            # inputs are the tokens before the targets
            whole = [7, *ids]
            end = whole.index(window.targets[-1])
            assert list(window.inputs) == whole[end - len(window.inputs) : end]
            if number:
                assert len(window.inputs) == 16 and len(window.targets) <= stride
    assert list(windows([], 7, 16, 16)) == []


def test_what_the_model_would_choose(model):
    ids = [END, *b"Hello"]
    best = loss_of(model, ids, 0)
    with torch.no_grad():
        first = int(model(torch.tensor([ids]))[0, -1].argmax())
    found = list(
        score(model, [TextWindow(ids, [first]), TextWindow(ids[:2], [3]), TextWindow(ids, [0])], 2)
    )
    assert found[0].greedy.tolist() == [True]
    assert found[2].losses.tolist() == [pytest.approx(best[0], rel=1e-5)]
    assert found[2].greedy.tolist() == [best[1]]


def test_what_stands_before_a_document():
    class WithBegin(NullTokenizer):
        bos = 5

    assert prefix_and_targets(ByteTokenizer(), [1, 2]) == (END, [1, 2])
    assert prefix_and_targets(WithBegin(9), [5, 1]) == (5, [1])
    assert prefix_and_targets(WithBegin(9), [1, 5]) == (8, [1, 5])
    nothing = NullTokenizer(9)
    nothing.eod = None
    with pytest.raises(ValueError, match="no token that stands before a document"):
        prefix_and_targets(nothing, [1])


def test_sums():
    total = sum([TextScore(1, 2, 4, 2.0), TextScore(1, 2, 4, 4.0)], TextScore())
    assert (total.documents, total.loss, total.bits_per_byte) == (2, 1.5, 6 / math.log(2) / 8)
    assert TextScore(1, 1, 1, 1e9).perplexity == math.inf
