"""Attention over context-parallel ranks against one process in fp64: values, gradients, masks,
memory, work, repeats."""

import functools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.parallel import ParallelConfig
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.parallel import ring_attention as module
from megatron.parallel.context import ParallelContext
from megatron.parallel.recompute import recompute
from megatron.parallel.ring_attention import ring_attention
from megatron.parallel.zigzag import chunks_of
from tests.core.kernels.attention_formula import SCALE, documents, formula, inputs
from tests.forkrun import run_ranks

CLOSE = dict(rtol=1e-11, atol=1e-11)
COMM_TYPES = ("p2p", "all_gather")


@functools.cache
def cp_axis(rank, world):
    return ParallelContext(ParallelConfig(context_parallel_size=world), world, rank).cp


def mine(rank, world, *tensors):
    """This rank's chunks of whole tensors [s, ...], as leaves."""
    return [
        chunks_of(t.detach(), rank, world, dim=0).requires_grad_(t.requires_grad) for t in tensors
    ]


def ring(q, k, v, cp, comm_type="p2p", document_ids=None, seed=None, sinks=None, **features):
    told = {"documents": document_ids is not None, "sink": sinks is not None, **features}
    call = AttentionCall(AttentionSpec.of(q, k, v, SCALE, **told), document_ids, seed, sinks)
    return ring_attention(q, k, v, call, cp=cp, comm_type=comm_type)


def attend(rank, world, shape, dtype, ids, more):
    """(out, dq, dk, dv) of this rank's chunks."""
    q, k, v, grad = mine(rank, world, *inputs(*shape, dtype=dtype))
    out = ring(q, k, v, cp_axis(rank, world), document_ids=ids, **more)
    return out.detach(), *(t.to(dtype) for t in torch.autograd.grad(out, (q, k, v), grad))


def ranks_attend(rank, world, jobs):
    return [attend(rank, world, *job) for job in jobs]


def whole(parts):
    """Ranks' chunks [s/cp, ...] put back in their order."""
    chunks = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in chunks] + [second for _, second in reversed(chunks)])


def expected(shape, ids, window=None):
    q, k, v, grad = inputs(*shape)
    out = formula(q, k, v, ids, window=window)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def shapes(world):
    """(s, b, n, g, d): chunks of one row and odd ones, one group, one head, one sample, odd widths,
    several row blocks."""
    return [
        (2 * world, 2, 4, 2, 8),
        (6 * world, 1, 6, 1, 5),
        (10 * world, 3, 2, 2, 16),
        (280, 1, 1, 1, 3),
    ]


@pytest.mark.parametrize(
    "world",
    [
        *(2, *(pytest.param(n, marks=pytest.mark.campaign) for n in (4, 7))),
        pytest.param(8, marks=pytest.mark.sweep),
    ],
)
def test_values_and_gradients_of_one_process(world):
    """In float64, both ways of communication, with and without documents that begin and end
    anywhere."""
    jobs = [
        (shape, torch.float64, ids, {"comm_type": way})
        for shape in shapes(world)
        if shape[0] % (2 * world) == 0
        for ids in (None, documents(shape[0], shape[1]))
        for way in COMM_TYPES
    ]
    results = run_ranks(world, ranks_attend, jobs)
    for i, (shape, _, ids, _) in enumerate(jobs):
        for parts, wanted in zip(
            zip(*(result[i] for result in results), strict=True), expected(shape, ids), strict=True
        ):
            torch.testing.assert_close(whole(parts), wanted, **CLOSE)


@pytest.mark.parametrize(
    "world",
    [
        *(2, *(pytest.param(n, marks=pytest.mark.campaign) for n in (3, 4))),
        pytest.param(8, marks=pytest.mark.sweep),
    ],
)
def test_windows(world):
    """Shorter than a part, ending at and beside the borders of chunks, wider than several chunks;
    both ways of communication, with and without documents."""
    shape = (40 * world, 2, 4, 2, 8)
    jobs = [
        (shape, torch.float64, ids, {"comm_type": way, "window": window})
        for window in (1, 2, 9, 10, 11, 19, 20, 21, 22, 50, 40 * world - 1)
        for ids in (None, documents(shape[0], shape[1]))
        for way in COMM_TYPES
    ]
    results = run_ranks(world, ranks_attend, jobs)
    for i, (_, _, ids, more) in enumerate(jobs):
        exact = expected(shape, ids, more["window"])
        for parts, wanted in zip(
            zip(*(result[i] for result in results), strict=True), exact, strict=True
        ):
            torch.testing.assert_close(whole(parts), wanted, **CLOSE)


