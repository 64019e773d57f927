"""Sequences that are decoded together: a sequence can join and leave before any step (continuous
batching)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from megatron.inference.cached_model import CachedModel
from megatron.inference.choose import choose, log_probabilities
from megatron.inference.sampling import Sampling
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import broadcast_

if TYPE_CHECKING:
    from megatron.inference.speculative import SpeculativeModel

PREFILL_TOKENS = 512  # of prompts in one step, so that a long one does not hold up the others


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    `prompt`: one token at least. `stop_ids`: tokens that end the text and are not part of it.
    `logprobs`: None, or so many most likely tokens are given with each token's log-probability.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: Collection[int] = ()
    logprobs: int | None = None


@dataclass(frozen=True)
class NewToken:
    """A token, its log-probability if asked for, and (token, log-probability) of the most likely
    ones."""

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Generation:
    """A request on its way: `tokens` with the prompt, of which the first `cached` are in the cache,
    and `finish_reason` None, "stop" or "length". `drafts`: what the heads expect after them."""

    request: Request
    tokens: list[int]
    generator: torch.Generator
    cached: int = 0
    count: int = 0
    finish_reason: str | None = None
    drafts: Sequence[int] = ()


# a request, a token more or None at a stop token, and why the request ends with it
Given = tuple[Generation, NewToken | None, str | None]


class Engine:
    """Decodes up to `rows` requests together, of up to `length` tokens each (default: as many as
    the model has positions).

    With `drafts` the heads of the model draft so many tokens of each request, and a step gives it
    those that are what is chosen, one after the other, and one more: text and draws are the same as
    without. `drafted` and `accepted` count, by depth, the drafts that were compared and those that
    agreed up to there.

    With tensor parallelism every rank does the same calls; rank 0 of the group chooses the tokens.
    """

    def __init__(self, model: GPTModel, rows: int, length: int | None = None, drafts: int = 0):
        self.length = min(length or model.max_positions, model.max_positions)
        self.rows = rows
        self.drafted = [0] * drafts
        self.accepted = [0] * drafts
        self._heads: SpeculativeModel | None = None
        if drafts:
            from megatron.inference.speculative import SpeculativeModel

            self._heads = SpeculativeModel(model, rows, self.length, drafts)
        self._model = self._heads or CachedModel(model, rows, self.length)
        self._tp = model.ctx.tp
        self._running: list[Generation] = []  # in the order of the rows of the cache

    @property
    def size(self) -> str:
        """Its rows, their tokens and this rank's bytes of cache, as text."""
        nbytes = self._model.cache_bytes
        return f"batch size {self.rows}, context {self.length}, cache {nbytes:,} bytes"

    @property
    def acceptance(self) -> str:
        """The shares of the drafts that were accepted, as text."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        shares = [f"{yes / max(1, of):.3f} of {of}" for yes, of in pairs]
        return f"drafts accepted, by depth: {', '.join(shares)}"

    @property
    def running(self) -> int:
        """Requests on their way."""
        return len(self._running)

    def add(self, request: Request) -> Generation:
        """Start a request with the next step; there must be a free row. Of a prompt that is longer
        than the cache the end is read."""
        assert len(self._running) < self.rows, "every row is taken"
        assert request.prompt, "give the end-of-document token where there is no prompt"
        generator = torch.Generator().manual_seed(request.sampling.seed)
        added = Generation(request, list(request.prompt), generator)
        self._running.append(added)
        return added

    def remove(self, generation: Generation) -> None:
        """Free the row of a request, finished or not; the last row takes its place."""
        row = self._running.index(generation)
        last = self._running.pop()
        if last is not generation:
            self._model.move(len(self._running), row, last.cached)
            self._running[row] = last

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Generation, NewToken | None]]:
        """Decode all requests, as many together as there are rows; (number of the request, its
        state, new token) as `step` gives them."""
        waiting = enumerate(requests)
        numbers: dict[int, int] = {}
        while True:
            while self.running < self.rows and (following := next(waiting, None)):
                number, request = following
                numbers[id(self.add(request))] = number
            if not self._running:
                return
            for generation, token in self.step():
                yield numbers[id(generation)], generation, token

    def stop(self, generation: Generation) -> None:
        """End a request here, if it has not ended, because of what its text is."""
        if generation.finish_reason is None:
            generation.finish_reason = "stop"
            if generation in self._running:
                self.remove(generation)

    def step(self) -> Iterator[tuple[Generation, NewToken | None]]:
        """One new token, or more with drafts, for each request whose prompt has been read, after
        reading up to PREFILL_TOKENS of prompts.

        A request that ends with a stop token comes with None in place of it. Those that are
        finished are removed; `finish_reason` is set with the last token.
        """
        new = self._prefill()
        ready = {id(generation) for generation, *_ in new}
        decoding = [
            generation
            for generation in self._running
            if len(generation.tokens) - generation.cached == 1 and id(generation) not in ready
        ]
        if decoding:
            new += self._decode(decoding)
        return self._hand_on(new)

    def _hand_on(self, new: Sequence[Given]) -> Iterator[tuple[Generation, NewToken | None]]:
        """One by one, without what follows where the caller stops a request."""
        for generation, token, reason in new:
            if generation.finish_reason is None:
                generation.finish_reason = reason
                yield generation, token

    def _prefill(self) -> list[Given]:
        """Read prompts, oldest first; the new tokens of those that were read to their end."""
        new = []
        budget = PREFILL_TOKENS
        for generation in tuple(self._running):
            if len(generation.tokens) > self.length:
                self._shorten(generation)
            start = generation.cached
            tokens = generation.tokens[start : start + budget]
            if len(generation.tokens) - start < 2 or not tokens:
                continue  # decoded, or for a later step
            logits = self._model.forward([tokens], [start], self._running.index(generation))
            generation.cached += len(tokens)
            budget -= len(tokens)
            if generation.cached == len(generation.tokens):
                new += self._choose(logits.unsqueeze(1), {0: generation})
            if self._heads and generation in self._running:
                row = self._running.index(generation)
                (generation.drafts,) = self._heads.draft(
                    [(generation.tokens, generation.cached)], row
                )
        return new

    def _shorten(self, generation: Generation) -> None:
        """Where the cache is full, read the later half of the text again (or more, if that leaves
        room for what is still to come)."""
        missing = generation.request.max_new_tokens - generation.count
        tokens = max(self.length // 2, self.length - missing + 1, 1)
        generation.tokens = generation.tokens[-tokens:]
        generation.cached = 0

    def _decode(self, decoding: list[Generation]) -> list[Given]:
        """One token more, or several. All rows are computed; what others have there is overwritten
        when they are read on."""
        ready = {self._running.index(generation): generation for generation in decoding}
        starts = [min(generation.cached, self.length - 1) for generation in self._running]
        count = 1 + min(len(self.drafted), self.length - 1 - max(starts))
        tokens = [
            [generation.tokens[start], *generation.drafts, *[0] * count][:count]
            for generation, start in zip(self._running, starts, strict=True)
        ]
        if self._heads is None:
            return self._choose(self._model.forward(tokens, starts).unsqueeze(1), ready)
        new = self._choose(self._heads.verify(tokens, starts), ready)
        if self._running:
            read = [(generation.tokens, generation.cached) for generation in self._running]
            drafts = self._heads.draft(read)
            for generation, expected in zip(self._running, drafts, strict=True):
                generation.drafts = expected
        return new

    def _choose(self, logits: torch.Tensor, generations: Mapping[int, Generation]) -> list[Given]:
        """The next tokens of each, from its row of logits [b, s, vocab] after its last token and
        the first s - 1 of its drafts, with one read from the device. The finished ones leave their
        rows: they have no token that the next forward pass could read."""
        device = logits.device
        requests = [generation.request for generation in generations.values()]
        if not all(each.sampling.takes_largest and each.logprobs is None for each in requests):
            logits = logits.cpu()
        chosen = logits.argmax(-1).tolist()
        for row, generation in generations.items():
            if not generation.request.sampling.takes_largest:
                self._draw(chosen[row], logits[row], generation)
        if self._tp.size > 1:
            chosen = broadcast_(torch.tensor(chosen, device=device), self._tp).tolist()
        new: list[Given] = []
        for row, generation in generations.items():
            drafts = generation.drafts[: len(chosen[row]) - 1]
            agreed = 0
            for token, draft in zip_longest(chosen[row], drafts):
                new.append(self._advance(generation, token, logits[row, agreed]))
                if new[-1][-1] or token != draft:
                    break
                agreed += 1
            compared = agreed if new[-1][-1] else len(drafts)
            for depth in range(compared):
                self.drafted[depth] += 1
                self.accepted[depth] += depth < agreed
            generation.cached = len(generation.tokens) - 1
        for generation, _, reason in new:
            if reason:
                self.remove(generation)
        return new

    def _draw(self, chosen: list[int], logits: torch.Tensor, generation: Generation) -> None:
        """Put the tokens of logits [s, vocab] into `chosen`, as far as they are the drafts. Each is
        drawn with those before it: by what it is, not how, a draft is accepted."""
        for i, draft in zip_longest(range(len(chosen)), generation.drafts[: len(chosen) - 1]):
            previous = generation.tokens + chosen[:i]
            sampling = generation.request.sampling
            chosen[i] = choose(logits[i], sampling, generation.generator, previous)
            if chosen[i] != draft:
                return

    def _advance(self, generation: Generation, token: int, logits: torch.Tensor) -> Given:
        request = generation.request
        if token in request.stop_ids:
            return generation, None, "stop"
        generation.tokens.append(token)
        generation.count += 1
        reason = "length" if generation.count >= request.max_new_tokens else None
        if request.logprobs is None:
            return generation, NewToken(token), reason
        logged = NewToken(token, *log_probabilities(logits, token, request.logprobs))
        return generation, logged, reason
