"""The runner of schedules: what it calls in which order, what it keeps, what it sends, and how long
stages idle."""

import gc
import time
import weakref

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.plan.schedules import Action, compute_order
from megatron.parallel import pipeline
from megatron.parallel.context import ParallelContext
from megatron.parallel.pipeline import Pipeline, run_schedule, stage_schedule
from tests.forkrun import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("stage, stages", [(0, 1), (0, 4), (2, 4)])
def test_steps_run_in_order_and_backward_gets_its_own_forward(stage, stages):
    said = []

    def forward(micro_batch: int, chunk: int, hidden: None) -> torch.Tensor:
        said.append(Action("forward", micro_batch, chunk))
        return torch.tensor(micro_batch)

    def backward(output: torch.Tensor, gradient: None) -> None:
        said.append(Action("backward", output.item()))

    steps = compute_order(stage, stages, 5)
    run_schedule(iter(steps), forward, backward)
    assert said == steps


def test_an_output_is_let_go_after_its_backward():
    outputs: list[weakref.ref] = []
    alive = []

    def forward(*_: object) -> torch.Tensor:
        output = torch.zeros(3)
        outputs.append(weakref.ref(output))
        return output

    def backward(*_: object) -> None:
        gc.collect()
        alive.append(0)
        for _ in range(200):  # another thread that walks the stacks may hold one for a moment
            alive[-1] = sum(reference() is not None for reference in outputs)
            if alive[-1] == 1:
                break
            time.sleep(0.01)

    run_schedule(compute_order(0, 1, 4), forward, backward)
    assert alive == [1, 1, 1, 1]


def test_a_forgotten_backward_is_noticed():
    with pytest.raises(AssertionError, match=r"\[\(1, 0\)\]"):
        run_schedule(
            [Action("forward", 0), Action("forward", 1), Action("backward", 0)],
            lambda *_: torch.zeros(()),
            lambda *_: None,
        )


def test_lists_are_made_once():
    assert stage_schedule(1, 4, 8, 2, False, True) is stage_schedule(1, 4, 8, 2, False, True)


SHAPE = (3, 2)


class Toy:
    """A chain of virtual stages x -> tanh(x * weight) in float64; the last one's sum is the
    loss."""

    def __init__(self, rank: int, world: int, chunks: int, overlap: bool = True):
        ctx = ParallelContext(ParallelConfig(pipeline_model_parallel_size=world), world, rank)
        self.pipeline = Pipeline(ctx, chunks, SHAPE, torch.float64, CPU, overlap)
        self.first = rank == 0
        self.weights = [
            torch.full(
                (), 1.0 + 0.1 * (chunk * world + rank), dtype=torch.float64, requires_grad=True
            )
            for chunk in range(chunks)
        ]
        self.losses: list[float] = []
        self.order: list[tuple] = []
        self.made: dict[tuple, weakref.ref] = {}
        self.most_alive = self.most_outputs = 0

    def forward(self, micro_batch: int, chunk: int, hidden: torch.Tensor | None) -> torch.Tensor:
        assert (hidden is None) == (self.first and chunk == 0)
        x = (
            torch.full(SHAPE, 0.1 * (micro_batch + 1), dtype=torch.float64)
            if hidden is None
            else hidden
        )
        y = torch.tanh(x * self.weights[chunk])
        self.order.append(("forward", micro_batch, chunk))
        if self.pipeline.is_last(chunk):
            self.losses.append(y.sum().item())
            return y.sum()
        self.most_outputs = max(
            self.most_outputs, sum(made() is not None for made in self.made.values())
        )
        y = y + 0  # nobody's saved tensor
        self.made[micro_batch, chunk] = weakref.ref(y)
        return y

    def backward(self, output: object, gradient: torch.Tensor | None) -> None:
        self.order.append(("backward",))
        torch.autograd.backward(output, gradient)


def toy_run(rank: int, world: int, micro_batches: int, chunks: int, overlap: bool) -> tuple:
    toy = Toy(rank, world, chunks, overlap)
    toy.pipeline.play(micro_batches, toy.forward, toy.backward)
    train_order = toy.order
    toy.order = []
    gradients = [weight.grad.item() for weight in toy.weights]
    losses = toy.losses
    toy.losses = []
    with torch.no_grad():
        toy.pipeline.play(micro_batches, toy.forward)
    assert toy.losses == losses and all(order[0] == "forward" for order in toy.order)
    return losses, gradients, train_order, toy.most_outputs


def toy_alone(virtual: int, micro_batches: int) -> tuple[list[float], list[float]]:
    """(losses, gradients by virtual stage) in one piece."""
    weights = [
        torch.full((), 1.0 + 0.1 * i, dtype=torch.float64, requires_grad=True)
        for i in range(virtual)
    ]
    losses = []
    for m in range(micro_batches):
        x = torch.full(SHAPE, 0.1 * (m + 1), dtype=torch.float64)
        for weight in weights:
            x = torch.tanh(x * weight)
        losses.append(x.sum())
    sum(losses).backward()
    return [loss.item() for loss in losses], [weight.grad.item() for weight in weights]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "stages, micro_batches, chunks",
    [(2, 1, 1), (2, 5, 1), (4, 2, 1), (4, 9, 1), (2, 2, 2), (2, 4, 3), (3, 6, 2)],
)
def test_gradients_of_a_pipeline_are_those_of_the_whole(stages, micro_batches, chunks, overlap):
    """In the order of the list; training, then evaluation; the outputs that were sent are not kept
    for backward."""
    ranks = run_ranks(stages, toy_run, micro_batches, chunks, overlap, seconds=60)
    losses, gradients = toy_alone(stages * chunks, micro_batches)
    assert ranks[-1][0] == losses and all(rank[0] == [] for rank in ranks[:-1])
    found = [ranks[stage][1][chunk] for chunk in range(chunks) for stage in range(stages)]
    assert found == pytest.approx(gradients, rel=1e-12)
    for stage, (_, _, order, most_outputs) in enumerate(ranks):
        want = compute_order(stage, stages, micro_batches, chunks)
        assert [step[0] for step in order] == [step.kind for step in want]
        assert [step[1:] for step in order if len(step) > 1] == [
            step[1:3] for step in want if step.kind == "forward"
        ]
        assert most_outputs <= (pipeline.SENDS_UNDER_WAY if overlap else 0) + 1


def test_a_wrong_shape_is_not_sent():
    def forward(*_: object) -> torch.Tensor:
        return torch.zeros(1, 2)

    ctx = ParallelContext(ParallelConfig())
    links = pipeline.P2PLinks(ctx.pp, ctx.pp, SHAPE, SHAPE, torch.float32, CPU)
    with pytest.raises(AssertionError, match="send_activation.*1, 2"):
        run_schedule(
            [Action("forward", 0), Action("send_activation", 0, 0, 1)], forward, None, links
        )