def attend_to_wide_values(rank, world, shape, ids, more):
    *tensors, grad = wide_values(shape)
    q, k, v, grad = mine(rank, world, *tensors, grad)
    out = ring(q, k, v, cp_axis(rank, world), document_ids=ids, **more)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def wide_values(shape):
    """Values of 11 channels, and a gradient of as many."""
    q, k, v, grad = inputs(*shape)
    v, grad = (torch.cat((t, 2 * t), -1)[..., :11].detach() for t in (v, grad))
    return q, k, v.requires_grad_(), grad


@pytest.mark.parametrize(
    ("way", "window", "masked"),
    [
        (COMM_TYPES[0], None, True),
        (COMM_TYPES[0], 9, False),
        (COMM_TYPES[1], None, False),
        (COMM_TYPES[1], 9, True),
    ],
)
def test_values_of_another_width_than_keys(way, window, masked):
    shape = (40, 2, 4, 2, 8)
    ids = documents(40) if masked else None
    more = {"window": window, "comm_type": way}
    results = run_ranks(2, attend_to_wide_values, shape, ids, more)
    q, k, v, grad = wide_values(shape)
    out = formula(q, k, v, ids, window=window)
    exact = out.detach(), *torch.autograd.grad(out, (q, k, v), grad)
    for parts, wanted in zip(zip(*results, strict=True), exact, strict=True):
        torch.testing.assert_close(whole(parts), wanted, **CLOSE)


def ranks_attend_with_sinks(rank, world, jobs):
    results = []
    for shape, ids, more in jobs:
        q, k, v, grad = mine(rank, world, *inputs(*shape))
        sinks = SINKS.clone().requires_grad_()
        out = ring(q, k, v, cp_axis(rank, world), document_ids=ids, sinks=sinks, **more)
        results.append((out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), grad)))
    return results


# Large ones too: forward looks right without sinks while they are small (Transformer Engine 3551).
SINKS = torch.tensor([5.0, -5.0, 0.0, 1.3], dtype=torch.float64)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_sinks_count_once_and_scores_are_capped(world):
    """Each rank has the gradient of a sink by its own queries."""
    shape = (40 * world, 2, 4, 2, 8)
    jobs = [
        (shape, ids, {"comm_type": way, "window": window, "softcap": cap})
        for window in (None, 21)
        for cap in (None, 0.7)
        for ids in (None, documents(shape[0], shape[1]))
        for way in COMM_TYPES
    ]
    results = run_ranks(world, ranks_attend_with_sinks, jobs)
    for i, (_, ids, more) in enumerate(jobs):
        q, k, v, grad = inputs(*shape)
        sinks = SINKS.clone().requires_grad_()
        out = formula(q, k, v, ids, None, more["window"], more["softcap"], sinks)
        exact = out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), grad)
        *parts, of_sinks = zip(*(result[i] for result in results), strict=True)
        for got, wanted in zip((*map(whole, parts), sum(of_sinks)), exact, strict=True):
            torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_other_formats(dtype, rtol):
    """Parts are joined in fp32: bf16 results are rounded once, so they are as near as bf16 is."""
    shape = (256, 1, 4, 2, 16)
    jobs = [(shape, dtype, None, {"comm_type": way}) for way in COMM_TYPES]
    results = run_ranks(4, ranks_attend, jobs)
    for i in range(len(jobs)):
        for parts, wanted in zip(
            zip(*(result[i] for result in results), strict=True), expected(shape, None), strict=True
        ):
            got = whole(parts)
            assert got.dtype == dtype
            assert (got.double() - wanted).norm() <= rtol * wanted.norm()


