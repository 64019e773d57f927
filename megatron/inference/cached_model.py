"""The model with a cache of keys and values: each token is computed once, and logits are computed
of the last position only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron.inference.linear import hidden_dtype, replace_linear_layers
from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.implementation import lacking
from megatron.model.gpt import GPTModel
from megatron.model.layer import LayerInputs
from megatron.parallel.collectives import all_gather


class CachedModel:
    """A model with preallocated keys and values of `rows` sequences of up to `length` tokens.

    Takes the model over: its attention reads the cache and its linear layers have no backward, so
    that it cannot be called or trained any more. It computes in the dtype and on the device of the
    model; with tensor parallelism every rank calls it alike. The cache has 2 x layers x rows x
    length x key/value heads of this rank x head width elements.
    """

    def __init__(self, model: GPTModel, rows: int, length: int):
        attentions = [layer.self_attention for layer in model.decoder.layers.values()]
        dtype, device = hidden_dtype(model), next(model.parameters()).device
        shape = (len(attentions), rows, length, attentions[0].groups, attentions[0].head_dim)
        self.model = model
        self.rows = rows
        self.length = length
        self._keys = _zeros(shape, dtype, device)
        self._values = _zeros(shape, dtype, device)
        self._device = device
        self._attentions = [
            _CachedAttention(keys, values, attention.spec(keys))
            for keys, values, attention in zip(self._keys, self._values, attentions, strict=True)
        ]
        for attention, cached in zip(attentions, self._attentions, strict=True):
            attention.attend = cached
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
        view = _View(row, self.length, starts, positions, max(starts) + s)
        for attention in self._attentions:
            attention.view = view
        model = self.model
        assert model.embedding is not None and model.output_layer is not None, "a whole model"
        x = model.embedding(ids, positions)
        rotary = None if model.rotary is None else model.rotary(s, positions)
        x = model.decoder(x, LayerInputs(rotary))
        if s == 1:
            last = x
        else:
            ends = torch.tensor(lengths, device=self._device) - 1
            last = x[ends, torch.arange(len(tokens), device=self._device)].unsqueeze(0)
        logits = all_gather(model.output_layer(last), model.ctx.tp, dim=-1)
        return logits[0, :, : model.vocab_size]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of the sequence `source` to the sequence `target`."""
        for cache in (self._keys, self._values):
            cache[:, target, :length] = cache[:, source, :length]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because what is masked must be finite; on a CPU they take no memory before they are
    written, so that a long context costs nothing until it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


class _View:
    """Where the tokens of one call are in the cache and which positions they see; the same for
    every layer.

    places [b * s]: rows of the cache as a list of positions. mask [b, 1, s, end]: what is added to
    the scores, None where every token sees all of `end` positions, or with `causal` those up to
    itself.
    """

    def __init__(
        self,
        row: int,
        length: int,
        starts: Sequence[int],
        positions: torch.Tensor,
        end: int,
    ):
        b, s = positions.shape
        device = positions.device
        self.rows = slice(row, row + b)
        self.end = min(end, length)
        self.causal = max(starts) == 0 and s > 1
        rows = torch.arange(row, row + b, device=device).unsqueeze(1)
        self.slots = (rows * length + positions).flatten()
        self.visible = None
        if not self.causal and (s > 1 or min(starts) != max(starts)):
            ids = torch.arange(self.end, device=device)
            self.visible = (ids <= positions.unsqueeze(-1)).unsqueeze(1)


class _CachedAttention:
    """In place of SelfAttention.attend: stores keys and values and attends to all that are
    stored."""

    view: _View  # of the call in progress

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec):
        if why_not := lacking(spec, frozenset()):
            raise ValueError(f"attention to cached keys {why_not}")
        self._keys = keys
        self._values = values
        self._key_slots = keys.flatten(0, 1)
        self._value_slots = values.flatten(0, 1)
        self._scale = spec.scale
        self._per_group = spec.heads // spec.groups

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        """q [s, b, n, d], k and v [s, b, g, d] of the tokens of this call -> [s, b, n, d]."""
        s, b, n, d = q.shape
        view = self.view
        self._key_slots.index_copy_(0, view.slots, k.transpose(0, 1).flatten(0, 1))
        self._value_slots.index_copy_(0, view.slots, v.transpose(0, 1).flatten(0, 1))
        k = self._keys[view.rows, : view.end].transpose(1, 2)
        v = self._values[view.rows, : view.end].transpose(1, 2)
        if s == 1:  # the query heads of a group as that many positions: nothing is repeated
            q = q.view(b, -1, self._per_group, d)
        else:
            q = q.permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            view.visible,
            is_causal=view.causal,
            scale=self._scale,
            enable_gqa=s > 1 and self._per_group > 1,
        )
        return y.reshape(1, b, n, d) if s == 1 else y.permute(2, 0, 1, 3)
