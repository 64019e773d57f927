"""Weights that differ between data-parallel ranks are found, and the rank is named."""

import pytest
import torch
from torch import nn

from megatron.addons.ops.weights import hook as weight_check
from megatron.addons.ops.weights.hook import WeightsDiffer, check_replicas
from megatron.config import run_directory
from megatron.config.parallel import ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.training.weight_check import weight_hashes
from tests.forkrun import RanksFailed, run_ranks
from tests.problems import assert_problem
from tests.runs import NO_DROPOUT, SMALL, train, with_flags


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_counts(dtype):
    weight = torch.randn(33, generator=torch.Generator().manual_seed(1)).to(dtype)
    [before] = weight_hashes([weight])
    bits = weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize])
    for bit in range(8 * weight.itemsize - 1):
        bits[7] ^= 1 << bit
        assert weight_hashes([weight]) != [before]
        bits[7] ^= 1 << bit
    assert weight_hashes([weight]) == [before]


def test_a_permutation_with_equal_sums_is_seen():
    assert weight_hashes([torch.tensor([3, 1, 2], dtype=torch.int32).view(torch.float32)]) != [
        weight_hashes([torch.tensor([2, 2, 2], dtype=torch.int32).view(torch.float32)])[0]
    ]


def _differs(rank: int, world: int, wrong: tuple[int, ...]) -> tuple[str, ...]:
    context = ParallelContext(ParallelConfig(), world, rank)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    check_replicas(list(model.named_parameters()), context.dp_cp, 7)
    if rank in wrong:
        model[1].weight.data[2, 3] += 1e-3
    try:
        check_replicas(list(model.named_parameters()), context.dp_cp, 8)
    except WeightsDiffer as error:
        return (str(error),)
    return ()


def test_the_rank_that_differs_is_named():
    for found in run_ranks(3, _differs, (2,)):
        [message] = found
        assert_problem(message, "weights-differ", "iteration 8", "1.weight", "rank 2 (", "1 of 4")


def test_of_two_ranks_both_are_named():
    for found in run_ranks(2, _differs, (1,)):
        [message] = found
        assert_problem(message, "weights-differ", "rank 0 (", "rank 1 (")


def _break_rank_1() -> None:
    """A hook: the weights of rank 1 change in iteration 4, as a faulty memory would change them."""
    real = weight_check.check_replicas

    def check(named, replicas, iteration):
        if iteration == 4 and replicas.rank == 1 and named:
            named[0][1].data.view(-1)[5] += 1.0
        real(named, replicas, iteration)

    weight_check.check_replicas = check


def test_a_run_ends_before_it_saves_such_weights(tmp_path):
    flags = "--train-iters 6 --mock-data --save-interval 2 --check-weight-hash-across-dp-replicas-"
    words = [*with_flags(SMALL), *NO_DROPOUT, *f"{flags}interval 2".split()]
    with pytest.raises(RanksFailed, match="weights-differ"):
        train(tmp_path, [*words, "--save", str(tmp_path / "save")], world=2, hook=_break_rank_1)
    assert run_directory.iterations(tmp_path / "save") == [2]
