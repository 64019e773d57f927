"""The split layers on two real ranks give the numbers of one, forward and backward, with and without sequence split."""

from types import SimpleNamespace

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.parameters import ParameterSpec
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.parallel.sharding import ParameterFactory, init_parameters, local_box
from tests.forkrun import run_ranks
from tests.model.tiny import tiny_model, tokens

S, B, H, FFN, VOCAB, PADDED = 8, 2, 8, 12, 13, 16
TABLE = [ParameterSpec("embedding", (PADDED, H), (("tp", 0),), "normal", 1.0, real_rows=VOCAB),
         ParameterSpec("up.weight", (2, FFN, H), (("tp", 1),), "normal", 1.0),
         ParameterSpec("up.bias", (2, FFN), (("tp", 1),), "normal", 1.0),
         ParameterSpec("down.weight", (H, FFN), (("tp", 1),), "normal", 1.0),
         ParameterSpec("down.bias", (H,), (), "normal", 1.0)]


def step(ctx):
    """Loss, logits of an embedding -> gated MLP -> tied output, and each parameter's (box, gradient)."""
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
    return *values, {w.sharding.name: (local_box(w.sharding, ctx), w.sharding.partial, w.grad) for w in weights}


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


GATED = dict(position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
             add_qkv_bias=True, group_query_attention=True, num_query_groups=2)


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


def one_rank_of(tp, tp_rank):
    return SimpleNamespace(tp=Axis("tp", tp, tp_rank), sequence_parallel=False)


def test_a_gated_matrix_keeps_gate_and_up_together():
    """Each rank's part of [2, ffn, h] holds matching rows of both halves."""
    parts = [ParameterFactory(TABLE, one_rank_of(2, rank), torch.float32)("up.weight") for rank in (0, 1)]
    assert [tuple(p.shape) for p in parts] == [(2, FFN // 2, H)] * 2
    assert [local_box(p.sharding, one_rank_of(2, rank))[1] for rank, p in enumerate(parts)] == [(0, 6), (6, 12)]


