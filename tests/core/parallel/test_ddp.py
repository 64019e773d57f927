"""Gradient buffers: where gradients lie, in which format they add up, what the ranks sum, and
when."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.model.blocks.moe.module import GroupedLinear
from megatron.parallel import gathering, reduction
from megatron.parallel.collectives import Pending
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.ddp import GradBuffers
from megatron.parallel.layers import ColumnParallelLinear
from megatron.parallel.sharding import Sharding
from tests.forkrun import run_ranks
from tests.live_memory import LiveMemory

SHAPES = [(3, 5), (7,), (1,), (16, 16), (4, 2, 3)]
ALONE = ParallelContext(ParallelConfig())


def parameters(dtype: torch.dtype, partial: tuple[int, ...] = ()) -> list[torch.nn.Parameter]:
    """Ones of all shapes; those of the numbers in `partial` see part of their gradient on each
    tensor-parallel rank."""
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    for n, p in enumerate(params):
        p.sharding = Sharding(f"p{n}", SHAPES[n], partial=("tp",) if n in partial else ())
    return params


def loss(params: list[torch.nn.Parameter], factor: float) -> torch.Tensor:
    """Its gradient is factor x (number of the parameter + 1) everywhere."""
    return sum(((n + 1) * factor * p.float()).sum() for n, p in enumerate(params))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layout(grad_dtype):
    """One buffer, last parameters first; every view starts at a multiple of 64 bytes of the smaller
    format, none overlap."""
    params = parameters(torch.float32)
    frozen = torch.nn.Parameter(torch.ones(9), requires_grad=False)
    buffers = GradBuffers([params[0], frozen, *params[1:]], ALONE, grad_dtype)
    assert all(a is b for a, b in zip(buffers.params, reversed(params), strict=True))
    assert not hasattr(frozen, "main_grad")
    ends = 0
    itemsize = min(4, grad_dtype.itemsize)
    for p in buffers.params:
        start = p.main_grad.storage_offset() * itemsize
        assert (
            start % 64 == 0
            and start == ends
            and p.main_grad.shape == p.shape
            and p.main_grad.dtype == grad_dtype
        )
        assert p.main_grad.untyped_storage().data_ptr() == buffers.flat.untyped_storage().data_ptr()
        ends = start + -(-p.numel() * itemsize // 64) * 64
    assert buffers.flat.numel() * itemsize == ends and buffers.flat.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_formats_share_memory(dtype):
    """p.grad is the buffer's view: autograd adds in place; zero() gives back what a step took
    away."""
    params = parameters(dtype)
    buffers = GradBuffers(params, ALONE, dtype)
    for _ in range(3):
        loss(params, 0.5).backward()
    for n, p in enumerate(params):
        assert p.grad is p.main_grad and (p.main_grad == 1.5 * (n + 1)).all()
        p.grad = None
    buffers.zero()
    assert buffers.flat.count_nonzero() == 0 and all(p.grad is p.main_grad for p in params)
    loss(params, 1.0).backward()
    assert [p.main_grad.flatten()[0].item() for p in params] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_adds_up_in_fp32(dtype):
    """1000 micro-batches of 1/1024 make 1000/1024 (bf16 would stop at 1/4); p.grad is let go each
    time."""
    params = parameters(dtype)
    buffers = GradBuffers(params, ALONE, torch.float32)
    for _ in range(1000):
        loss(params, 2.0**-10).backward()
        assert all(p.grad is None for p in params)
    for n, p in enumerate(params):
        each = torch.tensor((n + 1) * 2.0**-10).to(dtype).item()
        assert p.main_grad.unique().tolist() == [1000 * each]
    stuck = torch.tensor(0.0, dtype=torch.bfloat16)
    for _ in range(1000):
        stuck += 2.0**-10
    assert stuck.item() < 0.5
    buffers.zero()
    assert buffers.flat.count_nonzero() == 0


def test_what_a_kernel_added_itself_is_kept():
    """A weight-gradient kernel writes to main_grad and gives autograd nothing; other parameters may
    go unused."""
    params = parameters(torch.bfloat16)
    GradBuffers(params, ALONE, torch.float32)
    params[0].main_grad += 3.0
    loss(params[1:2], 1.0).backward()
    assert [p.main_grad.flatten()[0].item() for p in params] == [3, 1, 0, 0, 0]


def test_a_step_of_experts_has_no_gradients_of_the_step_before():
    weight = torch.nn.Parameter(torch.ones(3, 5, 6))
    weight.sharding = Sharding("w", (3, 5, 6))
    layer = GroupedLinear(weight)
    buffers = GradBuffers([weight], ALONE, torch.float32)
    for step in range(1, 3):
        buffers.zero(2)
        for micro_batch in range(2):
            layer(torch.full((7, 6), float(step + micro_batch)), [3, 0, 4]).sum().backward()
        buffers.reduce()
        assert weight.main_grad.flatten(1).unique(dim=1).flatten().tolist() == [
            rows * (2 * step + 1) for rows in (3, 0, 4)
        ]


def test_what_a_kernel_overwrites_is_not_zeroed_but_stale():
    params = parameters(torch.float32)
    buffers = GradBuffers(params, ALONE, torch.float32)
    params[0].overwrites = True
    for p in params:
        p.main_grad.fill_(7.0)
    buffers.zero()
    assert params[0].is_stale
    assert [p.main_grad.flatten()[0].item() for p in params] == [7, 0, 0, 0, 0]
    buffers.reduce()  # no kernel has written it
    assert not params[0].is_stale
    assert buffers.flat.count_nonzero() == 0


def reduced(rank: int, world: int, dtype: torch.dtype) -> list[float]:
    params = parameters(dtype)
    buffers = GradBuffers(params, ParallelContext(ParallelConfig(), world, rank), torch.float32)
    # two steps: the first must not shine through
    for _ in range(2):
        buffers.zero()
        loss(params, 10.0**rank).backward()
        buffers.reduce()
    assert buffers.flat.isfinite().all()
    return [p.main_grad.unique().item() for p in params]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_sum_and_do_not_average(world, dtype):
    total = sum(torch.tensor(10.0**rank).to(dtype).item() for rank in range(world))
    for grads in run_ranks(world, reduced, dtype):
        assert grads[0] == total
        assert grads == pytest.approx([total * (n + 1) for n in range(len(SHAPES))], rel=2e-2)


def tensor_parallel(rank: int, world: int) -> list[float]:
    params = parameters(torch.float64, partial=(1, 3))
    ctx = ParallelContext(ParallelConfig(tensor_model_parallel_size=2), world, rank)
    buffers = GradBuffers(params, ctx, torch.float64)
    loss(params, 10.0**rank).backward()
    buffers.reduce()
    return [p.main_grad.unique().item() / (n + 1) for n, p in enumerate(params)]


def test_shards_are_summed_over_other_data_and_parts_over_their_axis_too():
    """TP 2 x DP 2: ranks 0 and 2 hold the same shard, as do 1 and 3; copies that saw a part are
    summed over all four."""
    shards = {0: 101.0, 1: 1010.0, 2: 101.0, 3: 1010.0}
    for rank, grads in enumerate(run_ranks(4, tensor_parallel)):
        assert grads == [shards[rank], 1111.0, shards[rank], 1111.0, shards[rank]]


LAYERS = 5
WIDTH = 12


def layered(dtype: torch.dtype, rank: int) -> nn.Sequential:
    """Linear layers whose kernel adds the weight's gradient to main_grad itself; the same on each
    rank, bias included."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for number in range(LAYERS):
        weight, bias = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            for shape in ((WIDTH, WIDTH), (WIDTH,))
        )
        weight.sharding = Sharding(f"{number}.weight", (WIDTH, WIDTH))
        bias.sharding = Sharding(f"{number}.bias", (WIDTH,))
        layers.append(ColumnParallelLinear(weight, bias, ALONE))
    return nn.Sequential(*layers)


