"""The model with a cache of keys and values: each token is computed once, and logits are computed
of the last position only."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from megatron import device as devices
from megatron.inference.linear import hidden_dtype, replace_linear_layers
from megatron.inference.static_step import NotStatic, StaticStep, bucket
from megatron.model.blocks.cache import Cache, CachedTokens
from megatron.model.blocks.module import LayerInputs
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_gather

SHORTEST_PROMPT = 16  # tokens of a prompt that are read together where shapes are to be few


class CachedModel:
    """A model with preallocated keys and values of `rows` sequences of up to `length` tokens.

    Takes the model over: its blocks read their caches and its linear layers have no backward, so
    that it cannot be called or trained any more. It computes in the dtype and on the device of the
    model; with tensor parallelism every rank calls it alike. The caches have rows x length (or the
    window of the layer) x what each block says of a position (`Block.cache`), all memory from the
    start.
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
        self._step: StaticStep | None = None
        if devices.has_graphs(self._device) and model.ctx.tp.size == 1:
            self._step = StaticStep(self._logits, rows, length, self._device)

    @torch.inference_mode()
    def forward(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], row: int = 0
    ) -> torch.Tensor:
        """Logits [b, vocab] after the last of each list of tokens, valid until the next call.

        The i-th list has the tokens of sequence `row` + i from position starts[i] on; the keys and
        values of the positions before are in the cache. Lists may be of unequal length.
        """
        lengths = [len(each) for each in tokens]
        s = max(lengths)
        if self._step is not None and s == 1 and row == 0:
            try:
                return self._step([token for (token,) in tokens], starts)
            except NotStatic as why:
                print(f"WARNING: decoding without a CUDA graph: {why}", file=sys.stderr)
                self._step = None
        elif self._step is not None:
            s = bucket(s, SHORTEST_PROMPT, max(s, self.length - max(starts)))
        ids = torch.tensor(
            [[*each, *[0] * (s - len(each))] for each in tokens], device=self._device
        )
        offsets = torch.arange(s, device=self._device)
        positions = torch.tensor(starts, device=self._device).unsqueeze(1) + offsets
        if min(lengths) < s:  # padding must not be written behind the end of the cache
            positions.clamp_(max=self.length - 1)
        cached = CachedTokens(row, self.length, starts, positions, max(starts) + s, lengths)
        return self._logits(ids, cached, None if s == 1 else lengths)

    def _logits(
        self, ids: torch.Tensor, cached: CachedTokens, lengths: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Logits [b, vocab] after tokens [b, s]; of the first ones of each row, where `lengths`
        says how many."""
        for cache in self._caches:
            cache.tokens = cached
        model = self.model
        assert model.embedding is not None and model.output_layer is not None, "a whole model"
        x = model.embedding(ids, cached.positions)
        x = model.decoder(x, LayerInputs(), ids.shape[1], cached.positions)
        if lengths is not None:
            ends = torch.tensor(lengths, device=self._device) - 1
            x = x[ends, torch.arange(len(lengths), device=self._device)].unsqueeze(0)
        logits = all_gather(model.output_layer(x), model.ctx.tp, dim=-1)
        return logits[0, :, : model.vocab_size]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of the sequence `source` to the sequence `target`."""
        for cache in self._caches:
            cache.move(source, target, length)
