"""Exact causal attention over the context-parallel ranks, each of which holds two chunks of every
sequence.

Queries stay; keys and values are passed from rank to rank in parts (Liu et al. 2023, "Ring
Attention") or gathered, and the results are combined by their log-sum-exp. Inside a window each
rank gets from each other one, directly, the rows that its queries see.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.plan.window_rows import rows_seen, steps
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.block_attention import KeyBlock, block_maxima
from megatron.kernels.cpu.blocking import wide_dtype
from megatron.kernels.sinks import sink_grads, with_sinks
from megatron.parallel.attention_blocks import block_attention, block_attention_grads, join_
from megatron.parallel.collectives import start_all_gather, start_reduce_scatter
from megatron.parallel.context import Axis
from megatron.parallel.exchange import start_exchange, start_shift
from megatron.parallel.zigzag import (
    PARTS,
    Tile,
    chunks_of,
    part_rows,
    tiles,
    tiles_in_window,
)

SEED_STEP = 0xD1B54A32D192ED03  # between the dropout streams of two tiles

# (source rank, part, keys, values); in a window everything is part 0
Work = Callable[[int, int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of attention, apart from tensors with gradients."""

    spec: AttentionSpec
    cp: Axis
    document_ids: torch.Tensor | None
    dropout_seed: int
    comm_type: str

    def rows(self, chunk: int, rank: int, source: int, part: int) -> Sequence[slice]:
        """Which of the 2 x `chunk` keys of another rank `rank` gets as a part."""
        window = self.spec.window
        if window is None:
            return part_rows(chunk, part)
        return [slice(*run) for run in rows_seen(rank, source, self.cp.size, chunk, window)]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: AttentionCall,
    *,
    cp: Axis,
    comm_type: str = "p2p",
) -> torch.Tensor:
    """`megatron.kernels.attention.attention` of sequences whose positions are distributed zigzag
    over the ranks of `cp`.

    q [s/cp, b, n, d], k and v [s/cp, b, g, d], n a multiple of g -> [s/cp, b, n, d]. The document
    ids [b, s] are whole, on every rank. Dropout of the probabilities is a pure function of the seed
    (another one on each rank), the shapes and the place in the sequence. Gradients of the sinks are
    of this rank's queries. `comm_type` "p2p" sends K and V round in parts, each on its way while
    the one before is computed with: a rank never holds more than 2/cp of them. With a window it
    gets the rows that its queries see, from one other rank after another. "all_gather" holds all.
    Raises ValueError where no implementation of a block supports the spec.
    """
    # An integer of any size from here on: what is added to it would not fit int64.
    seed = int(call.dropout_seed or 0)
    whole = _Call(call.spec, cp, call.document_ids, seed, comm_type)
    return _RingAttention.apply(q, k, v, call.sinks, whole)


