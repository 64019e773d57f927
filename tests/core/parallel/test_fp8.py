"""Scales of 8-bit layers: the same on ranks that share a layer as on one, and delayed ones by their
rule done by hand."""

import math

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.plan.parameters import ParameterSpec
from megatron.config.precision import PrecisionConfig
from megatron.parallel import fp8
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.sharding import ParameterFactory, init_parameters, local_box
from tests.forkrun import run_ranks

S = 16
B = 2
H = 32
FFN = 64
TABLE = [
    ParameterSpec("up.weight", (FFN, H), (("tp", 0),), "normal", 0.02),
    ParameterSpec("down.weight", (H, FFN), (("tp", 1),), "normal", 0.02),
]
TENSORWISE = PrecisionConfig(fp8="hybrid", fp8_recipe="tensorwise")
DELAYED = PrecisionConfig(fp8="hybrid", fp8_amax_history_len=3)


def part(x: torch.Tensor, ctx: ParallelContext, dim: int) -> torch.Tensor:
    return x.chunk(ctx.tp.size, dim)[ctx.tp.rank].clone()


def step(ctx, precision, steps=1):
    """Outputs and gradients of a column and a row layer on inputs whose parts differ in size, after
    `steps` of scaling."""
    params = ParameterFactory(
        TABLE,
        ctx,
        torch.float32,
        make_scaling=lambda name: fp8.LayerScaling(name, precision, ctx, "cpu"),
    )
    up = ColumnParallelLinear(params("up.weight"), None, ctx, params.scaling("up"))
    down = RowParallelLinear(params("down.weight"), None, ctx, params.scaling("down"))
    init_parameters([up.weight, down.weight], ctx, 1)
    with torch.no_grad():
        if ctx.tp.rank == ctx.tp.size - 1:  # the last part of each weight is larger
            up.weight[-1] *= 20
            down.weight[:, -1] *= 20
    state = fp8.delayed_scaling(torch.nn.ModuleList([up, down]), precision, ctx)
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(S, B, width, generator=generator) for width in (H, FFN, FFN, H)]
    for x in whole:
        x[..., -1] *= 30  # and so are the last features, and tokens
        x[-1] *= 3
    across = ctx.sequence_parallel
    for number in range(steps):
        up.weight.grad = down.weight.grad = None
        x, middle, grad_up, grad_down = [x * (1 + number) for x in whole]
        x, grad_down = (part(t, ctx, 0) if across else t.clone() for t in (x, grad_down))
        x = x.requires_grad_()
        middle = part(middle, ctx, -1).requires_grad_()
        outs = up(x), down(middle)
        torch.autograd.backward(outs, (part(grad_up, ctx, -1), grad_down))
        if state:
            state.step(updated=True)
    return (
        [outs[0].detach(), outs[1].detach(), x.grad, middle.grad],
        [(local_box(w.sharding, ctx), w.grad) for w in (up.weight, down.weight)],
        {name: tensor.clone() for name, (_, tensor) in state.tensors().items()} if state else {},
    )


def ranks_step(rank, world, sequence_parallel, precision, steps):
    config = ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel)
    return step(ParallelContext(config, world, rank), precision, steps)


def assert_ranks_give_the_numbers_of_one(sequence_parallel, precision, steps):
    values, weights, state = step(ParallelContext(ParallelConfig()), precision, steps)
    ranks = run_ranks(2, ranks_step, sequence_parallel, precision, steps)
    # the same casts: sums in another order are all the difference
    close = dict(rtol=2e-6, atol=1e-5)
    joined = [
        torch.cat([rank[0][0] for rank in ranks], -1),
        ranks[0][0][1],
        ranks[0][0][2],
        torch.cat([rank[0][3] for rank in ranks], -1),
    ]
    if sequence_parallel:
        joined[1], joined[2] = (torch.cat([rank[0][i] for rank in ranks]) for i in (1, 2))
    for got, one in zip(joined, values, strict=True):
        torch.testing.assert_close(got, one, **close)
    for rank in ranks:
        for (box, got), (_, one) in zip(rank[1], weights, strict=True):
            torch.testing.assert_close(
                got, one[tuple(slice(*span) for span in box)], **close | {"atol": 1e-3}
            )
        assert rank[2].keys() == state.keys() and all(
            torch.equal(rank[2][name], state[name]) for name in state
        )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "precision, steps",
    [(TENSORWISE, 1), (DELAYED, 1), (DELAYED, 3)],
    ids=["tensorwise", "delayed, first step", "delayed, third step"],
)
def test_ranks_cast_to_the_numbers_of_one(sequence_parallel, precision, steps):
    assert_ranks_give_the_numbers_of_one(sequence_parallel, precision, steps)


@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scales_by_hand(algorithm, margin):
    """Eight steps of two micro-batches, with zeros, infinities and NaN among the maxima, against
    Python's floats."""
    precision = PrecisionConfig(
        fp8="hybrid", fp8_margin=margin, fp8_amax_history_len=3, fp8_amax_compute_algo=algorithm
    )
    ctx = ParallelContext(ParallelConfig())
    layer = fp8.LayerScaling("one", precision, ctx, "cpu")
    model = torch.nn.Module()
    model.scaling = layer
    state = fp8.delayed_scaling(model, precision, ctx)
    maxima = [4.0, 0.5, 2.0, math.inf, 0.0, math.nan, 8.0, 1.0]
    scale = 0.0
    history = []
    for number, amax in enumerate(maxima):
        used = layer.scale(0, torch.tensor(amax / 4), True)
        again = layer.scale(0, torch.tensor(amax), True)
        layer.scale(1, torch.tensor(1.0), True)
        # an evaluation leaves no trace
        layer.scale(0, torch.tensor(1e9), False)
        back = layer.scale(2, torch.tensor(amax), True)
        if number == 0:
            # scaled by themselves
            assert (used[0], again[0], back[0]) == (448.0, 112.0, 57344.0 / 4)
        elif math.isfinite(amax):
            assert used[0] == again[0] == torch.tensor(scale)
        state.step(updated=True)
        history = [amax if math.isfinite(amax) else 0.0, *history][:3]
        counted = history[0] if algorithm == "most_recent" else max(history)
        scale = 448.0 / counted / 2**margin if counted else scale or 1.0
        assert layer.state[0].tolist() == pytest.approx(
            [scale, *history, *[0.0] * (3 - len(history))]
        )
        assert layer.state[1, 0] == 448.0 / 2**margin and not layer.step_amax.any()
    assert layer.state[2, 0] == 57344.0 / (1.0 if algorithm == "most_recent" else 8.0) / 2**margin


def test_a_tensor_of_zeros_has_a_scale_from_the_first_step():
    ctx = ParallelContext(ParallelConfig())
    model = torch.nn.Module()
    model.scaling = fp8.LayerScaling("one", DELAYED, ctx, "cpu")
    state = fp8.delayed_scaling(model, DELAYED, ctx)
    model.scaling.scale(0, torch.zeros(()), True)
    state.step(updated=True)
    assert model.scaling.state[:, 0].tolist() == [1.0, 1.0, 1.0] and model.scaling.has_scales
    state.loaded()
    assert model.scaling.has_scales
    state.state.zero_()
    state.loaded()
    assert not model.scaling.has_scales
