"""The first steps in the logs of the 7B and 20B demos, by their generated samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.addons.finetuning.packed_dataset import PackedSampler
from megatron.data.samples import Samples
from megatron.model.gpt import UNSMOOTHED_LOSS, TokenMetrics
from megatron.parallel.context import Axis
from megatron.training.batch import BatchRules, load_samples, make_batch, training_samples
from megatron.training.build import make_tokenizer, plan_run
from megatron.training.build_data import build_data
from megatron.training.logging.subset_metrics import FILLED, SubsetMetrics
from tests.core.training.built_runs import RUNTIME, config_of
from tests.runs import NO_DROPOUT, train

CPU = torch.device("cpu")
# From the logs of the 7B (DP 8) and 20B (DP 4) demos: tokens, then
# samples, longest, most, fewest of data-parallel rank 0.
DEMOS = {
    8: [
        (120836, 19, 2048, 6, 3),
        (120572, 16, 2048, 5, 3),
        (122032, 16, 2048, 6, 3),
        (121125, 18, 2048, 6, 3),
        (121365, 14, 2048, 4, 3),
        (121223, 14, 2048, 4, 3),
    ],
    4: [
        (60571, 18, 2048, 6, 3),
        (60265, 19, 2048, 6, 3),
        (60244, 17, 2048, 5, 3),
        (60328, 17, 2048, 5, 3),
        (61028, 22, 1893, 8, 4),
        (61004, 13, 2048, 4, 3),
    ],
}


def test_the_twelve_steps_of_the_demo_logs():
    """Through what training reads by: data set, sampler of each rank, loader, batch, and the sums
    of its ranks."""
    demo = (
        "--seq-length",
        "2048",
        "--max-position-embeddings",
        "2048",
        "--micro-batch-size",
        "2",
        "--packed-samples",
        "--dummy-data",
        "internlm",
        "--vocab-size",
        "103168",
        "--eval-iters",
        "0",
        "--min-sample-length",
        "50",
    )
    for dp, rows in DEMOS.items():
        config = config_of(*demo, "--global-batch-size", str(8 * dp))
        config = replace(config, data=replace(config.data, mock_data=False))
        plan = plan_run(config, dp, 103168)
        data = build_data(config, plan, RUNTIME, make_tokenizer(config))
        totals = [torch.zeros(2 + len(DEMOS[8][0]) - 1 + 2 * 3, dtype=torch.float64) for _ in rows]
        for rank in range(dp):
            ctx = RUNTIME.ctx
            ctx = type(
                "Ranks", (), {"dp": Axis("dp", dp, rank), "cp": ctx.cp, "tp": ctx.tp, "pp": ctx.pp}
            )
            counts = SubsetMetrics(data.train.subsets, ctx)
            numbers = training_samples(
                PackedSampler(len(data.train), 2, rank, dp), plan.batch, plan.skips, 1, len(rows)
            )
            samples = load_samples(Samples(data.train, 103169), numbers, 0)
            for total in totals:
                slots = torch.zeros(counts.size, dtype=torch.float64)
                for _ in range(4):
                    lines = next(samples)
                    counts.see(lines)
                    batch = make_batch(lines, BatchRules(None), CPU)
                    losses = torch.full_like(batch.loss_mask, 2.0)
                    told = TokenMetrics(counts.token_metrics, {UNSMOOTHED_LOSS: losses})
                    counts.add(slots, replace(batch, token_metrics=told))
                counts.close(slots)
                total[: counts.size] += slots
        found = [counts.summed(1, total.tolist()[: counts.size]) for total in totals]
        assert [
            (
                row["tokens/en"],
                row["num_samples_in_batch"],
                row["largest_length"],
                row["largest_batch"],
                row["smallest_batch"],
            )
            for row in found
        ] == rows
        assert all(
            (row["loss/en"], row["tokens/cn"], row["loss/code"]) == (2.0, 0, None) for row in found
        )


@pytest.mark.parametrize(
    "dp", [pytest.param(4, marks=pytest.mark.campaign), pytest.param(8, marks=pytest.mark.sweep)]
)
def test_the_demo_logs_from_whole_runs(dp, tmp_path):
    """The same from the metrics file of pretrain_gpt.py on as many ranks, with a model of width
    8."""
    words = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 2 --lr 1e-3 --lr-warmup-iters 1 "
        "--train-iters 6 --packed-samples --dummy-data internlm --vocab-size 200 --num-workers 0 "
        f"--eval-iters 0 --device cpu --global-batch-size {8 * dp}"
    ).split()
    run = train(tmp_path, [*words, *NO_DROPOUT], dp)
    assert run.series("tokens/en", *FILLED) == DEMOS[dp]
    assert run.rows[-1]["consumed_tokens"] == 6 * 8 * dp * 2048
