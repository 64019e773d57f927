"""One training step against the same arithmetic written out in float64, and what it does with bad
numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.model.blocks.module import RouterStep
from megatron.training.batch import MicroBatch
from megatron.training.logging.subset_metrics import SubsetMetrics
from megatron.training.result import Requests
from megatron.training.run import Run, Veto
from megatron.training.step import NotFinite, evaluate, next_samples, train_step
from tests import problems
from tests.core.training.tiny_run import EOD, make_run, micro_batches, samples
from tests.forkrun import RanksFailed, run_ranks
from tests.runs import plot


def plain_loss(run: Run, tokens: torch.Tensor, masked: bool) -> torch.Tensor:
    """Mean over all tokens that count, from the model's logits, in one piece."""
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:]
    losses = F.cross_entropy(
        run.model[0](inputs).flatten(0, 1), labels.flatten(), reduction="none"
    ).view_as(labels)
    keep = (inputs != EOD).double() if masked else torch.ones_like(losses)
    return (losses * keep).sum() / keep.sum()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_loss_and_norm_are_those_of_the_whole_batch(masked, micro_batch):
    """Divided by the global number of tokens that count, however the batch is cut."""
    run = make_run(eod_mask_loss=masked, micro_batch_size=micro_batch)
    tokens = samples()
    expected = plain_loss(run, tokens, masked)
    run.buffers.zero()
    expected.backward()
    norm = run.buffers.flat.norm().item()
    outcome = train_step(run, plot().forward_step, micro_batches(tokens, micro_batch), 1)
    assert outcome.loss == pytest.approx(expected.item(), rel=1e-12)
    assert outcome.grad_norm == pytest.approx(norm, rel=1e-12)


def test_document_masks_reach_the_model():
    """Positions and attention restart: the loss is that of the pieces run alone."""
    run = make_run(reset_position_ids=True, reset_attention_mask=True)
    tokens = samples()
    losses = []
    for row in tokens:
        inputs = row[:-1]
        labels = row[1:]
        start = 0
        ends = [i + 1 for i, token in enumerate(inputs.tolist()) if token == EOD] + [len(inputs)]
        for end in ends:
            if end > start:
                losses.append(
                    run.model[0](inputs[None, start:end], labels=labels[None, start:end]).flatten()
                )
            start = end
    expected = torch.cat(losses).mean().item()
    assert train_step(run, plot().forward_step, micro_batches(tokens, 2), 1).loss == pytest.approx(
        expected, rel=1e-12
    )


def test_dropout_is_a_function_of_the_iteration():
    tokens = samples()

    def loss(iteration: int, **changes) -> float:
        run = make_run(hidden_dropout=0.1, attention_dropout=0.1, **changes)
        return train_step(run, plot().forward_step, micro_batches(tokens, 2), iteration).loss

    assert loss(3) == loss(3) != loss(4)
    assert loss(3) != loss(3, seed=5)


def test_evaluation_has_no_dropout_and_averages_over_tokens():
    run = make_run(hidden_dropout=0.5, attention_dropout=0.5, eod_mask_loss=True)
    tokens = samples(8)
    said = []
    got = evaluate(run, plot().forward_step, micro_batches(tokens, 2), 4, said.append)["lm loss"]
    assert got == pytest.approx(plain_loss(run, tokens, True).item(), rel=1e-12)
    assert said == ["Evaluating on 8 samples", "Evaluating iter 1/2", "Evaluating iter 2/2"]


def test_evaluation_drops_what_exceeds_the_capacity_of_experts():
    """As Megatron's does, in each micro-batch. The model by itself drops nothing: that is what
    --eval-tasks scores."""
    run = make_run(num_experts=4, moe_expert_capacity_factor=0.5, add_bias_linear=False)
    tokens = samples()
    got = evaluate(run, plot().forward_step, micro_batches(tokens, 2), 2, lambda text: None)
    expected = [
        run.model[0](rows[:, :-1], labels=rows[:, 1:], router_step=RouterStep(None, None)).mean()
        for rows in tokens.split(2)
    ]
    assert got["lm loss"] == pytest.approx(torch.stack(expected).mean().item(), rel=1e-12)
    alone = [plain_loss(run, row.unsqueeze(0), False).item() for row in tokens]
    assert plain_loss(run, tokens, False).item() == pytest.approx(sum(alone) / 4, rel=1e-12)
    assert abs(sum(alone) / 4 - got["lm loss"]) > 1e-5


