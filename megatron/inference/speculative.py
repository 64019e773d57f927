"""Speculative decoding (Leviathan et al. 2023) by the modules of multi-token prediction: they draft
tokens, which the model computes in one pass with the token before them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megatron.inference.cached_model import CachedModel
from megatron.model.blocks.cache import CachedTokens
from megatron.model.blocks.module import LayerInputs
from megatron.model.gpt import GPTModel

FLAG = "--num-speculative-tokens"


def check_heads(heads: int, count: int) -> None:
    """Raise ValueError where a model with so many heads cannot draft `count` tokens."""
    if count > heads:
        raise ValueError(
            f"{FLAG} {count}: the model has {heads} heads for later tokens (--mtp-num-layers "
            "in training); give at most as many, or omit the flag [speculative-unfit]"
        )


class SpeculativeModel(CachedModel):
    """A CachedModel that drafts `count` tokens; its heads have caches of their own.

    Head k needs of position i the model's hidden state and token i + k. The hidden states of the
    positions from `_first` on of each row wait in `_states` until the last head has its token: up
    to there the caches of the heads are final, what is behind is computed again. Likewise the
    positions of drafts that were not accepted: nothing sees them before they are overwritten.

    Raises ValueError for a model with fewer heads, and for one with windows or gated delta nets.
    """

    def __init__(self, model: GPTModel, rows: int, length: int, count: int):
        check_heads(0 if model.mtp is None else len(model.mtp.layers), count)
        super().__init__(model, rows, length)
        assert model.mtp is not None
        self._layers = model.mtp.layers[:count]
        blocks = [block for each in self._layers for block in each.transformer_layer.blocks()]
        self._of_heads = self._give_caches(blocks)
        self._caches += self._of_heads
        if not all(cache.rewinds for cache in self._caches):
            raise ValueError(
                f"{FLAG} {count}: a layer with a window or a gated delta net keeps no positions "
                "for tokens that may be dropped; omit the flag [speculative-unfit]"
            )
        if model.mtp.rotary is not None:
            model.mtp.rotary.tokens = length
        assert model.embedding is not None, "a whole model"
        self._width = model.embedding.word_embeddings.weight.shape[-1]
        self._step = None  # a graph has one token of each row
        self._first = [0] * rows
        self._states = [self._empty(0)] * rows

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, self._width, dtype=self._dtype, device=self._device)

    def _hidden(self, ids: torch.Tensor, cached: CachedTokens) -> torch.Tensor:
        states = super()._hidden(ids, cached)
        assert cached.starts is not None
        for i, start in enumerate(cached.starts):
            row = cached.rows.start + i
            earlier = self._states[row][: max(0, start - self._first[row])]
            if not len(earlier):
                self._first[row] = start
            self._states[row] = torch.cat((earlier, states[: cached.lengths[i], i]))
        return states

    @torch.inference_mode()
    def verify(self, tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> torch.Tensor:
        """As `forward` of lists of equal length, but logits [b, s, vocab] after every token."""
        ids, cached = self._placed(tokens, starts, 0, len(tokens[0]))
        return self._vocabulary(self._hidden(ids, cached)).transpose(0, 1)

    @torch.inference_mode()
    def draft(
        self, sequences: Sequence[tuple[Sequence[int], int]], row: int = 0
    ) -> list[list[int]]:
        """What the heads expect after each of these sequences, of the rows from `row` on: (its
        tokens, how many of them `forward` and `verify` have computed). Of one that goes on further
        than a token behind these the result means nothing; the heads read it like the others."""
        b, count = len(sequences), len(self._layers)
        starts = self._first[row : row + b]
        counts = [cached - start for (_, cached), start in zip(sequences, starts, strict=True)]
        s = max(1, *counts)
        state = self._empty(s, b)
        known = []
        for i, ((tokens, _), start) in enumerate(zip(sequences, starts, strict=True)):
            state[: counts[i], i] = self._states[row + i][: counts[i]]
            of_row = tokens[start + 1 : start + 1 + s + count]
            known.append([*of_row, *[0] * (s + count - len(of_row))])
        ids = torch.tensor(known, device=self._device)
        at_end = torch.tensor([len(t) == n + 1 for t, n in sequences], device=self._device)
        ends = torch.tensor(counts, device=self._device)
        rows = torch.arange(b, device=self._device)
        positions = torch.tensor(starts, device=self._device).unsqueeze(1)
        positions = positions + torch.arange(s, device=self._device)
        positions.clamp_(max=self.length - 1)  # of padding
        cached = CachedTokens(row, self.length, starts, positions, max(starts) + s)
        for cache in self._of_heads:
            cache.tokens = cached
        assert self.model.mtp is not None and self.model.embedding is not None
        rotary = self.model.mtp.rotary
        inputs = LayerInputs(None if rotary is None else rotary(s, positions))
        for depth, layer in enumerate(self._layers):
            embed = partial(self.model.embedding, ids[:, depth : depth + s], positions)
            state = layer(state, embed, inputs)
            last = state[(ends - 1).clamp(min=0), rows].unsqueeze(0)
            likeliest = self._vocabulary(last)[0].argmax(-1)
            place = rows, ends + depth
            ids[place] = torch.where(at_end, likeliest, ids[place])
        for i, (tokens, end) in enumerate(sequences):
            final = max(starts[i], min(end, len(tokens) - count))
            self._states[row + i] = self._states[row + i][final - starts[i] :]
            self._first[row + i] = final
        return [each[n : n + count] for each, n in zip(ids.tolist(), counts, strict=True)]

    def move(self, source: int, target: int, length: int) -> None:
        """As of CachedModel; the waiting hidden states, too."""
        super().move(source, target, length)
        self._first[target] = self._first[source]
        self._states[target] = self._states[source]