def ring_maxima(
    q: torch.Tensor,
    k: torch.Tensor,
    spec: AttentionSpec,
    document_ids: torch.Tensor | None,
    *,
    cp: Axis,
    comm_type: str = "p2p",
) -> torch.Tensor:
    """The largest score of each head [n] of this rank's queries, arguments as of
    `ring_attention`: keys go round once more, without values."""
    call = _Call(spec, cp, document_ids, 0, comm_type)
    largest = []

    def work(source: int, part: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for tile, block in _blocks(call, len(q) // 2, source, part):
            largest.append(block_maxima(q[tile.queries], keys[tile.keys], block))

    _visit(k, k[..., :0], call, work)
    return torch.stack(largest).amax(0)


class _RingAttention(torch.autograd.Function):
    """Keeps this rank's q, k, v, result and `lse`; backward passes K and V round again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        call: _Call,
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
        if sinks is not None:  # once: in each block they would count as often as there are blocks
            out, lse = with_sinks(out, lse, sinks)
        ctx.call = call
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple:
        call: _Call = ctx.call
        q, k, v, sinks, out, lse = ctx.saved_tensors
        # With lse and delta over ALL keys the gradients of a block need no other block: those of
        # the blocks are summed, and nothing is merged by lse a second time.
        delta = (out.to(lse.dtype) * grad_out).sum(-1)
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        kv_grads = _grads_of(k, v, call)

        def work(source: int, part: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            width = keys.shape[-1] + values.shape[-1]
            grads = torch.zeros((*keys.shape[:-1], width), dtype=lse.dtype, device=k.device)
            key_grads, value_grads = _parts(grads, k)
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
                totals = (grad_q[rows], key_grads[tile.keys], value_grads[tile.keys])
                for total, grad in zip(totals, block_grads, strict=True):
                    total.add_(grad)
            kv_grads.send(source, part, grads)

        _visit(k, v, call, work)
        grad_k, grad_v = (t.to(k.dtype).contiguous() for t in _parts(kv_grads.total(), k))
        grad_sinks = None if sinks is None else sink_grads(out, lse, grad_out, sinks)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None


def _blocks(call: _Call, chunk: int, source: int, part: int) -> list[tuple[Tile, KeyBlock]]:
    """What this rank computes with a part of the keys of `source`."""
    cp = call.cp
    ids = call.document_ids
    window = call.spec.window
    seen = (
        tiles(cp.rank, source, chunk, part)
        if window is None
        else tiles_in_window(cp.rank, source, cp.size, chunk, window)
    )
    blocks = []
    for i, tile in enumerate(seen):
        query_ids = key_ids = None
        if ids is not None:
            source_ids = chunks_of(ids, source, cp.size)
            if source != cp.rank:
                runs = call.rows(chunk, cp.rank, source, part)
                source_ids = torch.cat([source_ids[:, run] for run in runs], 1)
            query_ids = chunks_of(ids, cp.rank, cp.size)[:, tile.queries]
            key_ids = source_ids[:, tile.keys]
        seed = (call.dropout_seed + SEED_STEP * ((source * 2 + part) * 2 + i)) % 2**63
        block = KeyBlock(call.spec, tile.causal, query_ids, key_ids, seed, tile.distance)
        blocks.append((tile, block))
    return blocks


def _visit(k: torch.Tensor, v: torch.Tensor, call: _Call, work: Work) -> None:
    """`work` with this rank's own keys and values, whole, and with each part of those of the
    others."""
    if call.comm_type == "all_gather":
        _visit_all(k, v, call, work)
    elif call.spec.window is None:
        _visit_ring(k, v, call.cp, work)
    else:
        _visit_window(k, v, call, work)


def _visit_all(k: torch.Tensor, v: torch.Tensor, call: _Call, work: Work) -> None:
    cp = call.cp
    parts = PARTS if call.spec.window is None else PARTS[:1]
    arriving = start_all_gather(torch.cat((k, v), -1).unsqueeze(0), cp)
    for part in parts:
        work(cp.rank, part, k, v)
    everything = arriving()
    for source in range(cp.size):
        if source != cp.rank:
            for part in parts:
                keys, values = _parts(everything[source], k)
                runs = call.rows(len(k) // 2, cp.rank, source, part)
                work(source, part, *_parts(_pack(keys, values, runs), k))


def _visit_ring(k: torch.Tensor, v: torch.Tensor, cp: Axis, work: Work) -> None:
    """Part by part once round the ring: what comes next is on its way while `work` runs. No name
    outlives its turn here, so that in addition to k and v never more than two parts are alive."""
    for part in PARTS:
        travelling = _pack(k, v, part_rows(len(k) // 2, part))
        for hop in range(cp.size):
            # Sent before it is worked on: the next part is there when this one is done.
            arriving = start_shift(travelling, cp) if hop < cp.size - 1 else None
            # before the first hop they are this rank's own, of which `work` takes the whole
            keys, values = _parts(travelling, k) if hop else (k, v)
            work((cp.rank - hop) % cp.size, part, keys, values)
            del keys, values
            if arriving is None:
                del travelling
            else:
                travelling = arriving()
            del arriving


def _visit_window(k: torch.Tensor, v: torch.Tensor, call: _Call, work: Work) -> None:
    """From one other rank after another the rows that this one sees, perhaps none; the next are on
    their way while `work` runs."""
    cp = call.cp
    chunk = len(k) // 2

    def start(step: int) -> Callable[[], torch.Tensor]:
        after, before = (cp.rank + step) % cp.size, (cp.rank - step) % cp.size
        packed = _pack(k, v, call.rows(chunk, after, cp.rank, 0))
        count = _count(call.rows(chunk, cp.rank, before, 0))
        return start_exchange(packed, packed.new_empty((count, *packed.shape[1:])), cp, step)

    assert call.spec.window is not None
    later = list(steps(cp.size, chunk, call.spec.window))
    arriving = start(later[0]) if later else None
    work(cp.rank, 0, k, v)
    while arriving is not None:
        arrived = arriving()
        source = (cp.rank - later.pop(0)) % cp.size
        arriving = start(later[0]) if later else None
        work(source, 0, *_parts(arrived, k))


def _parts(both: torch.Tensor, k: torch.Tensor) -> Sequence[torch.Tensor]:
    """Keys, as wide as `k`, and values of [..., dk + dv], or their gradients."""
    width = k.shape[-1]
    return both.split((width, both.shape[-1] - width), -1)


def _count(runs: Sequence[slice]) -> int:
    return sum(run.stop - run.start for run in runs)


def _pack(k: torch.Tensor, v: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    """Rows of a rank's keys and values in one piece: [rows, b, g, dk + dv]."""
    packed = k.new_empty((_count(runs), *k.shape[1:-1], k.shape[-1] + v.shape[-1]))
    for target, t in zip(_parts(packed, k), (k, v), strict=True):
        first = 0
        for run in runs:
            rows = t[run]
            target[first : first + len(rows)] = rows
            first += len(rows)
    return packed


class _Grads:
    """The gradients of a rank's keys and values, [s/cp, b, g, dk + dv], to which others add theirs
    of some rows."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, call: _Call, ranks: int = 1):
        shape = (ranks, *k.shape[:-1], k.shape[-1] + v.shape[-1])
        self.call = call
        self.cp = call.cp
        self.chunk = len(k) // 2
        self.totals = torch.zeros(shape, dtype=wide_dtype(k), device=k.device)
        self.arriving: Callable[[], torch.Tensor] | None = None
        self.runs: Sequence[slice] = ()  # of what arrives

    def bring_home(self) -> None:
        """Add what has been sent to this rank."""
        if self.arriving is not None:
            _add_rows(self.totals[0], self.arriving(), self.runs)
            self.arriving = None

    def total(self) -> torch.Tensor:
        """[s/cp, b, g, dk + dv]: the gradients of this rank's keys and of its values."""
        self.bring_home()
        return self.totals[0]


def _add_rows(total: torch.Tensor, grads: torch.Tensor, runs: Sequence[slice]) -> None:
    """Add gradients of some rows to those of all."""
    first = 0
    for run in runs:
        rows = total[run]
        rows += grads[first : first + len(rows)]
        first += len(rows)


class _TravellingGrads(_Grads):
    """Gradients of keys and values follow them round the ring one rank behind; each rank adds its
    own, until they are back.

    One hop behind, because a rank can add to the sum it receives only when it has computed its own
    summand. So the sum of a part arrives at its owner one hop after its keys have gone round: it is
    taken in when the next part begins, or at the end."""

    def send(self, source: int, part: int, grads: torch.Tensor) -> None:
        """Take this rank's gradients of a part, [s/2cp, b, g, dk + dv] (of its own keys, whole), in
        the order of the ring."""
        if source == self.cp.rank:
            self.bring_home()
            self.totals[0] += grads
        else:
            # The sum so far has come from the rank before; with ours it goes to the next.
            if self.arriving is not None:
                grads += self.arriving()
            self.arriving = start_shift(grads, self.cp)
            self.runs = part_rows(self.chunk, part)


class _ReturnedGrads(_Grads):
    """Inside a window gradients of the rows of another rank go straight back to it."""

    def send(self, source: int, part: int, grads: torch.Tensor) -> None:
        """Take this rank's gradients of what it has got of `source`, perhaps of nothing."""
        if source == self.cp.rank:
            self.totals[0] += grads
            return
        self.bring_home()
        step = self.cp.rank - source
        self.runs = self.call.rows(
            self.chunk, (self.cp.rank + step) % self.cp.size, self.cp.rank, part
        )
        out = grads.new_empty((_count(self.runs), *grads.shape[1:]))
        self.arriving = start_exchange(grads, out, self.cp, -step)


class _GatheredGrads(_Grads):
    """Gradients of all keys and values, summed over the ranks at the end."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, call: _Call):
        super().__init__(k, v, call, call.cp.size)

    def send(self, source: int, part: int, grads: torch.Tensor) -> None:
        """Take this rank's gradients of a part."""
        if source == self.cp.rank:
            self.totals[source] += grads
        else:
            runs = self.call.rows(self.chunk, self.cp.rank, source, part)
            _add_rows(self.totals[source], grads, runs)

    def total(self) -> torch.Tensor:
        """As of _Grads."""
        return start_reduce_scatter(self.totals, self.cp)().squeeze(0)


def _grads_of(
    k: torch.Tensor, v: torch.Tensor, call: _Call
) -> _TravellingGrads | _ReturnedGrads | _GatheredGrads:
    """Where the gradients of keys and values go."""
    if call.comm_type == "all_gather":
        return _GatheredGrads(k, v, call)
    return (_TravellingGrads if call.spec.window is None else _ReturnedGrads)(k, v, call)
