"""The split layers on two real ranks give the numbers of one, forward and backward, with and
without sequence split."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.parallel import ParallelConfig
from megatron.config.plan.parameters import ParameterSpec
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    embedding,
    vocab_parallel_cross_entropy,
)
from megatron.parallel.random import DropoutSeeds
from megatron.parallel.sharding import ParameterFactory, init_parameters, local_box
from tests.core.model.tiny import tiny_model, tokens
from tests.forkrun import run_ranks

S = 8
B = 2
H = 8
FFN = 12
VOCAB = 13
PADDED = 16
TABLE = [
    ParameterSpec("embedding", (PADDED, H), (("tp", 0),), "normal", 1.0, real_rows=VOCAB),
    ParameterSpec("up.weight", (2, FFN, H), (("tp", 1),), "normal", 1.0),
    ParameterSpec("up.bias", (2, FFN), (("tp", 1),), "normal", 1.0),
    ParameterSpec("down.weight", (H, FFN), (("tp", 1),), "normal", 1.0),
    ParameterSpec("down.bias", (H,), (), "normal", 1.0),
]


def step(ctx):
    """Loss, logits of an embedding -> gated MLP -> tied output, and each parameter's (box,
    gradient)."""
    params = ParameterFactory(TABLE, ctx, torch.float64)
    embedding = VocabParallelEmbedding(params("embedding"), ctx)
    up = ColumnParallelLinear(params("up.weight"), params("up.bias"), ctx)
    down = RowParallelLinear(params("down.weight"), params("down.bias"), ctx)
    output = ColumnParallelLinear(embedding.weight, None, ctx)
    weights = [embedding.weight, up.weight, up.bias, down.weight, down.bias]
    init_parameters(weights, ctx, 1)
    ids = torch.arange(B * (S + 1)).view(B, S + 1) * 5 % VOCAB
    gate, value = up(embedding(ids[:, :-1])).unflatten(-1, (2, -1)).unbind(-2)
    logits = output(down(gate * value))
    loss = vocab_parallel_cross_entropy(logits, ids[:, 1:], vocab_size=VOCAB, tp=ctx.tp)
    values = loss.detach().clone(), logits.detach().clone()
    loss.sum().backward()
    return *values, {
        w.sharding.name: (local_box(w.sharding, ctx), w.sharding.partial, w.grad) for w in weights
    }


def ranks_step(rank, world, sequence_parallel):
    config = ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel)
    return step(ParallelContext(config, world, rank))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_the_numbers_of_one(world, sequence_parallel):
    loss, logits, whole = step(ParallelContext(ParallelConfig()))
    results = run_ranks(world, ranks_step, sequence_parallel)
    close = dict(rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([result[1] for result in results], -1), logits, **close)
    for name, (_, _, grad) in whole.items():
        joined = torch.zeros_like(grad)
        for rank, result in enumerate(results):
            torch.testing.assert_close(result[0], loss, **close)
            box, partial, part = result[2][name]
            if partial or box != results[0][2][name][0] or rank == 0:
                joined[tuple(slice(*span) for span in box)] += part
        torch.testing.assert_close(joined, grad, **close)


def kept_elements(rank, world, sequence_parallel):
    """Elements that a layer split by output feature keeps of its input for backward."""
    config = ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel)
    ctx = ParallelContext(config, world, rank)
    params = ParameterFactory(TABLE, ctx, torch.float64)
    up = ColumnParallelLinear(params("up.weight"), None, ctx)
    kept = []
    x = torch.ones(
        S // world if sequence_parallel else S, B, H, dtype=torch.float64, requires_grad=True
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert up(x * 1).shape == (S, B, 2 * FFN // world)
    return sum(t.numel() for t in kept if t.shape[-1] == H and t.numel() != up.weight.numel())


@pytest.mark.parametrize("world", [2, 4])
def test_only_the_own_part_of_a_gathered_input_is_kept(world):
    assert run_ranks(world, kept_elements, True) == [S // world * B * H] * world
    assert run_ranks(world, kept_elements, False) == [S * B * H] * world


GATED = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    add_qkv_bias=True,
    group_query_attention=True,
    num_query_groups=2,
)


def gpt_losses(rank, world, sequence_parallel, flags):
    config = ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel)
    model = tiny_model(torch.float64, ctx=ParallelContext(config, world, rank), **flags)
    ids, labels = tokens()
    with torch.no_grad():
        return model(ids, labels=labels), model(ids)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("flags", [{}, GATED], ids=["gpt2", "gated"])
def test_the_gpt_on_two_ranks(flags, sequence_parallel):
    expected = gpt_losses(0, 1, False, flags)
    for result in run_ranks(2, gpt_losses, sequence_parallel, flags):
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


class WatchedSeeds(DropoutSeeds):
    """Notes which part of the tensor each site says it drops from."""

    def __init__(self):
        super().__init__(1234, 1, 0)
        self.parts = set()

    def seed(self, layer, site, part=0):
        self.parts.add((site, part))
        return super().seed(layer, site, part)


def dropped_losses(rank, world, sequence_parallel):
    config = ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel)
    model = tiny_model(
        ctx=ParallelContext(config, world, rank), hidden_dropout=0.1, attention_dropout=0.1
    )
    seeds = WatchedSeeds()
    (ids, labels) = tokens()
    with torch.no_grad():
        return model(ids, labels=labels, dropout_seeds=seeds), seeds.parts


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_drop_alike_where_they_hold_the_same(sequence_parallel):
    """Heads differ by rank, so do their masks; the residual stream is the same on both unless it is
    split too."""
    results = run_ranks(2, dropped_losses, sequence_parallel)
    assert torch.equal(results[0][0], results[1][0])
    for rank, (_, parts) in enumerate(results):
        hidden = rank if sequence_parallel else 0
        assert parts == {
            ("attention", rank),
            *((site, hidden) for site in ("embedding", "attention_output", "mlp_output")),
        }


def one_rank_of(tp, tp_rank):
    return SimpleNamespace(
        tp=Axis("tp", tp, tp_rank), sequence_parallel=False, shares_weights=False
    )


def test_a_gated_matrix_keeps_gate_and_up_together():
    """Each rank's part of [2, ffn, h] holds matching rows of both halves."""
    parts = [
        ParameterFactory(TABLE, one_rank_of(2, rank), torch.float32)("up.weight") for rank in (0, 1)
    ]
    assert [tuple(p.shape) for p in parts] == [(2, FFN // 2, H)] * 2
    assert [local_box(p.sharding, one_rank_of(2, rank))[1] for rank, p in enumerate(parts)] == [
        (0, 6),
        (6, 12),
    ]


def test_no_dense_gradient_of_the_embedding_is_made_on_a_device():
    """On the meta device, whose operations are a GPU's."""
    weight = torch.nn.Parameter(torch.zeros(1000, 4, dtype=torch.bfloat16, device="meta"))
    weight.main_grad = torch.ones(1000, 4, device="meta")
    ids = torch.zeros(20, 5, dtype=torch.int64, device="meta")
    out = embedding(ids, weight)
    with Sizes() as sizes:
        out.backward(torch.zeros_like(out))
    assert sizes.made < 1000 and weight.grad is None
    assert "index_put_" in sizes.names


@pytest.mark.parametrize("count", [1, 300])
def test_rows_are_added_as_on_a_device(count):
    """index_put_, which CUDA takes, against the definition."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(7, (count,), generator=generator)
    rows = torch.randn(count, 4, generator=generator)
    total = torch.ones(7, 4)
    total.index_put_((ids,), rows, accumulate=True)
    wanted = torch.ones(7, 4, dtype=torch.float64).index_add_(0, ids, rows.double())
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-5)


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes anew, and names of operations."""

    made = 0
    names = frozenset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.names |= {name}
        if isinstance(out, torch.Tensor) and not name.endswith("_"):
            self.made = max(self.made, out.numel())
        return out


@pytest.mark.parametrize(
    "dtype, buffer",
    [
        (torch.float32, None),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_a_frequent_token_gets_its_whole_gradient(dtype, buffer):
    """2000 small gradients of one row, 20 of another: summed as in fp64 and rounded once, also when
    added to more."""
    weight = torch.nn.Parameter(torch.zeros(7, 4, dtype=dtype))
    if buffer is not None:
        weight.main_grad = torch.ones(7, 4, dtype=buffer)
    ids = (torch.arange(2020) < 20).long().view(20, 101) * 3
    grad = (1e-3 * torch.rand(20, 101, 4, generator=torch.Generator().manual_seed(1))).to(dtype)
    embedding(ids, weight).backward(grad)
    expected = torch.zeros(7, 4, dtype=torch.float64).index_add_(
        0, ids.flatten(), grad.double().flatten(0, 1)
    )
    if buffer is None:
        got = weight.grad
        step = torch.finfo(dtype).eps
    else:
        assert weight.grad is None
        got = weight.main_grad
        step = torch.finfo(buffer).eps
        expected = expected + 1
    assert expected[0].min() > 0.5 and not got.isnan().any()
    torch.testing.assert_close(
        got.double(), expected, rtol=max(step, 1e-5 if dtype != torch.float64 else 0), atol=1e-9
    )