def broken(batch, model):
    output = plot().forward_step(batch, model)
    return (output[0] * float("nan"), output[1]) if model.output_layer is not None else output


def test_nan_loss_stops_before_the_step():
    run = make_run()
    before = [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(NotFinite, match="iteration 7: .* nan .* rank 0.*--train-range-to-skip 7 7"):
        train_step(run, broken, micro_batches(samples(), 2), 7)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_nan_under_dynamic_scaling_is_an_overflow_not_an_error():
    run = make_run(fp64=False, fp16=True)
    outcome = train_step(run, broken, micro_batches(samples(), 2), 1)
    assert outcome.skipped == "overflow" and math.isnan(outcome.loss) and outcome.grad_norm is None


def step_of_rank(rank: int, world: int, changes: dict) -> tuple[float, float, float, Requests]:
    run = make_run(rank, world, **changes)
    outcome = train_step(
        run,
        plot().forward_step,
        micro_batches(samples(), 2),
        1,
        requests=lambda: Requests(signal=1, stop_now=10**rank),
    )
    valid = evaluate(
        run, plot().forward_step, micro_batches(samples(8, 1), 2), 4, lambda text: None
    )["lm loss"]
    return outcome.loss, outcome.grad_norm, valid, outcome.requests


@pytest.mark.parametrize(
    "changes",
    [
        dict(tensor_model_parallel_size=2),
        dict(tensor_model_parallel_size=2, sequence_parallel=True),
        dict(pipeline_model_parallel_size=2),
    ],
    ids=str,
)
def test_ranks_of_a_model_agree(changes):
    """On the losses and norm of one process to the last bit among themselves, and on the requests
    of both."""
    first, second = run_ranks(2, step_of_rank, changes)
    assert first == second
    assert first[:3] == pytest.approx(step_of_rank(0, 1, {})[:3], rel=1e-12)
    assert first[3] == Requests(signal=2, stop_now=11)


def broken_step(rank: int, world: int) -> str:
    run = make_run(rank, world, pipeline_model_parallel_size=2)
    with pytest.raises(NotFinite) as caught:
        train_step(run, broken, micro_batches(samples(), 2), 7)
    return str(caught.value)


def test_a_nan_loss_is_found_on_the_last_stage():
    first, last = run_ranks(2, broken_step)
    assert first == last and "iteration 7: " in first and " nan " in first and " rank 1)" in first


def without_extras(batch, model):
    output = model(batch.tokens, labels=batch.labels)
    return output if model.output_layer is None else (output.sum(), output.numel())


def step_without_hidden(rank: int, world: int) -> None:
    run = make_run(rank, world, pipeline_model_parallel_size=2)
    train_step(run, without_extras, micro_batches(samples(), 2), 1)


def test_a_forward_step_that_forgets_the_stage_before_is_told():
    with pytest.raises(RanksFailed, match="extras-missing"):
        run_ranks(2, step_without_hidden)


def test_a_forward_step_that_forgets_routers_or_subsets_is_told():
    experts = make_run(num_experts=4, add_bias_linear=False)
    subsets = make_run()
    subsets.counters.append(SubsetMetrics(["a"], subsets.runtime.ctx, packed=False))
    rows = torch.cat((samples(), torch.zeros(4, 1, dtype=torch.int64)), 1)  # the subset, last
    of_subset = iter([MicroBatch(rows, subset=True)] * 2)
    for run, batches in ((experts, micro_batches(samples(), 2)), (subsets, of_subset)):
        with problems.raises(ValueError, "extras-missing"):
            train_step(run, without_extras, batches, 1)


def test_exhausted_data_says_what_to_do():
    with problems.raises(ValueError, "data-exhausted", "--train-iters"):
        next_samples(iter(()))


def test_a_veto_leaves_everything_as_it_is():
    """It has the numbers of all ranks, and the norm also without clipping."""
    run = make_run(clip_grad=0.0)
    seen = []
    run.before_update.append(lambda *numbers: seen.append(numbers) or Veto("judge", "why"))
    before = [p.detach().clone() for p in run.model.parameters()]
    outcome = train_step(run, plot().forward_step, micro_batches(samples(), 2), 3)
    assert (outcome.skipped, outcome.reason) == ("judge", "why")
    assert seen == [(3, outcome.loss, outcome.grad_norm)] and outcome.grad_norm > 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert math.isnan(train_step(run, broken, micro_batches(samples(), 2), 4).loss)  # no NotFinite
