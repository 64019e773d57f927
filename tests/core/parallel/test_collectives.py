"""Each collective and its adjoint on real gloo ranks: values, and gradients against the whole
computation on one."""

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.parallel import collectives
from megatron.parallel.context import Axis, ParallelContext
from tests.forkrun import run_ranks

SHAPE = (4, 8, 12)
WORLDS = [2, 4]


def part(rank: int, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """A tensor that every rank can make for every rank."""
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank)
    )


def world_axis(rank: int, world: int) -> Axis:
    return ParallelContext(ParallelConfig(), world, rank).world


def call(
    rank: int, world: int, names: tuple[str, ...], *args
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(result, the input afterwards) of each of these collectives on this rank's part."""
    axis = world_axis(rank, world)
    parts = [part(rank) for _ in names]
    return [
        (getattr(collectives, name)(x, axis, *args), x)
        for name, x in zip(names, parts, strict=True)
    ]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_reduce(world, op):
    parts = torch.stack([part(rank) for rank in range(world)])
    expected = {"sum": parts.sum(0), "max": parts.amax(0), "min": parts.amin(0)}[op]
    results = run_ranks(world, call, ("all_reduce", "all_reduce_"), op)
    for rank, ((result, after), (in_place, changed)) in enumerate(results):
        torch.testing.assert_close(result, expected)
        assert torch.equal(after, part(rank))
        assert torch.equal(in_place, changed)
        torch.testing.assert_close(in_place, expected)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_scatter_and_slice(world, dim):
    parts = [part(rank) for rank in range(world)]
    shards = sum(parts).chunk(world, dim)
    for rank, results in enumerate(
        run_ranks(world, call, ("all_gather", "reduce_scatter", "my_slice"), dim)
    ):
        (gathered, _), (scattered, _), (mine, _) = results
        assert torch.equal(gathered, torch.cat(parts, dim))
        torch.testing.assert_close(scattered, shards[rank])
        assert torch.equal(mine, parts[rank].chunk(world, dim)[rank]) and mine.is_contiguous()


def scatter_both_ways(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(result on gloo, result where the backend says it is another)."""
    axis = world_axis(rank, world)
    exchanged = collectives.reduce_scatter(part(rank), axis, 1)
    collectives.dist.get_backend = lambda group: "nccl"
    return exchanged, collectives.reduce_scatter(part(rank), axis, 1)


@pytest.mark.parametrize("world", WORLDS)
def test_the_backends_own_reduce_scatter_gives_the_same(world):
    for exchanged, own in run_ranks(world, scatter_both_ways):
        torch.testing.assert_close(exchanged, own)


def in_place(
    rank: int, world: int, dtype: torch.dtype, backend: str, *more: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of my part, everything once it is gathered), in one buffer, with several of each under
    way at a time."""
    axis = world_axis(rank, world)
    collectives.dist.get_backend = lambda group: backend
    buffers = [part(rank, seed).flatten().to(dtype) for seed in range(3)]
    reductions = [collectives.start_reduce_scatter_(x, axis, *more) for x in buffers]
    sums = [pending() for pending in reductions]
    for x, mine in zip(buffers, sums, strict=True):
        assert mine.data_ptr() == x.chunk(world)[rank].data_ptr()
    kept = torch.cat(sums).clone()
    for pending in [collectives.start_all_gather_(x, axis) for x in buffers]:
        pending()
    assert backend != "gloo" or all(pending.arrived for pending in reductions)
    return kept, torch.stack(buffers)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reduce_scatter_and_gather_in_place(world, dtype):
    """The sum goes over the ranks in order, in fp32 for short formats: the same bytes whatever the
    bucket."""
    wide = torch.promote_types(dtype, torch.float32)
    whole = [
        torch.stack([part(rank, seed).flatten().to(dtype) for rank in range(world)])
        for seed in range(3)
    ]
    expected = torch.stack([x.to(wide).sum(0).to(dtype) for x in whole])
    for rank, (sums, gathered) in enumerate(run_ranks(world, in_place, dtype, "gloo")):
        torch.testing.assert_close(gathered, expected)
        assert torch.equal(sums, torch.cat([x.chunk(world)[rank] for x in gathered]))
    if dtype == torch.float64:
        for _, gathered in run_ranks(world, in_place, dtype, "nccl"):
            torch.testing.assert_close(gathered, expected)


def test_16_bit_gradients_are_added_in_fp32_on_other_backends_too():
    """--ddp-reduce-scatter-with-fp32-accumulation: the bits of the sum in fp32, rounded once."""
    alike = [run_ranks(4, in_place, torch.bfloat16, name, True) for name in ("gloo", "nccl")]
    for (sums, _), (others, _) in zip(*alike, strict=True):
        assert torch.equal(sums, others)


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_and_objects(world):
    for [(result, after)] in run_ranks(world, call, ("broadcast_",), 1):
        assert torch.equal(result, part(1)) and torch.equal(after, part(1))
    assert (
        run_ranks(world, gather)
        == [[{"rank": rank, "text": "x" * rank} for rank in range(world)]] * world
    )


def gather(rank: int, world: int) -> list:
    axis = world_axis(rank, world)
    collectives.barrier(axis)
    return collectives.gather_objects({"rank": rank, "text": "x" * rank}, axis)


def differentiate(rank: int, world: int, name: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Value on this rank, and the gradient that this rank gets of sum over ranks of <weight_r,
    value_r>."""
    x = part(rank).requires_grad_()
    value = getattr(collectives, name)(x, world_axis(rank, world), dim)
    (value * part(rank, 1, tuple(value.shape))).sum().backward()
    return value.detach(), x.grad


def whole(name: str, world: int, dim: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same on one process, in plain torch: every rank's value from every rank's input."""
    inputs = [part(rank).requires_grad_() for rank in range(world)]
    values = {
        "reduce_from": lambda: [sum(inputs) for _ in inputs],
        "scatter_sequence": lambda: list(sum(inputs).chunk(world, dim)),
    }[name]()
    weights = [part(rank, 1, tuple(value.shape)) for rank, value in enumerate(values)]
    # what follows is the same on all ranks, so one of the equal losses counts
    if name == "reduce_from":
        weights = [weights[0]] + [torch.zeros_like(w) for w in weights[1:]]
    sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()
    return [(value.detach(), x.grad) for value, x in zip(values, inputs, strict=True)]


@pytest.mark.parametrize("world", WORLDS)
def test_scatter_sequence(world):
    """What each rank's input receives is the gradient of all ranks' losses together."""
    for dim in (0, 1):
        expected = whole("scatter_sequence", world, dim)
        for got, wanted in zip(
            run_ranks(world, differentiate, "scatter_sequence", dim), expected, strict=True
        ):
            torch.testing.assert_close(got[0], wanted[0])
            torch.testing.assert_close(got[1], wanted[1])


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_from(world):
    """Its result is one and the same on all ranks, and so is what follows: each rank's gradient
    passes as it is."""
    got = run_ranks(world, differentiate, "reduce_from", 0)
    for rank, ((value, grad), (expected, _)) in enumerate(
        zip(got, whole("reduce_from", world, 0), strict=True)
    ):
        torch.testing.assert_close(value, expected)
        assert torch.equal(grad, part(rank, 1, SHAPE))
    first = whole("reduce_from", world, 0)[0][1]
    assert torch.equal(got[0][1], first)


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "all_reduce_",
        "all_gather",
        "reduce_scatter",
        "my_slice",
        "broadcast_",
        "reduce_from",
        "scatter_sequence",
    ],
)
def test_an_axis_of_one_returns_its_input(name):
    """The very tensor, and no process group is there."""
    x = part(0)
    assert getattr(collectives, name)(x, Axis("tp")) is x
    assert (
        collectives.gather_objects("x", Axis("tp")) == ["x"]
        and collectives.barrier(Axis("tp")) is None
    )
