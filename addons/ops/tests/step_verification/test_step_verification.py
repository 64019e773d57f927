"""--verify-step-interval: a run that is verified is the run that is not, and a wrong gradient is
found, with the rank that computed it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.addons.ops.step_verification.hook import StepVerification
from megatron.addons.ops.step_verification.repeated_sums import UnitSums
from megatron.parallel import fsdp, gathering, reduction
from megatron.parallel.collectives import Pending
from megatron.parallel.context import Axis
from megatron.training import loop
from tests.core.parity.layouts import INSTANCES, MOE, ZERO2, ZERO3
from tests.forkrun import RanksFailed
from tests.runs import SMALL, same_tensors, train, with_flags, write_text

EXACT = ("iteration", "lm_loss", "grad_norm", "learning_rate")
LAYOUTS = {
    "one rank": (1, ()),
    "dp 2": (2, ()),
    "dp 2, overlap, distributed": (
        2,
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "dp 3": (3, ("--global-batch-size", "12")),
    "tp 2": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "pp 2 dp 2": (4, ("--pipeline-model-parallel-size", "2")),
    "cp 2 dp 2": (4, ("--context-parallel-size", "2")),
    "dp 2, experts": (
        2,
        (*MOE, "--moe-router-load-balancing-type", "aux_loss", "global_aux_loss")
        + ("--moe-aux-loss-coeff", "1e-2", "1e-2"),
    ),
    "dp 2, fp16": (2, ("--fp16",)),
    "dp 2, ZeRO-2": (2, ZERO2),
    "dp 4, ZeRO-3 in 2 instances": (4, (*ZERO3, *INSTANCES)),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 300)


def argv(text: str, folder: Path, *more: str) -> list[str]:
    mine = ["--data-path", text, "--split", "100,0,0", "--train-iters", "6", "--eval-iters", "0"]
    save = ["--save", str(folder / "save"), "--save-interval", "6"]
    return with_flags([*SMALL, *mine, *save], *more)


def flip(rank: int, first: int, last: int | None = None) -> None:
    """Hook: in its `first` to `last` computation of gradients (default: only that one) this rank
    has a wrong number."""
    count = 0
    right = StepVerification._hash

    def wrong(self) -> str:
        nonlocal count
        count += 1
        if first <= count <= (last or first) and int(os.environ["RANK"]) == rank:
            self._run.buffers.flat.view(-1)[5] += 1e-3
        return right(self)

    StepVerification._hash = wrong


def flip_unit(rank: int, at: int) -> None:
    """Hook: the gradients of the `at`-th unit that this rank is about to sum have a wrong number."""
    count = 0
    right = UnitSums.__call__

    def wrong(self, piece) -> Callable[[], torch.Tensor]:
        nonlocal count
        count += 1
        if count == at and int(os.environ["RANK"]) == rank:
            piece.bucket.params[0].main_grad.view(-1)[5] += 1e-3
        return right(self, piece)

    UnitSums.__call__ = wrong


def _broken(places: Sequence[str], rank: int, first: int, last: int | None = None) -> None:
    """Hook: what arrives in the `first` to `last` call (default: only that one) of these collectives
    has a wrong bit on this rank."""
    count = 0

    def of(right: Callable[..., Pending]) -> Callable[..., Pending]:
        def wrong(x: torch.Tensor, axis: Axis, *more: object) -> Pending:
            nonlocal count
            count += 1
            pending = right(x, axis, *more)
            if first <= count <= (last or first) and int(os.environ["RANK"]) == rank:
                result = pending._result
                pending._result = lambda: _flipped(result())
            return pending

        return wrong

    for place in places:
        for module in (gathering if "gather" in place else reduction, fsdp):
            setattr(module, place, of(getattr(module, place)))


def _flipped(x: torch.Tensor) -> torch.Tensor:
    x.view(-1).view(torch.int32)[7] ^= 1 << 3
    return x


def _problem(error: pytest.ExceptionInfo) -> str:
    """The line with the code."""
    return next(line for line in str(error.value).splitlines() if "-differ]" in line)


SUMS = ("start_all_reduce", "start_reduce_scatter_")


@pytest.mark.parametrize(
    ("flags", "rank", "at"),
    [
        (("--use-distributed-optimizer",), 1, 2),
        pytest.param((), 0, 2, marks=pytest.mark.campaign),
        pytest.param((), 1, 3, marks=pytest.mark.campaign),
        # behind two micro-batches of four units of iteration 1, and twice those of the other samples
        *(pytest.param(ZERO3, 1, at, marks=pytest.mark.campaign) for at in (25, 26)),
    ],
)
def test_a_wrong_sum_of_gradients_is_found(text, tmp_path, flags, rank, at):
    """The first of a run is that of iteration 1, which is not verified."""
    words = argv(text, tmp_path, *flags, "--verify-step-interval", "2")
    hook = functools.partial(_broken, SUMS, rank, at)
    with pytest.raises(RanksFailed, match="gradients-differ") as error:
        train(tmp_path, words, 2, hook=hook)
    problem = _problem(error)
    assert f"rank {rank} (" in problem and f"rank {1 - rank} (" not in problem


@pytest.mark.campaign
@pytest.mark.parametrize("at", [2, 3])
def test_the_majority_of_sums_is_used(text, tmp_path, at):
    world, flags = LAYOUTS["dp 2, overlap, distributed"]
    plain = train(tmp_path / "plain", argv(text, tmp_path / "plain", *flags), world)
    folder = tmp_path / "verified"
    words = argv(text, folder, *flags, "--verify-step-interval", "2")
    words = [*words, "--verify-step-action", "majority"]
    verified = train(folder, words, world, hook=functools.partial(_broken, SUMS, 1, at))
    assert verified.series(*EXACT) == plain.series(*EXACT)
    same_tensors(verified.tensors(), plain.tensors())
    (line,) = [text for text in verified.first_rank_log.splitlines() if "WARNING: " in text]
    assert "rank 1 (" in line


@pytest.mark.campaign
def test_a_replica_that_is_wrong_twice_is_outvoted(text, tmp_path):
    """Both sums have the same wrong bit; of three replicas two agree."""
    world, flags = LAYOUTS["dp 3"]
    words = argv(text, tmp_path, *flags, "--verify-step-interval", "2")
    hook = functools.partial(_broken, SUMS, 2, 2, 3)
    with pytest.raises(RanksFailed, match="gradients-differ") as error:
        train(tmp_path, words, world, hook=hook)
    problem = _problem(error)
    assert "rank 2 (" in problem and "rank 0 (" not in problem and "rank 1 (" not in problem


def _other_norm() -> None:
    """Hook: rank 1 has read another gradient norm."""
    right = loop.train_step

    def wrong(*args):
        result = right(*args)
        shift = 1e-12 * int(os.environ["RANK"])
        return replace(result, grad_norm=result.grad_norm + shift)

    loop.train_step = wrong


@pytest.mark.campaign
def test_a_number_that_is_not_the_same_on_all_ranks_is_found(text, tmp_path):
    words = argv(text, tmp_path, "--verify-step-interval", "2")
    with pytest.raises(RanksFailed, match="gradients-differ"):
        train(tmp_path, words, 2, hook=_other_norm)


def test_a_wrong_message_with_weights_is_found(text, tmp_path):
    """It arrives after the update of iteration 2."""
    flags = ("--use-distributed-optimizer", "--verify-step-interval", "2")
    hook = functools.partial(_broken, ("start_all_gather_",), 1, 2)
    with pytest.raises(RanksFailed, match="weights-differ"):
        train(tmp_path, argv(text, tmp_path, *flags), 2, hook=hook)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.campaign] if world > 1 else [])
        for name, (world, _) in LAYOUTS.items()
    ],
)
def test_a_verified_run_is_the_same_run(text, tmp_path, name):
    world, flags = LAYOUTS[name]
    plain = train(tmp_path / "plain", argv(text, tmp_path / "plain", *flags), world)
    verified = train(
        tmp_path / "verified",
        argv(text, tmp_path / "verified", *flags, "--verify-step-interval", "2"),
        world,
    )
    assert verified.series(*EXACT) == plain.series(*EXACT)
    same_tensors(verified.tensors(), plain.tensors())


@pytest.mark.parametrize(
    ("name", "rank", "at"),
    [
        ("one rank", 0, 2),
        ("dp 2", 1, 2),
        pytest.param("one rank", 0, 1, marks=pytest.mark.campaign),
        pytest.param("dp 3", 1, 1, marks=pytest.mark.campaign),
        pytest.param("dp 3", 2, 2, marks=pytest.mark.campaign),
    ],
)
def test_a_wrong_gradient_is_found(text, tmp_path, name, rank, at):
    world, flags = LAYOUTS[name]
    words = argv(text, tmp_path, *flags, "--verify-step-interval", "2")
    with pytest.raises(RanksFailed, match="gradients-differ") as error:
        train(tmp_path, words, world, hook=functools.partial(flip, rank, at))
    assert f"rank {rank} (" in str(error.value)


@pytest.mark.campaign
@pytest.mark.parametrize("at", [3, 12, 17])
def test_a_wrong_gradient_of_a_unit_is_found(text, tmp_path, at):
    """In the computation of the other rank's samples, of its own, and again in the next one."""
    words = argv(text, tmp_path, *ZERO3, "--verify-step-interval", "2")
    with pytest.raises(RanksFailed, match="gradients-differ") as error:
        train(tmp_path, words, 2, hook=functools.partial(flip_unit, 1, at))
    assert "rank 1 (" in str(error.value)


