"""Layers of experts on the device: how often the host reads from it or copies to it, and launches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron.addons.lab.tests.trace.tracing import Traced
from megatron.addons.lab.trace import traced_rank
from megatron.addons.lab.trace.recorder import COPIES, StepRecorder, TraceError
from megatron.model.blocks.moe.module import MoELayer
from tests.runs import NO_DROPOUT, SMALL, with_flags

FLAGS = with_flags(
    SMALL,
    *NO_DROPOUT,
    *"--mock-data --train-iters 2 --lr-warmup-iters 1 --bf16 --swiglu --disable-bias-linear".split(),
    *"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --global-batch-size 4".split(),
    *"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01".split(),
)
EP = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type")


def of_a_layer(monkeypatch, *flags: str, world: int = 1) -> Counter[str]:
    """Reads, copies to the device and launches of one layer and micro-batch, and operations."""
    recorders = []

    class Recorder(StepRecorder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            recorders.append(self)
            self.to_device = 0

        def _count(self, func, name, args, kwargs, out):
            super()._count(func, name, args, kwargs, out)
            if name in COPIES and not name.startswith("_foreach") and out.is_meta:
                self.to_device += any(one.is_cpu for one in args if isinstance(one, torch.Tensor))

    monkeypatch.setattr(traced_rank, "StepRecorder", Recorder)
    counts = []
    for layers in ("3", "2"):
        traced = Traced(with_flags(FLAGS, *flags, "--num-layers", layers), world)
        traced.rank(0)
        recorder = recorders[-1]
        operations = recorder.operations.copy()
        operations["copies to the device"] = recorder.to_device
        operations["launches"] = sum(
            recorder.launches[phase] for phase in ("forward-compute", "backward-compute")
        )
        counts.append(operations)
    micro_batches = traced.plan.num_microbatches(2)
    return Counter({name: n / micro_batches for name, n in (counts[0] - counts[1]).items()})


@pytest.mark.parametrize(
    ("flags", "world", "reads"),
    [
        (("--moe-expert-capacity-factor", "0.5"), 1, 0),
        (("--tensor-model-parallel-size", "2", "--sequence-parallel"), 2, 0),
        ((*EP, "alltoall"), 2, 1),
        (("--moe-ffn-hidden-size", "36"), 1, 1),  # no rows of 16 bytes
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ((), 1, 0),
                (("--moe-router-load-balancing-type", "seq_aux_loss"), 1, 0),
                (("--recompute-granularity", "selective", "--recompute-modules", "moe_act"), 1, 0),
                ((*EP, "allgather"), 2, 1),
                ((*EP, "alltoall", "--moe-expert-capacity-factor", "1.0"), 2, 1),
            )
        ),
    ],
)
def test_how_often_the_host_reads(monkeypatch, flags, world, reads):
    of_layer = of_a_layer(monkeypatch, *flags, world=world)
    assert of_layer["host sync"] == reads
    assert of_layer["copies to the device"] == 0


def test_the_number_of_experts_adds_no_launch(monkeypatch):
    """Four GEMMs and two weight gradients, however many experts there are."""
    few, many = (of_a_layer(monkeypatch, "--num-experts", n) for n in ("8", "64"))
    assert few == many
    assert few["_grouped_mm"] == 4 and few["add_grouped_product_"] == 2
    assert few["launches"] < 120


@pytest.mark.parametrize(
    "read", [lambda x: x.max().item(), lambda x: x.tolist(), torch.nonzero, torch.bincount]
)
def test_a_read_is_found(monkeypatch, read):
    sort = MoELayer.sort

    def and_read(self, experts):
        order, counts = sort(self, experts)
        read(counts)
        return order, counts

    monkeypatch.setattr(MoELayer, "sort", and_read)
    with pytest.raises(TraceError, match="trace-host-sync"):
        of_a_layer(monkeypatch)


def test_a_copy_to_the_device_is_found(monkeypatch):
    sort = MoELayer.sort

    def and_copy(self, experts):
        order, counts = sort(self, experts)
        return order, counts + torch.zeros(8, dtype=torch.int64).to(counts.device)

    monkeypatch.setattr(MoELayer, "sort", and_copy)
    assert of_a_layer(monkeypatch)["copies to the device"] == 1
