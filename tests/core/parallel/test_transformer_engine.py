"""Layers of Transformer Engine (a stand-in for it) on real ranks against one rank of ours."""

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.kernels.kernels import Kernels
from megatron.kernels.transformer_engine import TransformerEngine
from megatron.parallel.context import ParallelContext
from megatron.parallel.fsdp import ShardedBuffers
from megatron.parallel.sharding import local_box
from tests.core.kernels.fake_libraries import pretend_cuda
from tests.core.model.tiny import loss_and_grads, tiny_model, tokens
from tests.forkrun import run_ranks

FLAGS = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}


def ranks_step(rank, world, sequence_parallel):
    """Loss and each parameter's (box, partial axes, gradient) of a model whose layers are
    Transformer Engine's."""
    pretend_cuda()
    ctx = ParallelContext(
        ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel),
        world,
        rank,
    )
    model = tiny_model(
        torch.float64,
        ctx=ctx,
        kernels=Kernels(
            "transformer_engine", transformer_engine=TransformerEngine(accumulate=False)
        ),
        **FLAGS,
    )
    loss, grads = loss_and_grads(model)
    boxes = {
        p.sharding.name: (local_box(p.sharding, ctx), p.sharding.partial)
        for p in model.parameters()
    }
    return loss, {name: (*boxes[name], grad) for name, grad in grads.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_of_its_layers_give_the_numbers_of_one_of_ours(sequence_parallel):
    loss, whole = loss_and_grads(tiny_model(torch.float64, **FLAGS))
    results = run_ranks(2, ranks_step, sequence_parallel)
    for name, grad in whole.items():
        joined = torch.zeros_like(grad)
        for their_loss, theirs in results:
            torch.testing.assert_close(their_loss, loss, rtol=1e-9, atol=1e-11)
            box, partial, part = theirs[name]
            place = joined[tuple(slice(*span) for span in box)]
            if "tp" in partial:
                place += part
            else:
                place.copy_(part)
        torch.testing.assert_close(joined, grad, rtol=1e-8, atol=1e-11)


def shared_step(rank, world, strategy):
    """The name, the range and the sums of what this rank owns, after two micro-batches through
    layers of Transformer Engine whose ranks share gradients, or weights too."""
    pretend_cuda()
    ctx = ParallelContext(ParallelConfig(data_parallel_sharding_strategy=strategy), world, rank)
    ctx.shares_weights = False  # the model is filled before the buffers are made
    engine = TransformerEngine(accumulate=True)
    kernels = Kernels("transformer_engine", transformer_engine=engine)
    model = tiny_model(torch.float64, ctx=ctx, kernels=kernels, **FLAGS)
    buffers = ShardedBuffers(
        list(model.parameters()),
        ctx,
        torch.float64,
        frees_weights=strategy == "optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    buffers.gathering.wait_in_forward(torch.nn.ModuleList([model]))
    backward = buffers.each_backward(lambda loss, gradient: loss.backward())
    ids, labels = tokens()
    buffers.zero()
    for _ in range(2):
        backward(model(ids, labels=labels).mean(), None)
    buffers.reduce()
    return [(p.sharding.name, p.span, p.main_grad.clone()) for p in buffers.owned]


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_ranks_that_share_its_weights_have_the_sums_of_ours(strategy):
    """Two ranks with two micro-batches each: four times the gradient."""
    _, whole = loss_and_grads(tiny_model(torch.float64, **FLAGS))
    for owned in run_ranks(2, shared_step, strategy):
        for name, (start, stop), sums in owned:
            expected = 4 * whole[name].flatten()[start:stop]
            torch.testing.assert_close(sums, expected, rtol=1e-8, atol=1e-11)


LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --mock-data"
).split()
