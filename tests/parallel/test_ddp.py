"""Gradient buffers: where gradients lie, in which format they add up, what the ranks sum."""
from __future__ import annotations

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.ddp import GradBuffers
from megatron.parallel.sharding import Sharding
from tests.forkrun import run_ranks

SHAPES = [(3, 5), (7,), (1,), (16, 16), (4, 2, 3)]
ALONE = ParallelContext(ParallelConfig())


def parameters(dtype: torch.dtype, partial: tuple[int, ...] = ()) -> list[torch.nn.Parameter]:
    """Ones of all shapes; those of the numbers in `partial` see part of their gradient on each tensor-parallel rank."""
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    for n, p in enumerate(params):
        p.sharding = Sharding(f"p{n}", SHAPES[n], partial=("tp",) if n in partial else ())
    return params


def loss(params: list[torch.nn.Parameter], factor: float) -> torch.Tensor:
    """Its gradient is factor x (number of the parameter + 1) everywhere."""
    return sum(((n + 1) * factor * p.float()).sum() for n, p in enumerate(params))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layout(grad_dtype):
    """One buffer, last parameters first; every view starts at a multiple of 64 bytes of the smaller format, none overlap."""
    params = parameters(torch.float32)
    frozen = torch.nn.Parameter(torch.ones(9), requires_grad=False)
    buffers = GradBuffers([params[0], frozen, *params[1:]], ALONE, grad_dtype)
    assert all(a is b for a, b in zip(buffers.params, reversed(params), strict=True))
    assert not hasattr(frozen, "main_grad")
    ends, itemsize = 0, min(4, grad_dtype.itemsize)
    for p in buffers.params:
        start = p.main_grad.storage_offset() * itemsize
        assert start % 64 == 0 and start == ends and p.main_grad.shape == p.shape and p.main_grad.dtype == grad_dtype
        assert p.main_grad.untyped_storage().data_ptr() == buffers.flat.untyped_storage().data_ptr()
        ends = start + -(-p.numel() * itemsize // 64) * 64
    assert buffers.flat.numel() * itemsize == ends and buffers.flat.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_formats_share_memory(dtype):
    """p.grad is the buffer's view: autograd adds in place; zero() gives back what a step took away."""
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
    """1000 micro-batches of 1/1024 make 1000/1024 (bf16 would stop at 1/4); p.grad is let go each time."""
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
    """A weight-gradient kernel writes to main_grad and gives autograd nothing; other parameters may go unused."""
    params = parameters(torch.bfloat16)
    GradBuffers(params, ALONE, torch.float32)
    params[0].main_grad += 3.0
    loss(params[1:2], 1.0).backward()
    assert [p.main_grad.flatten()[0].item() for p in params] == [3, 1, 0, 0, 0]


def reduced(rank: int, world: int, dtype: torch.dtype) -> list[float]:
    params = parameters(dtype)
    buffers = GradBuffers(params, ParallelContext(ParallelConfig(), world, rank), torch.float32)
    for _ in range(2):                                   # two steps: the first must not shine through
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
    """TP 2 x DP 2: ranks 0 and 2 hold the same shard, as do 1 and 3; copies that saw a part are summed over all four."""
    shards = {0: 101.0, 1: 1010.0, 2: 101.0, 3: 1010.0}
    for rank, grads in enumerate(run_ranks(4, tensor_parallel)):
        assert grads == [shards[rank], 1111.0, shards[rank], 1111.0, shards[rank]]