def micro_batch(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(100 * rank + number), dtype=torch.float64
    ).to(dtype)


def config_of(shards: bool, instances: int) -> ParallelConfig:
    return ParallelConfig(
        use_distributed_optimizer=shards, num_distributed_optimizer_instances=instances
    )


class Spy:
    """Notes in `events` when each bucket's sum begins."""

    def __init__(self, events: list[Any]):
        for name in ("start_reduce_scatter_", "start_all_reduce"):
            setattr(reduction, name, self.spied(getattr(reduction, name), name, events))

    @staticmethod
    def spied(start: Any, name: str, events: list[Any]) -> Any:
        def spy(x: torch.Tensor, axis: Axis, *more: Any) -> Pending:
            events.append((name, axis.name, x.storage_offset()))
            return start(x, axis, *more)

        return spy


def accumulated(
    rank: int,
    world: int,
    dtype: torch.dtype,
    overlap: bool,
    shards: bool,
    instances: int,
    micro_batches: int,
    bucket_size: int | None,
) -> tuple[list[Any], dict[str, Any]]:
    """(what happened when, {name: (span, sums)} of what this rank owns) in the second of two
    steps."""
    model = layered(dtype, rank)
    ctx = ParallelContext(config_of(shards, instances), world, rank)
    wide = torch.promote_types(dtype, torch.float32)
    buffers = GradBuffers(
        model.parameters(), ctx, wide, bucket_size=bucket_size, overlap_grad_reduce=overlap
    )
    events: list[Any] = []
    Spy(events)
    for _ in range(2):
        events.clear()
        buffers.zero(micro_batches)
        for number in range(micro_batches):
            events.append(number)
            model(micro_batch(rank, number, dtype)).double().square().sum().backward()
        events.append("end")
        buffers.reduce()
    owned = {
        p.sharding.name: (getattr(p, "span", (0, p.numel())), p.main_grad.flatten().clone())
        for p in buffers.owned
    }
    return events, owned


