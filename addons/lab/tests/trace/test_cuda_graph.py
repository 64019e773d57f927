"""--cuda-graph-impl local on ranks that share a model: their sums and transfers are operations that
a graph repeats; only their values are simulated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron import cuda
from megatron.addons.lab.trace.simulated_group import serve_meta, simulated_ranks
from megatron.training.batch import MicroBatch
from megatron.training.cuda_graph import MicroBatchGraphs
from megatron.training.step import MicroBatches
from megatron.training.step_sums import StepSums
from tests.core.training.built_runs import built
from tests.problems import raises
from tests.runs import plot

LLAMA = (
    "--bf16 --attention-dropout 0 --hidden-dropout 0.1 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --num-experts 4 --moe-router-topk 2"
)
LAYOUTS = {
    "tp": "--tensor-model-parallel-size 2",
    "sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp": "--context-parallel-size 2",
    "cp by heads": "--context-parallel-size 2 --cp-comm-type a2a",
}


def micro_batches(flags: str, forward_step) -> None:
    """Two of them, of a rank on the meta device."""
    run = built(*LLAMA.split(), *flags.split(), device="meta", world=2)
    serve_meta(run.runtime.ctx.cp.group)
    run.graphs = MicroBatchGraphs(run.model[0], run.buffers, run.runtime.device, 0)
    shape = run.config.training.micro_batch_size, run.config.model.seq_length + 1
    data = iter([MicroBatch(torch.zeros(shape, dtype=torch.int64)) for _ in range(2)])
    sums = StepSums(run.runtime.device, [], run.config.model.router_numbers)
    step = MicroBatches(run, forward_step, data, sums, iteration=1, backward_scale=1.0)
    for number in range(2):
        step.replayed(number, 0, None)


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_micro_batches_can_be_repeated(flags, monkeypatch):
    recorded = []

    def record(region, *others):
        recorded.append(region)
        return SimpleNamespace(), region()

    monkeypatch.setattr(cuda, "record", record)
    step = plot().forward_step
    with simulated_ranks(2, 1):
        micro_batches(flags, step)
    assert len(recorded) == 1
    refused = raises(ValueError, "cuda-graph-cannot-hold", "--cuda-graph-impl")
    with simulated_ranks(2, 1), refused:
        micro_batches(flags, lambda batch, model: (step(batch, model)[0].item(), 1))
