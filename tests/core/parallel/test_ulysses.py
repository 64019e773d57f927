"""Attention by heads over context-parallel ranks against one process in fp64: values and gradients of
what each kernel takes, of two levels, and of shared keys."""

import functools

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.kernels.attention import attention
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.parallel.collectives import my_slice
from megatron.parallel.context import ParallelContext
from megatron.parallel.recompute import recompute
from megatron.parallel.ring_attention import ring_attention
from megatron.parallel.ulysses import by_heads, by_positions
from megatron.parallel.zigzag import chunks_of
from tests.core.kernels.attention_formula import SCALE, documents, formula, inputs
from tests.forkrun import run_ranks

CLOSE = dict(rtol=1e-11, atol=1e-11)
SINKS = torch.tensor([5.0, -5.0, 0.0, 1.3, 2.0, -1.0, 0.4, 3.0], dtype=torch.float64)
HEADS = len(SINKS)
# a kernel of whole sequences for each
FEATURES = {
    "plain": {},
    "window": {"window": 9},
    "documents": {"documents": True},
    "sinks, caps, a window inside documents": {
        **{"documents": True, "window": 11, "softcap": 0.7, "sink": True}
    },
}


@functools.cache
def context(rank, world, *sizes):
    config = ParallelConfig(
        context_parallel_size=world, hierarchical_context_parallel_sizes=sizes or None
    )
    return ParallelContext(config, world, rank)


def case(s, groups, features):
    """q, k, v of 11 channels, a gradient of as many, document ids, sinks."""
    q, k, v, grad = inputs(s, 2, HEADS, groups, 8)
    v, grad = (torch.cat((t, 2 * t), -1)[..., :11].detach() for t in (v, grad))
    ids = documents(s) if features.get("documents") else None
    sinks = SINKS.clone().requires_grad_() if features.get("sink") else None
    return [q, k, v.requires_grad_()], grad, ids, sinks


def attend(rank, world, s, groups, features, *sizes):
    """(out, gradients of q, k, v and sinks) of this rank's chunks."""
    ctx = context(rank, world, *sizes)
    exchanging, ring = ctx.attention_axes("a2a+p2p" if sizes else "a2a")
    tensors, grad, ids, sinks = case(s, groups, features)
    *tensors, grad = (chunks_of(t.detach(), rank, world, 0) for t in (*tensors, grad))
    leaves = [t.requires_grad_() for t in tensors]
    q, k, v = by_heads(*leaves, exchanging)
    spec = AttentionSpec.of(q, k, v, SCALE, **features)
    call = AttentionCall(spec, ids, None, None if sinks is None else my_slice(sinks, exchanging))
    whole = ring_attention(q, k, v, call, cp=ring) if ring.size > 1 else attention(q, k, v, call)
    out = by_positions(whole, exchanging)
    leaves += [sinks] * (sinks is not None)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


P = 0.25


def dropped(rank, world, again):
    """(out of a one-hot V, out and gradients of q, k and v), with a seed of each rank."""
    exchanging, _ = context(rank, world).attention_axes("a2a")
    q, k, v, grad = inputs(32, 1, 4, 2, 32)
    eye = torch.eye(32, dtype=torch.float64)[:, None, None].expand(-1, 1, 2, -1)
    q, k, v, eye, grad = (chunks_of(t.detach(), rank, world, 0) for t in (q, k, v, eye, grad))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def core(q, k, v):
        spec = AttentionSpec.of(q, k, v, SCALE, dropout=P)
        return attention(q, k, v, AttentionCall(spec, dropout_seed=100 + rank))

    outs = []
    for values in (eye, v):
        whole = by_heads(q, k, values, exchanging)
        outs.append(by_positions(recompute(core, *whole) if again else core(*whole), exchanging))
    return *(out.detach() for out in outs), *torch.autograd.grad(outs[1], leaves, grad)


@pytest.mark.campaign
def test_dropout():
    """Each probability is kept or not, by a mask that repeats in backward and in recompute and is
    another for each head."""
    results = run_ranks(2, dropped, False)
    for rank, repeated in enumerate(run_ranks(2, dropped, True)):
        assert all(torch.equal(a, b) for a, b in zip(results[rank], repeated, strict=True))

    def whole(parts):
        (first, last), (second, third) = (part.chunk(2) for part in parts)
        return torch.cat((first, second, third, last))

    shown, *rest = (whole(parts) for parts in zip(*results, strict=True))
    q, k, v, grad = inputs(32, 1, 4, 2, 32)
    eye = torch.eye(32, dtype=torch.float64)[:, None, None].expand(-1, 1, 2, -1)
    plain = formula(q, k, eye).detach()
    factors = torch.where(plain > 0, shown / plain, 0.0).permute(1, 2, 0, 3)
    seen = (plain > 0).permute(1, 2, 0, 3)
    assert set(factors[seen].round(decimals=9).unique().tolist()) == {0.0, round(1 / (1 - P), 9)}
    assert len({tuple(mask.flatten().tolist()) for mask in factors[0] > 0}) == 4
    out = formula(q, k, v, factors=factors)
    exact = (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))
    for got, wanted in zip(rest, exact, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


def ranks_attend(rank, world, jobs):
    return [attend(rank, world, *job) for job in jobs]


def assert_one_process(world, jobs):
    results = run_ranks(world, ranks_attend, jobs)
    for i, (s, groups, features, *_) in enumerate(jobs):
        tensors, grad, ids, sinks = case(s, groups, features)
        more = (features.get("window"), features.get("softcap"), sinks)
        out = formula(*tensors, ids, None, *more)
        leaves = tensors + [sinks] * (sinks is not None)
        exact = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        parts = [list(found) for found in zip(*(result[i] for result in results), strict=True)]
        if sinks is not None:  # of each rank those of its heads
            torch.testing.assert_close(sum(parts.pop()), exact.pop(), **CLOSE)
        for got, wanted in zip(parts, exact, strict=True):
            for rank, part in enumerate(got):
                torch.testing.assert_close(part, chunks_of(wanted, rank, world, 0), **CLOSE)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_values_and_gradients_of_one_process(world):
    """As many key heads as ranks or more, and fewer, which ranks share."""
    assert_one_process(
        world,
        [
            (10 * world, groups, features)
            for groups in (1, 2, HEADS)
            for features in FEATURES.values()
        ],
    )


@pytest.mark.parametrize(
    "sizes", [(2, 2), *(pytest.param(s, marks=pytest.mark.campaign) for s in ((4, 2), (2, 3)))]
)
def test_two_levels(sizes):
    """Ranks that have exchanged heads are a rank of a ring with chunks as many times as long."""
    world = sizes[0] * sizes[1]
    assert_one_process(
        world,
        [
            (12 * world, groups, features, *sizes)
            for groups in (1, 4)
            for features in FEATURES.values()
        ],
    )