def expected_sums(world: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """By plain autograd, in float64."""
    model = layered(torch.float64, 0)
    for rank in range(world):
        for number in range(micro_batches):
            model(micro_batch(rank, number, torch.float64)).square().sum().backward()
    return {p.sharding.name: p.grad.flatten() for p in model.parameters()}


@pytest.mark.parametrize(
    "world, shards, instances, micro_batches, bucket_size",
    [
        (2, False, 1, 3, 100),
        (2, True, 1, 1, 100),
        (2, True, 1, 3, None),
        (4, True, 1, 2, 20),
        (4, True, 2, 2, 100),
        (4, True, 4, 1, 200),
        (4, False, 1, 1, 20),
    ],
)
def test_sums_with_and_without_overlap(world, shards, instances, micro_batches, bucket_size):
    """The ranks of an instance own every element once; the sums are autograd's, and overlap changes
    no bit."""
    args = shards, instances, micro_batches, bucket_size
    whole = expected_sums(world, micro_batches)
    runs = [
        run_ranks(world, accumulated, torch.float64, overlap, *args) for overlap in (False, True)
    ]
    parts = world // instances if shards else 1
    for run in runs:
        for rank, (_, owned) in enumerate(run):
            for name, ((start, stop), sums) in owned.items():
                torch.testing.assert_close(sums, whole[name][start:stop], rtol=1e-12, atol=1e-12)
                assert torch.equal(sums, runs[0][rank % parts if shards else 0][1][name][1]), (
                    "copies are equal, bit for bit"
                )
        for name, values in whole.items():
            spans = sorted(run[rank][1][name][0] for rank in range(parts))
            held = [span for span in spans if span[0] < span[1]]
            assert held[0][0] == 0 and held[-1][1] == len(values)
            assert all(a[1] == b[0] for a, b in zip(held[:-1], held[1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_are_sent_in_the_last_micro_batch_in_order(dtype):
    """A bucket for each layer, from the last to the first; each as soon as it is complete, not
    before."""
    for events, _ in run_ranks(2, accumulated, dtype, True, True, 1, 3, WIDTH * WIDTH + WIDTH):
        sums = [event for event in events if isinstance(event, tuple)]
        assert events == [0, 1, 2, *sums, "end"] and len(sums) == LAYERS, (
            "although kernels return no gradient"
        )
        places = [place for _, _, place in sums]
        assert places == sorted(set(places)) and {name for name, *_ in sums} == {
            "start_reduce_scatter_"
        }
    for events, _ in run_ranks(2, accumulated, dtype, False, True, 1, 3, WIDTH * WIDTH + WIDTH):
        assert events[:4] == [0, 1, 2, "end"] and len(events) == 4 + LAYERS


def unusual(rank: int, world: int) -> tuple[str, list[float]]:
    """(what is said of one micro-batch too many, sums when some parameters get no gradient)"""
    params = parameters(torch.float32)
    buffers = GradBuffers(
        params,
        ParallelContext(ParallelConfig(), world, rank),
        torch.float32,
        bucket_size=1,
        overlap_grad_reduce=True,
    )
    buffers.zero(1)
    loss(params[:2], 1.0).backward()
    buffers.reduce()
    sums = [p.main_grad.flatten()[0].item() for p in params]
    buffers.zero(1)
    loss(params, 1.0).backward()
    try:
        loss(params, 1.0).backward()
    except AssertionError as error:
        return str(error), sums
    return "nothing", sums


def test_parameters_without_gradient_and_a_micro_batch_too_many():
    for said, sums in run_ranks(2, unusual):
        assert said != "nothing" and sums == [2, 4, 0, 0, 0]


def test_one_process_and_no_overlap_have_no_hooks():
    for config in (ParallelConfig(), ParallelConfig(use_distributed_optimizer=True)):
        model = layered(torch.float32, 0)
        buffers = GradBuffers(
            model.parameters(),
            ParallelContext(config),
            torch.float32,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        buffers.gathering.wait_in_forward(model)
        assert not any(p._post_accumulate_grad_hooks for p in buffers.params)
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert all(a is b for a, b in zip(buffers.owned, model.parameters(), strict=True)), (
            "nothing is copied or cut"
        )
        buffers.gathering.start()
        buffers.gathering.wait()


class Slow(Pending):
    """A gather whose values are there only once it was waited for; until then others' parts are
    NaN."""

    waited: list[int] = []

    def __init__(self, x: torch.Tensor, axis: Axis, start: Any):
        self.x = x
        self.place = x.storage_offset()
        mine = x.chunk(axis.size)[axis.rank].clone()
        self.values = start(x.clone(), axis)()
        x.fill_(float("nan"))
        x.chunk(axis.size)[axis.rank].copy_(mine)

    def __call__(self) -> torch.Tensor:
        Slow.waited.append(self.place)
        return self.x.copy_(self.values)


def paired(model: nn.Sequential) -> nn.Sequential:
    """The same layers, the first two in one module."""
    return nn.Sequential(model[:2], *model[2:])


def updated(
    rank: int, world: int, overlap: bool, instances: int, compiled: bool
) -> tuple[list[torch.Tensor], list[int]]:
    """(outputs of each part after each rank has added 1 to what it owns, twice, how many buckets
    had arrived then)."""
    model = paired(layered(torch.float32, rank))
    if compiled:
        model[0].compile(backend="eager")
    buffers = GradBuffers(
        model.parameters(),
        ParallelContext(config_of(True, instances), world, rank),
        torch.float32,
        bucket_size=WIDTH * WIDTH,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    buffers.gathering.wait_in_forward(model)
    start = gathering.start_all_gather_
    gathering.start_all_gather_ = lambda x, axis: Slow(x, axis, start)
    for _ in range(2):
        buffers.zero()
        buffers.reduce()
        assert len(Slow.waited) in (0, LAYERS), (
            "nothing is under way any more when the update begins"
        )
        Slow.waited.clear()
        for part in buffers.owned:
            part.add_(1.0)
        buffers.gathering.start()
    outputs = []
    waited = []
    x = micro_batch(0, 0, torch.float32)
    for part in model:
        x = part(x).detach()
        outputs.append(x)
        waited.append(len(Slow.waited))
    return outputs, waited


@pytest.mark.parametrize(
    "world, instances, compiled",
    [(2, 1, False), (4, 2, False), pytest.param(2, 1, True, marks=pytest.mark.campaign)],
)
def test_weights_arrive_before_they_are_used(world, instances, compiled):
    """Each module waits for its own buckets and no other; without overlap all have arrived
    before."""
    model = paired(layered(torch.float32, 0))
    expected = []
    x = micro_batch(0, 0, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0).add_(1.0)
        for part in model:
            x = part(x)
            expected.append(x)
    for overlap, waited in ((True, list(range(2, LAYERS + 1))), (False, [LAYERS] * (LAYERS - 1))):
        for outputs, found in run_ranks(world, updated, overlap, instances, compiled):
            assert found == waited
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def memory(rank: int, world: int) -> tuple[bool, int, int]:
    model = layered(torch.bfloat16, rank)
    ctx = ParallelContext(config_of(True, 1), world, rank)
    buffers = GradBuffers(model.parameters(), ctx, torch.float32)
    weights = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    inside = all(
        part.untyped_storage().data_ptr() in weights
        and part.data_ptr() % 64 == 0
        and part.main_grad.untyped_storage().data_ptr() == buffers.flat.untyped_storage().data_ptr()
        for part in buffers.owned
        if part.numel()
    )
    return inside, len(weights), sum(weights.values()) - 2 * buffers.flat.numel()


def test_what_a_rank_owns_are_views():
    """One buffer of weights, one of gradients, and no other copy; views begin at 64 bytes."""
    assert run_ranks(2, memory) == [(True, 1, 0)] * 2


def test_building_takes_no_more_memory_than_training():
    """Weights of 2 bytes and gradients of 4: what the parameters had is free before the gradients
    take theirs."""
    ctx = ParallelContext(ParallelConfig())
    ctx.shard = Axis("shard", 2, 0, (0, 1))
    with LiveMemory() as memory:
        params = [nn.Parameter(torch.empty(1 << 16, dtype=torch.bfloat16)) for _ in range(4)]
        for number, p in enumerate(params):
            p.sharding = Sharding(f"p{number}", (1 << 16,))
        buffers = GradBuffers(params, ctx, torch.float32)
        assert memory.live() == 6 * buffers.layout.size
    assert memory.peak <= 6 * buffers.layout.size + 4 * 64