class LiveKeys(TorchDispatchMode):
    """The most bytes alive at once in keys and values: storages first seen as [..., g, d], or both
    together as [..., g, 2 d], in their own format.

    (Gradients, and what the kernel loads of a few heads at a time, are fp32 where keys are bf16. No
    other size is g.)
    """

    def __init__(self, k):
        super().__init__()
        self.last = [(k.shape[-2], width * k.shape[-1]) for width in (1, 2)]
        self.dtype = k.dtype
        self.alive = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.dtype == self.dtype and t.shape[-2:] in self.last:
                storage = t.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.alive = {key: found for key, found in self.alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def most_keys(rank, world, shape, way):
    """The peak, forward and backward, as a multiple of one rank's keys and values."""
    q, k, v, grad = mine(rank, world, *inputs(*shape, dtype=torch.bfloat16))
    peaks = []
    with LiveKeys(k) as live:
        out = ring(q, k, v, cp_axis(rank, world), comm_type=way)
        peaks.append(live.peak)
        live.peak = 0
        out.backward(grad)
        peaks.append(live.peak)
    return [peak / (2 * k.numel() * k.element_size()) for peak in peaks]


@pytest.mark.parametrize(
    "world", [2, *(pytest.param(n, marks=pytest.mark.campaign) for n in (4, 8))]
)
def test_no_rank_ever_holds_more_than_two_shares_of_keys_and_values(world):
    """Its own, and a part at work and a part on its way, half as much each; gathering holds them
    all, which shows."""
    for shape in ((10 * world, 2, 6, 3, 8), (14 * world, 1, 2, 1, 8)):
        assert run_ranks(world, most_keys, shape, "p2p") == [[2.0, 2.0]] * world
    gathered = run_ranks(world, most_keys, shape, "all_gather")
    assert all(min(peaks) > world for peaks in gathered)


def turns(rank, world, way, window=None):
    """What happens in which order on this rank: t(ransfer begins), c(omputation), w(ait)."""
    said = []

    def noting(function, letter):
        def noted(*args):
            said.append(letter)
            result = function(*args)
            return noting(result, "w") if letter == "t" else result

        return noted

    for name, letter in (
        ("start_shift", "t"),
        ("start_exchange", "t"),
        ("start_all_gather", "t"),
        ("block_attention", "c"),
        ("block_attention_grads", "c"),
    ):
        setattr(module, name, noting(getattr(module, name), letter))
    q, k, v, grad = mine(rank, world, *inputs(8 * world))
    out = ring(q, k, v, cp_axis(rank, world), comm_type=way, window=window)
    forward = "".join(said)
    said.clear()
    out.backward(grad)
    return forward, "".join(said)


def test_the_next_block_is_on_its_way_while_one_is_computed():
    for forward, backward in run_ranks(3, turns, "p2p"):
        assert forward == "tccwtcwctcwtcwc"
        assert backward == "tccwtctwcwttcwwtctwcwtw"
    assert {forward for forward, _ in run_ranks(3, turns, "all_gather")} == {"tcccwcccc"}
    # of 4 positions a chunk: ranks 1 and 2 see the end of the early chunk before, ranks 0 and 1 that
    # of the late one, which goes on two ranks
    in_window = run_ranks(3, turns, "p2p", 3)
    assert [forward for forward, _ in in_window] == ["tccwtwc", "tccwtcwc", "tcccwtcw"]


P = 0.25


def dropped(rank, world, shape, ids, way, again):
    """(out, dq, dk, dv), with dropout, of a one-hot V and of a random one; each rank has a seed of
    its own."""
    q, k, v, grad = mine(rank, world, *inputs(*shape))
    s, b, _, g, _ = shape
    eye = torch.eye(s, dtype=torch.float64)[:, None, None].expand(s, b, g, s)
    cp = cp_axis(rank, world)
    found = []
    for values in (*mine(rank, world, eye), v):

        def core(q, k, v):
            return ring(q, k, v, cp, way, ids, 100 + rank, dropout=P)

        out = recompute(core, q, k, values) if again else core(q, k, values)
        found.append(out.detach())
    return *found, *torch.autograd.grad(out, (q, k, v), grad)


@pytest.mark.parametrize("way", COMM_TYPES)
def test_dropout(way):
    """Each probability is kept or not, by a mask that repeats in backward and in recompute and is
    another everywhere."""
    world = 4
    chunk = 16
    shape = (2 * world * chunk, 1, 2, 1, 2 * world * chunk)
    ids = torch.zeros(1, shape[0], dtype=torch.long) if way == "p2p" else None
    results = run_ranks(world, dropped, shape, ids, way, False)
    for rank, repeated in enumerate(run_ranks(world, dropped, shape, ids, way, True)):
        assert all(torch.equal(a, b) for a, b in zip(results[rank], repeated, strict=True))
    shown, *rest = (whole(parts) for parts in zip(*results, strict=True))
    q, k, v, grad = inputs(*shape)
    eye = torch.eye(shape[0], dtype=torch.float64)[:, None, None].expand(-1, 1, 1, -1)
    plain = formula(q, k, eye).detach()
    factors = torch.where(plain > 0, shown / plain, 0.0).permute(1, 2, 0, 3)
    seen = (plain > 0).permute(1, 2, 0, 3)
    assert set(factors[seen].round(decimals=9).unique().tolist()) == {0.0, round(1 / (1 - P), 9)}
    assert (
        abs((factors[seen] > 0).double().mean() - (1 - P)) < 5 * (P * (1 - P) / seen.sum()) ** 0.5
    )
    masks = (
        (factors > 0).unflatten(3, (-1, chunk)).unflatten(2, (-1, chunk)).permute(0, 1, 2, 4, 3, 5)
    )
    below = [
        masks[0, head, i, j].flatten().tolist()
        for head in range(2)
        for i in range(2 * world)
        for j in range(i)
    ]
    assert len({tuple(mask) for mask in below}) == len(below), (
        "no two pairs of chunks, and no two heads, drop alike"
    )
    out = formula(q, k, v, factors=factors)
    wanted = (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))
    for got, exact in zip(rest, wanted, strict=True):
        torch.testing.assert_close(got, exact, **CLOSE)
