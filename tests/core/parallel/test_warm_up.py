"""Every communicator of a layout is made before the first step, without deadlock, and one that does
not answer is named."""

import contextlib
import io
import time

import pytest
import torch

from megatron import device as devices
from megatron import log
from megatron.config.parallel import ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.warm_up import make_communicators
from tests.forkrun import run_ranks
from tests.runs import SMALL, train, with_flags

CPU = torch.device("cpu")


def warm(rank: int, world: int, sizes: dict, options: dict, late: float = 0.0) -> tuple:
    ctx = ParallelContext(ParallelConfig(**sizes), world, rank)
    said = io.StringIO()
    if rank == 0:
        time.sleep(late)
    with contextlib.redirect_stdout(said):
        made = make_communicators(ctx, CPU, **options)
    return made, said.getvalue()


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("ring", [False, True])
def test_every_pair_of_stages(stages, ring):
    sizes = {"pipeline_model_parallel_size": stages}
    results = run_ranks(stages, warm, sizes, {"ring": ring, "tied": True})
    pairs = [name for made, _ in results for name in made if name.startswith("pp ")]
    expected = stages if ring and stages > 2 else stages - 1
    assert len(pairs) == 2 * expected and len(set(pairs)) == expected
    gradients = [name for made, _ in results for name in made if name.startswith("pp_gradients ")]
    assert len(gradients) == len(pairs)
    assert all(not said for _, said in results)
    assert "ends" in results[0][0] and "ends" in results[-1][0]


def test_axes_of_equal_ranks_are_made_once():
    sizes = {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True}
    for made, _ in run_ranks(4, warm, sizes, {}):
        assert made == ["tp", "shard", "optimizer"]


def test_what_does_not_answer_is_named():
    results = run_ranks(2, warm, {}, {"limit_seconds": 0.2}, 1.0)
    assert results[0][1] == ""
    assert "instances" in results[1][1] and "ranks 0 1" in results[1][1]


def on_an_accelerator() -> None:
    """As if the CPU were one; every detail is printed."""
    devices.BACKENDS["cpu"] = "gloo"
    log.detail = log.print_rank_0


def test_a_run_makes_them_before_its_first_step(tmp_path):
    flags = ("--pipeline-model-parallel-size", "2", "--mock-data", "--train-iters", "4")
    words = with_flags(SMALL, *flags, "--eval-iters", "0")
    text = train(tmp_path, words, 2, hook=on_an_accelerator).first_rank_log
    (line,) = [line for line in text.splitlines() if "pp_gradients" in line]
    assert line.endswith("ends, pp 0-1, pp_gradients 0-1")
    assert text.index(line) < text.index("[before the start of training step]")
