"""Sharding: first values do not depend on the layout, boxes tile the tensor, one copy counts."""

import os
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from megatron.config.plan.parameters import ParameterSpec
from megatron.parallel import sharding
from megatron.parallel.context import Axis
from megatron.parallel.sharding import (
    ParameterFactory,
    init_parameters,
    is_primary_copy,
    parameter,
)

VOCAB = "embedding.word_embeddings.weight"


def rank_of(tp=1, tp_rank=0, pp=1, pp_rank=0, sequence_parallel=False):
    """What sharding reads of a rank's context, without a process group."""
    ends = Axis("ends", min(pp, 2), int(pp_rank > 0))
    return SimpleNamespace(
        tp=Axis("tp", tp, tp_rank),
        pp=Axis("pp", pp, pp_rank),
        ends=ends,
        sequence_parallel=sequence_parallel,
        shares_weights=False,
    )


def filled(spec, ctx=None, seed=1234, dtype=torch.float32):
    p = parameter(spec, ctx or rank_of(), dtype)
    torch.nn.init.constant_(p, torch.nan)
    init_parameters([p], ctx or rank_of(), seed)
    assert not p.isnan().any()
    return p.detach()


@pytest.mark.parametrize("shape, split", [((12, 10), 0), ((6, 12), 1), ((2, 12, 7), 1)])
@pytest.mark.parametrize("init", ["normal", "xavier_uniform", "uniform"])
def test_slices_of_every_layout_join_to_the_whole(shape, split, init):
    spec = ParameterSpec("decoder.layers.7.x.weight", shape, (("tp", split),), init, 0.02)
    whole = filled(spec)
    assert whole.std() > 0
    for size in (2, 3, 4, 6):
        parts = [filled(spec, rank_of(size, rank)) for rank in range(size)]
        assert torch.equal(torch.cat(parts, split), whole)


def test_vocabulary_padding_changes_no_real_row():
    """50257-like: 61 real rows; padded to 64 on one rank, to 66 on three, with a rank that has real
    and dummy rows."""
    one = filled(ParameterSpec(VOCAB, (64, 8), (("tp", 0),), "normal", 0.02, real_rows=61))
    spec = ParameterSpec(VOCAB, (66, 8), (("tp", 0),), "normal", 0.02, real_rows=61)
    three = torch.cat([filled(spec, rank_of(3, rank)) for rank in range(3)])
    assert torch.equal(one[:61], three[:61])
    assert one[:61].abs().min() > 0
    assert not one[61:].any() and not three[61:].any()


def test_values_depend_on_seed_and_name_only():
    names = [f"decoder.layers.{i}.mlp.linear_fc1.weight" for i in range(12)]
    specs = [ParameterSpec(name, (33, 17), (), "normal", 0.02) for name in names]
    alone = [filled(spec) for spec in specs]
    together = [parameter(spec, rank_of(), torch.float32) for spec in reversed(specs)]
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.manual_seed(99)
        init_parameters(together, rank_of(), 1234)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(alone, reversed(together), strict=True):
        assert torch.equal(a, b)
    assert len({tuple(values[0].tolist()) for values in alone}) == len(names)
    assert not torch.equal(alone[0], filled(specs[0], seed=1235))


def test_distributions():
    normal = filled(ParameterSpec("w", (400, 500), (), "normal", 0.005))
    assert normal.mean().abs() < 5e-5 and abs(normal.std().item() / 0.005 - 1) < 0.01
    bound = (6 / (30 + 2 * 60)) ** 0.5
    xavier = filled(ParameterSpec("w", (2, 60, 30), (("tp", 1),), "xavier_uniform"))
    assert (
        0.98 * bound < xavier.abs().max() <= bound
        and abs(xavier.std().item() / (bound / 3**0.5) - 1) < 0.03
    )


def test_constants():
    assert torch.equal(filled(ParameterSpec("b", (5,))), torch.zeros(5))
    assert torch.equal(filled(ParameterSpec("n", (5,), init="ones")), torch.ones(5))


def test_one_copy_counts():
    """Over a tp 2 x pp 2 grid: a split tensor counts on both tp ranks, a whole one and a tied one
    only once."""
    grid = [rank_of(2, t, 2, p) for t, p in product((0, 1), (0, 1))]
    whole = ParameterSpec("n", (4,))
    split = ParameterSpec("w", (4, 4), (("tp", 0),))

    def ranks(spec, partial=(), ctxs=grid):
        return sum(
            is_primary_copy(parameter(spec, ctx, torch.float32, partial=partial).sharding, ctx)
            for ctx in ctxs
        )

    first_stage = [ctx for ctx in grid if ctx.pp.rank == 0]
    assert ranks(whole, ctxs=first_stage) == 1
    assert ranks(split, ctxs=first_stage) == 2
    assert ranks(split, partial=("ends",)) == 2
    assert ranks(whole, partial=("tp",), ctxs=first_stage) == 1


def test_factory_knows_what_is_off_and_what_is_partial():
    table = [ParameterSpec("a.w", (4, 4), (("tp", 0),)), ParameterSpec("a.n", (4,))]
    plain = ParameterFactory(table, rank_of(2), torch.float32).scope("a")
    assert plain.optional("bias") is None and plain.optional("w") is not None
    assert tuple(plain("w").shape) == (2, 4) and plain("w").sharding.shape == (4, 4)
    assert plain("n").sharding.partial == ()
    sequence = ParameterFactory(table, rank_of(2, sequence_parallel=True), torch.float32).scope("a")
    assert sequence("n").sharding.partial == ("tp",)
    assert sequence("w").sharding.partial == ()


def test_initial_values_are_drawn_by_all_cores_of_a_rank(monkeypatch):
    """torchrun sets torch's own number of threads to 1."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    for name, value in (("RANK", 3), ("WORLD_SIZE", 16), ("LOCAL_RANK", 3)):
        monkeypatch.setenv(name, str(value))
    for ranks, threads in ((8, 8), (16, 4), (200, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert sharding._drawing_threads() == threads