@pytest.mark.campaign
@pytest.mark.parametrize(("rank", "at"), [(1, 2), (2, 1)])
def test_the_majoritys_gradients_are_used(text, tmp_path, rank, at):
    world, flags = LAYOUTS["dp 3"]
    plain = train(tmp_path / "plain", argv(text, tmp_path / "plain", *flags), world)
    folder = tmp_path / "verified"
    words = argv(text, folder, *flags, "--verify-step-interval", "2")
    words = [*words, "--verify-step-action", "majority"]
    verified = train(folder, words, world, hook=functools.partial(flip, rank, at))
    assert verified.series(*EXACT) == plain.series(*EXACT)
    same_tensors(verified.tensors(), plain.tensors())
    assert "majority's gradients" in verified.first_rank_log


def test_a_rank_that_repeats_its_error_is_not_outvoted_by_itself(text, tmp_path):
    """Of two replicas both are suspected, and nothing is trained on a guess."""
    words = argv(text, tmp_path, "--verify-step-interval", "2", "--verify-step-action", "majority")
    with pytest.raises(RanksFailed, match="suspected: rank 0 .*, rank 1 "):
        train(tmp_path, words, 2, hook=functools.partial(flip, 1, 1, 99))


@pytest.mark.campaign
def test_a_repeated_step_counts_packed_samples_once(text, tmp_path):
    sizes = [*SMALL[: SMALL.index("--tokenizer-type")], *SMALL[SMALL.index("--micro-batch-size") :]]
    words = with_flags(
        sizes,
        *"--train-iters 4 --packed-samples --tokenizer-type NullTokenizer --vocab-size 211".split(),
        *("--train-data-path", text),
        *"--eval-iters 0 --global-batch-size 12 --lr-warmup-iters 1".split(),
    )
    verified = ["--verify-step-interval", "2", "--verify-step-action", "majority"]
    hook = functools.partial(flip, 1, 2)
    plain = train(tmp_path / "plain", words, 3)
    repeated = train(tmp_path / "verified", [*words, *verified], 3, hook=hook)
    assert "majority's gradients" in repeated.first_rank_log
    counts = (
        "lm_loss",
        "num_samples_in_batch",
        "largest_length",
        "largest_batch",
        "smallest_batch",
    )
    assert repeated.series(*counts) == plain.series(*counts)
    assert all(row["largest_batch"] >= row["smallest_batch"] > 0 for row in repeated.rows)
