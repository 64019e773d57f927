"""Exact causal attention over the context-parallel ranks, each of which holds two chunks of every
sequence.

Queries stay; keys and values are passed from rank to rank in parts (Liu et al. 2023, "Ring
Attention") or gathered, and the results are combined by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.block_attention import Block
from megatron.kernels.cpu.blocking import wide_dtype
from megatron.parallel.attention_blocks import block_attention, block_attention_grads, join_
from megatron.parallel.collectives import start_all_gather, start_reduce_scatter, start_shift
from megatron.parallel.context import Axis
from megatron.parallel.zigzag import (
    PARTS,
    Tile,
    chunks_of,
    part_rows,
    tiles,
    tiles_in_window,
)

SEED_STEP = 0xD1B54A32D192ED03  # between the dropout streams of two tiles

# (source rank, part, keys, values)
Work = Callable[[int, int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of attention, apart from its tensors."""

    spec: AttentionSpec
    cp: Axis
    document_ids: torch.Tensor | None
    dropout_seed: int
    comm_type: str


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    document_ids: torch.Tensor | None = None,
    dropout_seed: int | torch.Tensor | None = None,
    *,
    cp: Axis,
    comm_type: str = "p2p",
) -> torch.Tensor:
    """`megatron.kernels.attention.attention` of sequences whose positions are distributed zigzag
    over the ranks of `cp`.

    q [s/cp, b, n, d], k and v [s/cp, b, g, d], n a multiple of g -> [s/cp, b, n, d]. `document_ids`
    [b, s], whole, on every rank: a position sees only its own document. Dropout of the
    probabilities is a pure function of `dropout_seed` (another one on each rank), the shapes and
    the place in the sequence. `comm_type` "p2p" sends K and V round in parts, each on its way while
    the one before is computed with: a rank never holds more than 2/cp of them. "all_gather" holds
    all. Raises ValueError where no implementation of a block supports the spec.
    """
    # An integer of any size from here on: what is added to it would not fit int64.
    seed = int(dropout_seed or 0)
    call = _Call(spec, cp, document_ids, seed, comm_type)
    return _RingAttention.apply(q, k, v, call)


class _RingAttention(torch.autograd.Function):
    """Keeps this rank's q, k, v, result and `lse`; backward passes K and V round again."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=wide_dtype(q))
        lse = q.new_empty(q.shape[:3], dtype=out.dtype)

        def work(source: int, part: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            for tile, block in _blocks(call, len(q) // 2, source, part):
                rows, row_sums = block_attention(
                    q[tile.queries], keys[tile.keys], values[tile.keys], block
                )
                # Own keys come first, on the diagonal: each row has then seen a key, and its
                # lse is finite for `join_`.
                if tile.causal:
                    out[tile.queries], lse[tile.queries] = rows, row_sums
                else:
                    join_(out[tile.queries], lse[tile.queries], rows, row_sums)

        _visit(k, v, call, work)
        ctx.call = call
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple:
        call: _Call = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        # With lse and delta over ALL keys the gradients of a block need no other block: those of
        # the blocks are summed, and nothing is merged by lse a second time.
        delta = (out.to(lse.dtype) * grad_out).sum(-1)
        grad_q = torch.zeros_like(out, dtype=lse.dtype)
        grads_of = _GatheredGrads if call.comm_type == "all_gather" else _TravellingGrads
        kv_grads = grads_of(k, call.cp)

        def work(source: int, part: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            grads = torch.zeros((2, *keys.shape), dtype=lse.dtype, device=k.device)
            for tile, block in _blocks(call, len(q) // 2, source, part):
                rows = tile.queries
                block_grads = block_attention_grads(
                    (q[rows], keys[tile.keys], values[tile.keys]),
                    grad_out[rows],
                    out[rows],
                    lse[rows],
                    delta[rows],
                    block,
                )
                totals = (grad_q[rows], grads[0, tile.keys], grads[1, tile.keys])
                for total, grad in zip(totals, block_grads, strict=True):
                    total.add_(grad)
            kv_grads.send(source, part, grads)

        _visit(k, v, call, work)
        grad_k, grad_v = kv_grads.total().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _blocks(call: _Call, chunk: int, source: int, part: int) -> list[tuple[Tile, Block]]:
    """What this rank computes with a part of the keys of `source`."""
    cp = call.cp
    ids = call.document_ids
    place = (cp.rank, source, chunk, part)
    window = call.spec.window
    seen = tiles(*place) if window is None else tiles_in_window(*place, cp.size, window)
    blocks = []
    for i, tile in enumerate(seen):
        query_ids = key_ids = None
        if ids is not None:
            source_ids = chunks_of(ids, source, cp.size)
            if source != cp.rank:
                source_ids = torch.cat([source_ids[:, rows] for rows in part_rows(chunk, part)], 1)
            query_ids = chunks_of(ids, cp.rank, cp.size)[:, tile.queries]
            key_ids = source_ids[:, tile.keys]
        seed = (call.dropout_seed + SEED_STEP * ((source * 2 + part) * 2 + i)) % 2**63
        block = Block(call.spec, tile.causal, query_ids, key_ids, seed, tile.distance)
        blocks.append((tile, block))
    return blocks


def _visit(k: torch.Tensor, v: torch.Tensor, call: _Call, work: Work) -> None:
    """`work` with this rank's own keys and values, whole, and with each part of those of the
    others."""
    visit = _visit_all if call.comm_type == "all_gather" else _visit_ring
    visit(k, v, call.cp, work)


def _visit_all(k: torch.Tensor, v: torch.Tensor, cp: Axis, work: Work) -> None:
    arriving = start_all_gather(torch.stack((k, v)).unsqueeze(0), cp)
    for part in PARTS:
        work(cp.rank, part, k, v)
    everything = arriving()
    for source in range(cp.size):
        if source != cp.rank:
            for part in PARTS:
                keys, values = everything[source]
                work(source, part, *_pack(keys, values, part))


def _visit_ring(k: torch.Tensor, v: torch.Tensor, cp: Axis, work: Work) -> None:
    """Part by part once round the ring: what comes next is on its way while `work` runs. No name
    outlives its turn here, so that in addition to k and v never more than two parts are alive."""
    for part in PARTS:
        travelling = _pack(k, v, part)
        for hop in range(cp.size):
            arriving = start_shift(travelling, cp) if hop < cp.size - 1 else None
            # before the first hop they are this rank's own, of which `work` takes the whole
            keys, values = travelling if hop else (k, v)
            work((cp.rank - hop) % cp.size, part, keys, values)
            del keys, values
            if arriving is None:
                del travelling
            else:
                travelling = arriving()
            del arriving


def _pack(k: torch.Tensor, v: torch.Tensor, part: int) -> torch.Tensor:
    """A part of a rank's keys and values in one piece: [2, s/2cp, b, g, d]."""
    chunk = len(k) // 2
    first, second = part_rows(chunk, part)
    packed = k.new_empty((2, chunk, *k.shape[1:]))
    for target, t in zip(packed, (k, v), strict=True):
        target[: first.stop - first.start] = t[first]
        target[first.stop - first.start :] = t[second]
    return packed


