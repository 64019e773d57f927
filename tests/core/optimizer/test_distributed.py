"""Sharded optimizer state on real ranks against one optimizer of the whole: weights, state, norms,
counts, decisions."""

from typing import Any

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.ddp import GradBuffers
from megatron.parallel.sharding import Sharding, is_primary_copy
from tests.core.optimizer.builders import dynamic_scaler, optimizer_of
from tests.forkrun import run_ranks

SHAPES = {
    "embedding.word_embeddings.weight": (40, 8),
    "decoder.layers.0.input_layernorm.weight": (8,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (24, 8),
    "decoder.layers.0.self_attention.linear_qkv.bias": (24,),
    "decoder.layers.0.mlp.linear_fc1.weight": (2, 13, 7),
    "decoder.layers.0.mlp.linear_fc1.bias": (2, 13),
    "scalar": (1,),
    "output_layer.weight": (40, 8),
}
STEPS = 4


def gradient(name: str, step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's part; small whole numbers over 64, so that sums are exact in fp16 too. Some are
    0."""
    generator = torch.Generator().manual_seed(hash((sum(name.encode()), step, rank)) % 2**31)
    return (torch.randint(-40, 41, SHAPES[name], generator=generator) / 64).to(dtype)


def trained(
    rank: int,
    world: int,
    ranks: int,
    sharded: bool,
    instances: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    flags: dict[str, Any],
    infinite: int | None = None,
) -> dict[str, Any]:
    """Some steps on gradients of `ranks` ranks: by one process that adds them up itself, or by as
    many as there are.

    In the second, one gradient of parameter number `infinite` is that on the last rank.
    """
    ctx = ParallelContext(
        ParallelConfig(
            use_distributed_optimizer=sharded, num_distributed_optimizer_instances=instances
        ),
        world,
        rank,
    )
    generator = torch.Generator().manual_seed(0)
    params = []
    for name, shape in SHAPES.items():
        params.append(
            torch.nn.Parameter(
                torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            )
        )
        params[-1].sharding = Sharding(name, shape)
    buffers = GradBuffers(params, ctx, grad_dtype, bucket_size=300)
    scaler = (
        dynamic_scaler(1.0, loss_scale_window=2, hysteresis=1) if dtype == torch.float16 else None
    )
    optimizer = optimizer_of(
        buffers.owned,
        grad_scaler=scaler,
        log_num_zeros_in_grad=True,
        counts=lambda p: is_primary_copy(p.sharding, ctx),
        reduce_sum=lambda x: all_reduce(x, ctx.optimizer),
        reduce_max=lambda x: all_reduce(x, ctx.optimizer, "max"),
        **flags,
    )
    results = []
    for step in range(STEPS):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"], group["weight_decay"] = 0.01 * (number + 1), 0.1 * group["wd_mult"]
        buffers.zero()
        for p in params:
            for other in range(ranks) if world == 1 else (rank,):
                p.main_grad += gradient(p.sharding.name, step, other, torch.float64)
        if infinite is not None and step == 1 and rank == world - 1:
            params[infinite].main_grad.view(-1)[3] = float("inf")
        buffers.reduce()
        results.append(tuple(optimizer.step(grad_factor=1 / ranks)))
        if results[-1][0]:
            buffers.gathering.start()
    state = optimizer.tensors()
    return {
        "weights": {p.sharding.name: p.detach().clone() for p in params},
        "results": results,
        "norm": optimizer.params_norm(),
        "scale": optimizer.loss_scale,
        "groups": len(optimizer.param_groups),
        "bytes": sum(tensor.nbytes for tensor in state.values()),
        "counters": optimizer.counters(),
        "spans": {
            part.sharding.name: getattr(part, "span", (0, part.numel())) for part in buffers.owned
        },
        "state": {name: tensor.flatten().clone() for name, tensor in state.items()},
    }


def whole_state(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """State tensors put together from the ranks of one instance."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for name, tensor in rank["state"].items():
            found.setdefault(name, {})[rank["spans"][name.split(".", 2)[2]][0]] = tensor
    return {
        name: torch.cat([part for _, part in sorted(parts.items())])
        for name, parts in found.items()
    }


def compare(
    world: int, instances: int, *args: Any, exact: bool = False, **more: Any
) -> list[dict[str, Any]]:
    """Assert that the shards together did what one process does; the ranks' reports."""
    one = trained(0, 1, world, False, 1, *args, **more)
    ranks = run_ranks(world, trained, world, True, instances, *args, more.get("infinite"))
    close = dict(rtol=0.0, atol=0.0) if exact else dict(rtol=1e-6, atol=1e-7)
    size = world // instances
    for rank in ranks:
        for name, weight in one["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, **close)
        for got, expected in zip(rank["results"], one["results"], strict=True):
            assert got[0] == expected[0] and got[2] == expected[2], "the same steps, as many zeros"
            assert got[1] == (None if expected[1] is None else pytest.approx(expected[1], rel=1e-6))
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-6)
        assert (rank["scale"], rank["groups"], rank["counters"]) == (
            one["scale"],
            one["groups"],
            one["counters"],
        )
    for first in range(0, world, size):
        state = whole_state(ranks[first : first + size])
        assert state.keys() == one["state"].keys()
        for name, tensor in one["state"].items():
            torch.testing.assert_close(state[name], tensor, **close)
        assert sum(rank["bytes"] for rank in ranks[first : first + size]) == one["bytes"], (
            "no element is held twice"
        )
    assert max(rank["bytes"] for rank in ranks) <= one["bytes"] / size + 64 * 20 * 3
    return ranks


ADAM = {"optimizer": "adam"}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.9}


RATES = ADAM | {"decoupled_lr": 0.5, "decoupled_min_lr": 0.1}


@pytest.mark.parametrize(
    "world, instances, dtype, grad_dtype, flags",
    [
        (2, 1, torch.float64, torch.float64, ADAM),
        (4, 2, torch.float64, torch.float64, ADAM),
        (4, 1, torch.float32, torch.float32, SGD),
        (4, 2, torch.bfloat16, torch.float32, RATES),
        (2, 1, torch.bfloat16, torch.float32, RATES),
        (4, 1, torch.float16, torch.float16, ADAM),
        (2, 1, torch.float32, torch.float32, SGD | {"sgd_momentum": 0.0}),
    ],
)
def test_shards_do_what_the_whole_does(world, instances, dtype, grad_dtype, flags):
    """Clipped, with weight decay on some and rates of their own on others; every rank has all
    groups."""
    compare(world, instances, dtype, grad_dtype, flags)


@pytest.mark.parametrize(
    "world, instances, dtype",
    [
        (4, 2, torch.float32),
        (2, 1, torch.float32),
        (4, 1, torch.bfloat16),
        (2, 1, torch.bfloat16),
        (4, 2, torch.float16),
    ],
)
def test_without_clipping_not_a_bit_differs(world, instances, dtype):
    """Shards begin at 64 bytes, so that vectors of the update hold the same elements as in the
    whole tensor."""
    compare(world, instances, dtype, torch.float32, ADAM | {"clip_grad": 0.0}, exact=True)


@pytest.mark.parametrize("world, instances, infinite", [(2, 1, 0), (4, 1, 4), (4, 2, 0)])
def test_an_overflow_in_one_shard_is_everyones(world, instances, infinite):
    ranks = compare(world, instances, torch.float16, torch.float16, ADAM, infinite=infinite)
    assert [result[0] for result in ranks[0]["results"]] == [True, False, True, True]
    owners = [
        rank
        for rank, report in enumerate(ranks)
        if report["spans"][list(SHAPES)[infinite]][0]
        <= 3
        < report["spans"][list(SHAPES)[infinite]][1]
    ]
    assert len(owners) == instances < world, "only these ranks have seen it"


def test_a_rank_that_owns_nothing():
    """One small parameter is one rank's; the other has its groups and makes its steps."""
    assert run_ranks(2, alone) == [(1, 16, [True, True]), (1, 0, [True, True])]


def alone(rank: int, world: int) -> tuple[int, int, list[bool]]:
    ctx = ParallelContext(ParallelConfig(use_distributed_optimizer=True), world, rank)
    p = torch.nn.Parameter(torch.ones(16))
    p.sharding = Sharding("one", (16,))
    buffers = GradBuffers([p], ctx, torch.float32)
    optimizer = optimizer_of(
        buffers.owned, log_num_zeros_in_grad=True, reduce_sum=lambda x: all_reduce(x, ctx.optimizer)
    )
    done = []
    for _ in range(2):
        optimizer.param_groups[0]["lr"] = 0.1
        p.main_grad.fill_(1.0)
        before = p.detach().clone()
        buffers.reduce()
        result = optimizer.step()
        buffers.gathering.start()
        assert (
            result.grad_norm == pytest.approx(8.0)
            and result.num_zeros == 0
            and optimizer.params_norm() > 0
        )
        done.append(bool((p < before).all()))
    return len(optimizer.param_groups), sum(part.numel() for part in buffers.owned), done
