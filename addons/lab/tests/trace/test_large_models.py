"""Ranks of large clusters: a trace sends the bytes of the plan, and needs its memory within 1 %."""

from __future__ import annotations

import pytest

from megatron.addons.lab.tests.trace.tracing import Traced
from megatron.addons.lab.trace.compare import figures, sent
from megatron.config.plan.transfers import sent_by_axis
from tests.runs import with_flags

COMMON = (
    "--micro-batch-size 1 --mock-data --train-iters 2 --lr-warmup-iters 1 --lr 1e-4 --bf16 "
    "--sequence-parallel --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --tokenizer-type NullTokenizer"
)
# addons/lab/trace.md has the figures.
GPT_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50257 --global-batch-size 1536 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity selective"
)
GPT_1T = (
    "--num-layers 128 --hidden-size 25600 --num-attention-heads 160 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 51200 --global-batch-size 3072 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 64 "
    "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
)
MIXTRAL_141B = (
    "--num-layers 56 --hidden-size 6144 --num-attention-heads 48 --group-query-attention "
    "--num-query-groups 8 --ffn-hidden-size 16384 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 "
    "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 32768 --global-batch-size 512 "
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
)


def check(model: str, world: int, rank: int, *more: str) -> None:
    """Memory by kind and at the peak, and bytes sent, are the plan's."""
    traced = Traced(with_flags([*COMMON.split(), *model.split(), *more]), world)
    trace = traced.rank(rank)
    assert sent(trace) == sent_by_axis(traced.config, traced.plan, trace.stage)
    compared = {one.name: one for one in figures(traced.config, traced.plan, trace)}
    for name in ("weights", "gradients", "optimizer", "peak"):
        assert not compared[name].differs, compared[name]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "world", "batch"), [(GPT_175B, 1024, "256"), (MIXTRAL_141B, 256, "64")]
)
def test_a_rank_of_a_thousand(model, world, batch):
    """With so many micro-batches as there are stages."""
    check(model, world, world - 1, "--global-batch-size", batch)


@pytest.mark.sweep
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("model", "world"), [(GPT_175B, 1024), (GPT_1T, 4096), (MIXTRAL_141B, 256)]
)
def test_a_rank_of_a_large_cluster(model, world, last):
    check(model, world, world - 1 if last else 0)
