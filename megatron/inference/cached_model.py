"""The model with a cache of keys and values: each token is computed once, and logits are computed
of the last position only."""

import sys
from collections.abc import Sequence

import torch

from megatron import cuda
from megatron.inference.linear import hidden_dtype, replace_linear_layers
from megatron.inference.static_step import StaticStep, bucket
from megatron.kernels.cuda_graph import NotStatic
from megatron.model.blocks.cache import Cache, CachedTokens
from megatron.model.blocks.module import BlockModule, LayerInputs
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_gather

SHORTEST_PROMPT = 16  # tokens of a prompt that are read together where shapes are to be few


class CachedModel:
    """A model with preallocated keys and values of `rows` sequences of up to `length` tokens.

    Takes the model over: its blocks read their caches and its linear layers have no backward, so
    that it cannot be called or trained any more. It computes in the dtype and on the device of the
    model; with tensor parallelism every rank calls it alike. The caches have rows x length (or the
    window of the layer, or 2 where a state has all tokens in it) x what each block says of one
    (`Mixer.cache`), all memory from the start.
    """

    def __init__(self, model: GPTModel, rows: int, length: int):
        self.model = model
        self.rows = rows
        self.length = length
        self._device = next(model.parameters()).device
        self._dtype = hidden_dtype(model)
        layers = model.decoder.layers.values()
        self._caches = self._give_caches([block for layer in layers for block in layer.blocks()])
        for tables in model.decoder.rotary:
            tables.tokens = length
        replace_linear_layers(model)
        self._step: StaticStep | None = None
        if cuda.has_graphs(self._device) and model.ctx.tp.size == 1:
            self._step = StaticStep(self._logits, rows, length, self._device)

    def _give_caches(self, blocks: Sequence[BlockModule]) -> list[Cache]:
        """The new caches of those of the blocks that need one."""
        for block in blocks:
            block.cache = block.new_cache(self.rows, self.length, self._dtype)
        return [block.cache for block in blocks if block.cache is not None]

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches of this rank."""
        return sum(cache.nbytes for cache in self._caches)

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
        ids, cached = self._placed(tokens, starts, row, s)
        return self._logits(ids, cached, None if s == 1 else lengths)

    def _placed(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], row: int, s: int
    ) -> tuple[torch.Tensor, CachedTokens]:
        """The lists of tokens padded to [b, s], and where they are in the cache."""
        lengths = [len(each) for each in tokens]
        ids = torch.tensor(
            [[*each, *[0] * (s - len(each))] for each in tokens], device=self._device
        )
        offsets = torch.arange(s, device=self._device)
        positions = torch.tensor(starts, device=self._device).unsqueeze(1) + offsets
        if min(lengths) < s:  # padding must not be written behind the end of the cache
            positions.clamp_(max=self.length - 1)
        return ids, CachedTokens(row, self.length, starts, positions, max(starts) + s, lengths)

    def _logits(
        self, ids: torch.Tensor, cached: CachedTokens, lengths: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Logits [b, vocab] after tokens [b, s]; of the first ones of each row, where `lengths`
        says how many."""
        x = self._hidden(ids, cached)
        if lengths is not None:
            ends = torch.tensor(lengths, device=self._device) - 1
            x = x[ends, torch.arange(len(lengths), device=self._device)].unsqueeze(0)
        return self._vocabulary(x)[0]

    def _hidden(self, ids: torch.Tensor, cached: CachedTokens) -> torch.Tensor:
        """Hidden states [s, b, h] behind the last layer of tokens [b, s]."""
        for cache in self._caches:
            cache.tokens = cached
        model = self.model
        assert model.embedding is not None, "a whole model"
        x = model.embedding(ids, cached.positions)
        hidden: torch.Tensor = model.decoder(x, LayerInputs(), ids.shape[1], cached.positions)
        return hidden

    def _vocabulary(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [s, b, vocab] of hidden states, of the whole vocabulary on every rank."""
        logits = all_gather(self.model.logits(x), self.model.ctx.tp, dim=-1)
        return logits[..., : self.model.vocab_size]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of the sequence `source` to the sequence `target`."""
        for cache in self._caches:
            cache.move(source, target, length)
