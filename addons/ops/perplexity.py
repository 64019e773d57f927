"""The losses that a trained model has on token ids, and perplexity and bits per byte of texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.tokenizers.base import Tokenizer
from megatron.model.gpt import CORRECT, GPTModel, TokenMetrics

TOGETHER = 32  # batches whose windows are sorted by length


@dataclass(frozen=True)
class TextWindow:
    """What the model reads at once. `targets` are the tokens that follow its last
    len(`targets`) inputs."""

    inputs: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True)
class Score:
    """The loss of each target of a window in nats, float32 [n], and whether the model ranks it
    first, bool [n]."""

    losses: np.ndarray
    greedy: np.ndarray


@dataclass(frozen=True)
class TextScore:
    """What evaluations report: `nats` is the sum of the losses of `tokens` tokens, which stand for
    `text_bytes` bytes of UTF-8."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    nats: float = 0.0

    def __add__(self, other: TextScore) -> TextScore:
        return TextScore(
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.text_bytes + other.text_bytes,
            self.nats + other.nats,
        )

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that is no float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text."""
        return self.nats / math.log(2) / self.text_bytes


def windows(ids: Sequence[int], prefix: int, length: int, stride: int) -> Iterator[TextWindow]:
    """Windows of up to `length` inputs in which every id is predicted once, the first one after
    `prefix`. The first window predicts up to `length` ids; each further one `stride` ids (the last
    one what is left), with as many ids before them as fit."""
    stream = [prefix, *ids]
    done = min(length, len(ids))
    if done:
        yield TextWindow(stream[:done], stream[1 : done + 1])
    while done < len(ids):
        end = min(done + stride, len(ids))
        yield TextWindow(stream[end - length : end], stream[done + 1 : end + 1])
        done = end


@torch.inference_mode()
def score(model: GPTModel, pending: Iterable[TextWindow], batch_size: int) -> Iterator[Score]:
    """The score of each window, in order; `batch_size` windows of similar length go through the
    model at once."""
    queue = iter(pending)
    while group := list(itertools.islice(queue, TOGETHER * batch_size)):
        order = sorted(range(len(group)), key=lambda number: -len(group[number].inputs))
        scores: dict[int, Score] = {}
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            batch = _score_batch(model, [group[number] for number in numbers])
            for number, scored in zip(numbers, batch, strict=True):
                scores[number] = scored
        yield from (scores[number] for number in range(len(group)))


def _score_batch(model: GPTModel, batch: Sequence[TextWindow]) -> list[Score]:
    """Shorter windows are padded at their end, which causal attention does not see."""
    device = next(model.parameters()).device
    size = max(len(window.inputs) for window in batch)
    if model.ctx.sequence_parallel:
        size += -size % model.ctx.tp.size
    tokens = torch.zeros(len(batch), size, dtype=torch.long)
    labels = torch.zeros_like(tokens)
    for row, window in enumerate(batch):
        end = len(window.inputs)
        tokens[row, :end] = torch.tensor(window.inputs)
        labels[row, end - len(window.targets) : end] = torch.tensor(window.targets)
    metrics = TokenMetrics((CORRECT,))
    losses = model(tokens.to(device), labels=labels.to(device), token_metrics=metrics)
    losses = losses.float().cpu().numpy()
    greedy = metrics.values[CORRECT].cpu().numpy()
    scores = []
    for row, window in enumerate(batch):
        predicted = slice(len(window.inputs) - len(window.targets), len(window.inputs))
        scores.append(Score(losses[row, predicted], greedy[row, predicted]))
    return scores


@dataclass(frozen=True)
class TextReading:
    """How texts are read: windows of `length` tokens, `stride` new ones in each, `batch_size` at
    once. `joined`: documents follow each other, each ended by the end-of-document token, which is
    predicted too; else each document is predicted from an end-of-document token on."""

    length: int
    stride: int
    batch_size: int
    joined: bool = False


def score_texts(
    model: GPTModel, tokenizer: Tokenizer, texts: Iterable[str], how: TextReading
) -> Iterator[TextScore]:
    """The score of each document that has tokens, or of all of them joined. Raises ValueError for
    a text that the tokenizer cannot encode, and without an end-of-document token."""
    if how.joined:
        yield _score_joined(model, tokenizer, texts, how)
        return
    # documents are scored together, so that short ones fill a batch
    queue = iter(texts)
    while some := list(itertools.islice(queue, how.batch_size * TOGETHER)):
        encoded = [
            (text, *prefix_and_targets(tokenizer, tokenizer.tokenize(text))) for text in some
        ]
        windows_of_texts = [
            list(windows(ids, prefix, how.length, how.stride)) for _, prefix, ids in encoded
        ]
        scores = score(model, itertools.chain.from_iterable(windows_of_texts), how.batch_size)
        for (text, _, ids), windows_of_text in zip(encoded, windows_of_texts, strict=True):
            nats = _nats(itertools.islice(scores, len(windows_of_text)))
            if ids:
                yield TextScore(1, len(ids), len(text.encode("utf-8")), nats)


def _score_joined(
    model: GPTModel, tokenizer: Tokenizer, texts: Iterable[str], how: TextReading
) -> TextScore:
    if tokenizer.eod is None:
        raise ValueError(
            "this tokenizer has no end-of-document token to join documents with "
            "[flag-not-with-tokenizer]"
        )
    ids: list[int] = []
    documents = text_bytes = 0
    for text in texts:
        if of_text := tokenizer.tokenize(text):
            ids += [*of_text, tokenizer.eod]
            documents += 1
            text_bytes += len(text.encode("utf-8"))
    pending = windows(ids, tokenizer.eod, how.length, how.stride)
    return TextScore(documents, len(ids), text_bytes, _nats(score(model, pending, how.batch_size)))


def _nats(scores: Iterable[Score]) -> float:
    return math.fsum(float(score.losses.sum(dtype=np.float64)) for score in scores)


def prefix_and_targets(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, Sequence[int]]:
    """The token that a document is predicted from, and the ids to predict. It is the begin token
    if the tokenizer writes one, else the end-of-document token, after which documents begin in
    training. Raises ValueError if there is none."""
    if ids and ids[0] == tokenizer.bos and tokenizer.bos != tokenizer.eod:
        return ids[0], ids[1:]
    prefix = tokenizer.eod if tokenizer.eod is not None else tokenizer.bos
    if prefix is None:
        raise ValueError(
            "this tokenizer has no token that stands before a document [flag-not-with-tokenizer]"
        )
    return prefix, ids