def _add_part(total: torch.Tensor, grads: torch.Tensor, part: int) -> None:
    """Add the gradients of a part, [2, s/2cp, b, g, d], to those of a rank's keys and values, [2,
    s/cp, b, g, d]."""
    first, second = part_rows(total.shape[1] // 2, part)
    total[:, first] += grads[:, : first.stop - first.start]
    total[:, second] += grads[:, first.stop - first.start :]


class _TravellingGrads:
    """Gradients of keys and values follow them round the ring one rank behind; each rank adds its
    own, until they are back.

    One hop behind, because a rank can add to the sum it receives only when it has computed its own
    summand. So the sum of a part arrives at its owner one hop after its keys have gone round: it is
    taken in when the next part begins, or at the end."""

    def __init__(self, k: torch.Tensor, cp: Axis):
        self.cp = cp
        self.local_grads = torch.zeros((2, *k.shape), dtype=wide_dtype(k), device=k.device)
        self.arriving: Callable[[], torch.Tensor] | None = None
        self.part = 0

    def send(self, source: int, part: int, grads: torch.Tensor) -> None:
        """Take this rank's gradients of a part, [2, s/2cp, b, g, d] (of its own keys, whole), in
        the order of the ring."""
        if source == self.cp.rank:
            self._bring_home()
            self.local_grads += grads
        else:
            if self.arriving is not None:
                grads += self.arriving()
            self.arriving = start_shift(grads, self.cp)
            self.part = part

    def _bring_home(self) -> None:
        if self.arriving is not None:
            _add_part(self.local_grads, self.arriving(), self.part)
            self.arriving = None

    def total(self) -> torch.Tensor:
        """[2, s/cp, b, g, d]: the gradients of this rank's keys and of its values."""
        self._bring_home()
        return self.local_grads


class _GatheredGrads:
    """Gradients of all keys and values, summed over the ranks at the end."""

    def __init__(self, k: torch.Tensor, cp: Axis):
        self.cp = cp
        self.all = torch.zeros((cp.size, 2, *k.shape), dtype=wide_dtype(k), device=k.device)

    def send(self, source: int, part: int, grads: torch.Tensor) -> None:
        """Take this rank's gradients of a part."""
        if source == self.cp.rank:
            self.all[source] += grads
        else:
            _add_part(self.all[source], grads, part)

    def total(self) -> torch.Tensor:
        """[2, s/cp, b, g, d]: the gradients of this rank's keys and of its values."""
        return start_reduce_scatter(self.all, self.cp)().squeeze(0)
