"""The model with a cache of keys and values: each token is computed once, and logits are computed
of the last position only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.inference.linear import hidden_dtype, replace_linear_layers
from megatron.model.blocks.cache import Cache, CachedTokens
from megatron.model.blocks.module import LayerInputs
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_gather


class CachedModel:
    """A model with preallocated keys and values of `rows` sequences of up to `length` tokens.

    Takes the model over: its blocks read their caches and its linear layers have no backward, so
    that it cannot be called or trained any more. It computes in the dtype and on the device of the
    model; with tensor parallelism every rank calls it alike. The caches have rows x length x what
    each block says of a position (`Block.cache`), all memory from the start.
    """

    def __init__(self, model: GPTModel, rows: int, length: int):
        self.model = model
        self.rows = rows
        self.length = length
        self._device = next(model.parameters()).device
        dtype = hidden_dtype(model)
        self._caches: list[Cache] = []
        for layer in model.decoder.layers.values():
            for block in layer.blocks():
                block.cache = block.new_cache(rows, length, dtype)
                if block.cache is not None:
                    self._caches.append(block.cache)
        replace_linear_layers(model)

    @torch.inference_mode()
    def forward(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], row: int = 0
    ) -> torch.Tensor:
        """Logits [b, vocab] after the last of each list of tokens.

        The i-th list has the tokens of sequence `row` + i from position starts[i] on; the keys and
        values of the positions before are in the cache. Lists may be of unequal length.
        """
        lengths = [len(each) for each in tokens]
        s = max(lengths)
        ids = torch.tensor(
            [[*each, *[0] * (s - len(each))] for each in tokens], device=self._device
        )
        offsets = torch.arange(s, device=self._device)
        positions = torch.tensor(starts, device=self._device).unsqueeze(1) + offsets
        if min(lengths) < s:  # padding must not be written behind the end of the cache
            positions.clamp_(max=self.length - 1)
        cached = CachedTokens(row, self.length, starts, positions, max(starts) + s)
        for cache in self._caches:
            cache.tokens = cached
        model = self.model
        assert model.embedding is not None and model.output_layer is not None, "a whole model"
        x = model.embedding(ids, positions)
        x = model.decoder(x, LayerInputs(), s, positions)
        if s == 1:
            last = x
        else:
            ends = torch.tensor(lengths, device=self._device) - 1
            last = x[ends, torch.arange(len(tokens), device=self._device)].unsqueeze(0)
        logits = all_gather(model.output_layer(last), model.ctx.tp, dim=-1)
        return logits[0, :, : model.vocab_size]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of the sequence `source` to the sequence `target`."""
        for cache in self._caches:
            cache.move(source, target, length)
