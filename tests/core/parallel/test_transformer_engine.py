"""Layers of Transformer Engine (a stand-in for it) on real ranks: one rank of ours, and exchanged
checkpoints."""

from __future__ import annotations

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.kernels.kernels import Kernels
from megatron.kernels.transformer_engine import TransformerEngine
from megatron.parallel.context import ParallelContext
from megatron.parallel.sharding import local_box
from tests.core.kernels.fake_libraries import pretend_cuda
from tests.core.model.tiny import loss_and_grads, tiny_model
from tests.forkrun import run_ranks
from tests.runs import NO_DROPOUT, SMALL, same_tensors, train, with_flags

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


LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --mock-data"
).split()
ENGINE = "--transformer-impl transformer_engine --device auto".split()


@pytest.mark.campaign
def test_checkpoints_go_from_one_to_the_other_and_back(tmp_path):
    base = with_flags([*SMALL, *NO_DROPOUT, *LLAMA], "--save-interval", "3")

    def run(name: str, iterations: int, *more: str, world: int = 1, load: str = ""):
        flags = with_flags(
            base,
            "--train-iters",
            "9",
            "--exit-interval",
            str(iterations),
            *more,
            "--save",
            str(tmp_path / name / "save"),
        )
        if load:
            flags += ["--load", str(tmp_path / load / "save")]
        return train(
            tmp_path / name,
            flags,
            world,
            hook=pretend_cuda if "--transformer-impl" in more else None,
        )

    ours = run("ours", 6)
    theirs = run("theirs", 6, *ENGINE)
    split = run(
        "split", 6, *ENGINE, "--tensor-model-parallel-size", "2", "--sequence-parallel", world=2
    )
    assert "Transformer Engine" in " ".join(theirs.first_rank_log.split())
    assert ours.tensors(6).keys() == theirs.tensors(6).keys() == split.tensors(6).keys()
    for other in (theirs, split):
        assert [row["iteration"] for row in other.rows] == list(range(1, 7))
        for mine, row in zip(ours.rows, other.rows, strict=True):
            assert row["lm_loss"] == pytest.approx(mine["lm_loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-3)
    to_theirs = run("to theirs", 9, *ENGINE, load="ours")
    to_ours = run("to ours", 9, load="theirs")
    back = run("back", 9, load="ours")
    for other in (to_theirs, to_ours):
        assert [row["iteration"] for row in other.rows] == [7, 8, 9]
        for mine, row in zip(back.rows, other.rows, strict=True):
            assert row["lm_loss"] == pytest.approx(mine["lm_loss"], rel=1e-4)
    same_tensors(run("again", 6, *ENGINE).tensors(6), theirs.tensors(6))
