"""--torch-compile with dropout: as many graphs after the third step as after the first, however
many layers there are."""

from __future__ import annotations

import json

import pytest
import torch

from megatron.training import loop
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

TEN_LAYERS = with_flags(SMALL, "--num-layers", "10", "--lr-warmup-iters", "1")
STEPS = ["--mock-data", "--train-iters", "3", "--eval-iters", "0", "--torch-compile"]


def count_graphs() -> None:
    """Say after each step how many graphs and frames there are so far, and what was compiled
    anew."""
    step = loop.train_step

    def counting(*args):
        outcome = step(*args)
        counters = torch._dynamo.utils.counters
        print(
            "COUNTS",
            json.dumps([counters["stats"]["unique_graphs"], counters["frames"]["total"]]),
            flush=True,
        )
        return outcome

    loop.train_step = counting


OVERLAP = [
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--ddp-bucket-size",
    "3000",
]


@pytest.mark.parametrize(
    "flags, graphs, frames",
    [
        pytest.param([], 5, 11, marks=pytest.mark.campaign),
        pytest.param(["--recompute-granularity", "selective"], 5, 11, marks=pytest.mark.sweep),
        pytest.param(NO_DROPOUT, 1, 1, marks=pytest.mark.campaign),
        pytest.param([*NO_DROPOUT, "--reset-attention-mask"], 5, 11, marks=pytest.mark.sweep),
    ],
)
def test_dropout_does_not_compile_again(tmp_path, flags, graphs, frames):
    """Torch gives a function up after 8 recompilations, so ten layers show what depends on layer,
    step or seed."""
    compiled = train(
        tmp_path / "compiled", [*with_flags(TEN_LAYERS, *flags), *STEPS], hook=count_graphs
    )
    counts = [
        json.loads(line.removeprefix("COUNTS "))
        for line in compiled.log.splitlines()
        if line.startswith("COUNTS")
    ]
    assert len(counts) == 3 and counts[0] == counts[1] == counts[2], counts
    assert (
        1 <= counts[0][0] <= graphs
        and counts[0][1] <= frames
        and "recompile_limit" not in compiled.log
    )
    plain = train(tmp_path / "plain", [*with_flags(TEN_LAYERS, *flags), *STEPS[:-1]])
    for key, near in (("lm_loss", 1e-5), ("grad_norm", 1e-3)):
        assert [value for (value,) in compiled.series(key)] == pytest.approx(
            [value for (value,) in plain.series(key)], rel=near
        )


@pytest.mark.campaign
def test_weights_under_way_split_no_graph(tmp_path):
    """A compiled layer waits for its weights before its one graph begins."""
    flags = [*with_flags(TEN_LAYERS, *NO_DROPOUT), *STEPS, *OVERLAP]
    compiled = train(tmp_path / "compiled", flags, 2, hook=count_graphs)
    assert [line for line in compiled.log.splitlines() if line.startswith("COUNTS")] == [
        "COUNTS [1, 1]"
    ] * 3
    plain = train(tmp_path / "plain", [flag for flag in flags if flag != "--torch-compile"], 2)
    assert [value for (value,) in compiled.series("lm_loss")] == pytest.approx(
        [value for (value,) in plain.series("lm_loss")], rel=1e-5
    )


@pytest.mark.campaign
def test_attention_over_context_parallel_ranks_stays_out_of_the_graphs(tmp_path):
    flags = [*with_flags(TEN_LAYERS, *NO_DROPOUT), *STEPS, "--context-parallel-size", "2"]
    compiled = train(tmp_path / "compiled", flags, 2, hook=count_graphs)
    counts = [
        json.loads(line.removeprefix("COUNTS "))
        for line in compiled.log.splitlines()
        if line.startswith("COUNTS")
    ]
    assert len(counts) == 3 and counts[0] == counts[1] == counts[2], counts
    assert 1 <= counts[0][0] <= 5 and "recompile_limit" not in compiled.log
    plain = train(tmp_path / "plain", [flag for flag in flags if flag != "--torch-compile"], 2)
    assert [value for (value,) in compiled.series("lm_loss")] == pytest.approx(
        [value for (value,) in plain.series("lm_loss")], rel=1e-5
    )
