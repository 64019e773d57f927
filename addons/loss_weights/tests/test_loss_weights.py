"""--data-loss-weights against the formula in float64, in layouts whose ranks see other sources."""

import math

import pytest
import torch

from megatron.addons.loss_weights.hook import weigh_by_source
from megatron.config.plan.plan import make_plan
from megatron.parallel.context import ParallelContext
from megatron.timers import Timers
from megatron.training.batch import MicroBatch
from megatron.training.build import build_run, make_tokenizer
from megatron.training.launch.initialize import Runtime
from megatron.training.logging.subset_metrics import SubsetMetrics
from megatron.training.step import train_step
from pretrain_gpt import forward_step
from tests.core.training.built_runs import config_of
from tests.forkrun import run_ranks
from tests.runs import NO_DROPOUT, SMALL, train, with_flags, write_text

WEIGHTS = (0.3, 5.0, 0.0)
FLAGS = [*NO_DROPOUT, "--fp64", "--clip-grad", "1e9", "--eod-mask-loss", "--weight-decay", "0"]
EOD = 210
SOURCES = torch.tensor([0, 0, 0, 0, 1, 0, 2, 1])  # of the samples; ranks and micro-batches differ


def samples() -> torch.Tensor:
    """[8, 34]: tokens with ends of documents, and the source."""
    rows = torch.randint(0, 200, (8, 33), generator=torch.Generator().manual_seed(0))
    rows[0, ::3] = EOD
    rows[5, 1:9] = EOD
    return torch.cat((rows, SOURCES.unsqueeze(1)), 1)


def step_of_a_run(rank: int, world: int, flags: list[str]) -> tuple[float, float, dict]:
    """(loss, gradient norm, counts) of the first step of a run with the weights."""
    config = config_of(*FLAGS, *flags)
    tokenizer = make_tokenizer(config)
    plan = make_plan(config, world, tokenizer.vocab_size)
    ctx = ParallelContext(config.parallel, world, rank)
    runtime = Runtime(torch.device("cpu"), ctx, world, rank)
    run = build_run(config, plan, runtime, Timers(), tokenizer)
    run.counters.append(SubsetMetrics(["web", "code", "books"], ctx, packed=False))
    weigh_by_source(run, WEIGHTS)
    own = samples().chunk(ctx.dp.size)[ctx.dp.rank]
    parts = own.split(config.training.micro_batch_size)
    result = train_step(run, forward_step, (MicroBatch(p, subset=True) for p in parts), 1)
    assert result.grad_norm is not None
    return result.loss, result.grad_norm, result.counts


def formula(flags: list[str]) -> tuple[float, float, list[float]]:
    """(loss, gradient norm, loss of each source) by the definition, in float64, of one batch."""
    config = config_of(*FLAGS, *flags)
    tokenizer = make_tokenizer(config)
    plan = make_plan(config, 1, tokenizer.vocab_size)
    runtime = Runtime(torch.device("cpu"), ParallelContext(config.parallel), 1, 0)
    run = build_run(config, plan, runtime, Timers(), tokenizer)
    model = run.model[0]
    rows = samples()[:, :-1]
    logits = model(rows[:, :-1])
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), rows[:, 1:].flatten(), reduction="none"
    ).view(8, 32)
    counts = (rows[:, :-1] != EOD).double()
    weights = counts * torch.tensor(WEIGHTS, dtype=torch.float64)[SOURCES].unsqueeze(1)
    for p in run.model.parameters():
        p.main_grad.zero_()
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    norm = math.sqrt(sum(p.main_grad.square().sum().item() for p in model.parameters()))
    of_source = [
        (losses * counts)[source == SOURCES].sum() / counts[source == SOURCES].sum()
        for source in range(3)
    ]
    return loss.item(), norm, [each.item() for each in of_source]


LAYOUTS = {
    "one rank": (1, []),
    "dp2": (2, []),
    "cp2": (2, ["--context-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2 sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "dp2 cp2, ZeRO-2": (
        4,
        "--context-parallel-size 2 --data-parallel-sharding-strategy optim_grads".split(),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("one rank", "dp2", "cp2") else pytest.mark.campaign)
        for name in LAYOUTS
    ],
)
def test_a_step_by_the_formula(name):
    world, flags = LAYOUTS[name]
    loss, norm, of_source = formula([])
    for got, got_norm, counts in run_ranks(world, step_of_a_run, flags):
        assert got == pytest.approx(loss, rel=1e-12) and got_norm == pytest.approx(norm, rel=1e-7)
        assert [counts[f"loss/{source}"] for source in ("web", "code", "books")] == pytest.approx(
            of_source, rel=1e-12
        )
        # counted without weights
        masked = (samples()[:, :-2] == EOD).sum(1)
        for source, number in (("web", 0), ("code", 1), ("books", 2)):
            tokens = (32 - masked)[number == SOURCES].sum().item()
            assert counts[f"tokens/{source}"] == tokens


def test_a_run_logs_the_loss_of_each_source_in_every_order(tmp_path):
    """... and validates without weights."""
    texts = [write_text(tmp_path / name, 200, seed) for seed, name in enumerate(("web", "code"))]
    flags = with_flags(SMALL, *NO_DROPOUT, "--data-path", "3", texts[0], "1", texts[1], "--lr", "0")
    flags = [*flags, "--train-iters", "2", "--split", "80,20,0", "--eval-interval", "2"]
    flags = with_flags(flags, "--lr-warmup-iters", "0")
    for order in ("megatron", "epoch"):
        words = [*flags, "--data-order", order]
        run = train(tmp_path / order, [*words, "--data-loss-weights", "1", "4"])
        for row in run.rows:
            web, code = (row[f"tokens/{name}"] for name in ("web", "code"))
            sums = web * row["loss/web"] + 4 * code * row["loss/code"]
            assert row["lm_loss"] == pytest.approx(sums / (web + 4 * code), rel=1e-6)
            assert f"loss/web {row['loss/web']:.4g}" in " ".join(run.log.split())
        assert run.evaluations == train(tmp_path / f"{order}_plain", words).evaluations
