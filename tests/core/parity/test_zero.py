"""Shared gradients and weights (ZeRO-2 and 3) in whole runs: the memory that the plan says, the bits
of ZeRO-1, checkpoints of every strategy read by the others."""

import ctypes
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron import device, host
from megatron.arguments import config_from, parse_typed
from megatron.config import command_line
from megatron.config.plan.fit import GIB, fullest
from megatron.config.plan.plan import make_plan
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.features.registry import RunConfig
from megatron.parallel import fsdp
from megatron.training import loop
from tests.core.parity.layouts import (
    A2A,
    CHUNKS,
    DEEP,
    DISTRIBUTED,
    DROPOUT,
    EP,
    EXACT,
    FULL,
    GPT2,
    INSTANCES,
    LLAMA,
    MOE,
    MTP,
    MUON,
    PP,
    SP,
    STOP,
    STOPPED,
    TIED_MTP,
    TP,
    UNTIED,
    ZERO2,
    ZERO3,
    argv,
    saved,
)
from tests.forkrun import RanksFailed
from tests.runs import same_tensors, train, with_flags, write_text

STEPS = 4
SINGLE = ("--micro-batch-size", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


class Inside(TorchDispatchMode):
    """What an operation reads is there: torch does not look, and a kernel would read any memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func.overloadpacket.__name__.startswith(("new_", "empty")):
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and x.numel():
                    steps = zip(x.shape, x.stride(), strict=True)
                    end = x.storage_offset() + sum((n - 1) * step for n, step in steps) + 1
                    assert end * x.itemsize <= x.untyped_storage().nbytes(), f"{func} {x.shape}"
        return func(*args, **(kwargs or {}))


def census() -> None:
    """Hook: each rank writes the bytes that it has of weights and gradients, and the most that it
    had beside them."""
    Inside().__enter__()
    most = [0]
    fill = fsdp._fill
    place = fsdp.ShardedBuffers._place
    close = fsdp.UnitReduction.run
    seen = []

    def counted(flat):
        fill(flat)
        [buffers] = seen
        pieces = [piece for unit in buffers.units.values() for piece in unit.pieces]
        there = [
            flat for piece in pieces for flat in (piece.grads, piece.weights) if flat is not None
        ]
        most[0] = max(most[0], sum(flat.untyped_storage().nbytes() for flat in there))

    def placed(self, params, *args):
        seen.append(self)
        if self.frees_weights:  # no rank ever holds the whole model
            shared = (
                p for bucket in self.buckets if bucket.layout.shards > 1 for p in bucket.params
            )
            assert not any(p.untyped_storage().nbytes() for p in shared)
        return place(self, params, *args)

    def closed(self):
        close(self)
        [buffers] = seen
        sizes = {
            "weights": buffers.weights.untyped_storage().nbytes(),
            "gradients": buffers.flat.untyped_storage().nbytes(),
            "whole units": most[0],
        }
        file = Path(sys.stdout.name).with_name(f"census.{os.environ['RANK']}")
        file.write_text(json.dumps(sizes))

    fsdp._fill = counted
    fsdp.ShardedBuffers._place = placed
    fsdp.UnitReduction.run = closed


HELD = {
    "dp2, ZeRO-3": (2, (*LLAMA, *DEEP, *ZERO3)),
    "dp2, ZeRO-2, tied": (2, (*GPT2, *ZERO2)),
    "dp2, ZeRO-3, tied": (2, (*GPT2, *ZERO3)),
    "dp2, ZeRO-2, bf16": (2, (*LLAMA, *DEEP, *ZERO2, "--bf16")),
    "dp2, ZeRO-3, bf16": (2, (*LLAMA, *DEEP, *ZERO3, "--bf16")),
    "dp2, ZeRO-3, no overlap": (2, (*LLAMA, *DEEP, *ZERO3[:2])),
    "dp2, ZeRO-3, recomputed": (2, (*LLAMA, *DEEP, *ZERO3, *FULL[:-1], "2")),
    "dp2, ZeRO-3, multi-token prediction": (2, (*MTP, *ZERO3)),
    "dp2, ZeRO-3, multi-token prediction, tied": (2, (*TIED_MTP, *ZERO3)),
    # forward passes behind backward passes
    "pp2 dp2, ZeRO-3, multi-token prediction, tied": (4, (*TIED_MTP, PP, "2", *ZERO3, *SINGLE)),
    "pp2 vpp2 dp2, ZeRO-3": (4, (*GPT2, *DEEP, PP, "2", CHUNKS, "2", *ZERO3, *SINGLE)),
    "tp2 sp dp2, ZeRO-3, bf16": (4, (TP, "2", SP, *ZERO3, "--bf16")),
    "dp4, ZeRO-3 in 2 instances": (4, (*ZERO3, *INSTANCES)),
    "ep2 dp2, ZeRO-3, experts": (4, (*MOE, EP, "2", *A2A, *ZERO3)),
    "dp2, ZeRO-3, Muon": (2, (*LLAMA, *ZERO3, *MUON)),
}


# what holds the same as others, in other dtypes or of other models
RARE = (
    *("dp2, ZeRO-2, bf16", "dp2, ZeRO-3, no overlap", "dp2, ZeRO-3, tied"),
    *("dp2, ZeRO-3, multi-token prediction, tied", "tp2 sp dp2, ZeRO-3, bf16"),
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.sweep if name in RARE else pytest.mark.campaign if number else (),
        )
        for number, name in enumerate(HELD)
    ],
)
def test_ranks_hold_what_the_plan_says(name, data, tmp_path):
    """Shards within what aligns them (64 bytes each); whole units exactly."""
    world, flags = HELD[name]
    words = argv(data, (), STEPS, *flags)
    train(tmp_path, words, world, hook=census)
    config = config_from(RunConfig, parse_typed(command_line.parser(RunConfig), words))
    plan = make_plan(config, world, 211)
    stages = len(plan.layers_per_stage)
    for rank in range(world):
        has = json.loads((tmp_path / f"census.{rank}").read_text())
        planned = bytes_per_rank(config, plan, rank * stages // world)
        assert has.pop("whole units") == planned["whole units"]
        for kind, nbytes in has.items():
            assert nbytes == pytest.approx(planned[kind], abs=64 * 2 * 60), kind


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(more, marks=pytest.mark.sweep if more == (*FULL,) else pytest.mark.campaign)
        for more in (
            (),
            (*FULL,),
            ("--bf16", "--use-precision-aware-optimizer"),
            ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
        )
    ],
    ids=" ".join,
)
def test_strategies_change_no_bit_of_a_step_of_one_micro_batch(more, data, tmp_path):
    """... with dropout, and without clipping, whose norm is added up by shard; nor does overlap."""
    words = with_flags(argv(data, LLAMA, 4, *more), *DROPOUT, "--clip-grad", "0")
    words = with_flags(words, "--micro-batch-size", "4", "--save-interval", "4")
    runs = [
        train(tmp_path / str(n), [*words, *flags, "--save", str(tmp_path / f"{n}/save")], 2)
        for n, flags in enumerate((DISTRIBUTED, ZERO2, ZERO2[:2], ZERO3, ZERO3[:2]))
    ]
    for run in runs[1:]:
        assert run.series("iteration", "lm_loss") == runs[0].series("iteration", "lm_loss")
        same_tensors(run.tensors(), runs[0].tensors())


@pytest.mark.campaign
@pytest.mark.parametrize("layout", [(2, ZERO2), (4, (*ZERO3, *INSTANCES))], ids=str)
def test_a_resume_is_exact(layout, data, tmp_path):
    world, flags = layout
    words = with_flags(argv(data, UNTIED, 4, *flags, "--bf16"), *DROPOUT)
    straight = train(tmp_path / "a", [*words, *saved(tmp_path / "a")], world)
    train(tmp_path / "b", [*words, *saved(tmp_path / "b"), *STOPPED], world)
    loaded = ("--load", str(tmp_path / "b/save"))
    resumed = train(tmp_path / "b", [*words, *saved(tmp_path / "b"), *loaded], world)
    assert resumed.resumes[-1] == STOP
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())


def keep_weights() -> None:
    """Hook: weights of a unit are not freed."""
    fsdp.UnitGathering.release = lambda self, unit: None


@pytest.mark.campaign
def test_a_unit_that_is_not_freed_ends_the_run(data, tmp_path):
    with pytest.raises(RanksFailed, match="is there between two steps"):
        train(tmp_path, argv(data, GPT2, STEPS, *ZERO3), 2, hook=keep_weights)


def resident() -> None:
    """Hook: each rank writes the most memory that it had. What it frees goes back to the system at
    once, as with MALLOC_MMAP_THRESHOLD_=131072, by which a run knows that it is not to keep it."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)
    ctypes.CDLL(None).mallopt(device.M_MMAP_THRESHOLD, 1 << 17)
    step = loop.train_step

    def train_step(*args, **kwargs):
        result = step(*args, **kwargs)
        status = Path("/proc/self/status").read_text()
        file = Path(sys.stdout.name).with_name(f"resident.{os.environ['RANK']}")
        file.write_text(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
        return result

    loop.train_step = train_step


LARGE = (
    *"--num-layers 24 --hidden-size 1536 --num-attention-heads 12 --ffn-hidden-size 4096".split(),
    *"--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1".split(),
    *"--global-batch-size 4 --train-iters 1 --lr 1e-4 --eval-iters 0 --num-workers 0 --mock-data".split(),
    *"--tokenizer-type NullTokenizer --vocab-size 8191 --attention-dropout 0".split(),
    *"--hidden-dropout 0 --swiglu --normalization RMSNorm --disable-bias-linear".split(),
    *"--position-embedding-type rope --untie-embeddings-and-output-weights".split(),
    *FULL,
)
SMALLEST = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 16".split()


def planned_peak(world: int, *flags: str) -> int:
    """Bytes of the fullest rank of the large model."""
    config = config_from(RunConfig, parse_typed(command_line.parser(RunConfig), [*LARGE, *flags]))
    return fullest(config, make_plan(config, world, 8192)).total


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("more", [(), ("--bf16",)])
def test_a_stage_takes_less_than_the_one_before(world, more):
    """... also with what is gathered and reduced ahead."""
    stages = (DISTRIBUTED, ZERO2, ZERO3)
    first, second, third = (planned_peak(world, *zero, *more) for zero in stages)
    assert third < second < first


@pytest.mark.sweep
def test_a_machine_holds_what_the_plan_says(tmp_path, capsys):
    """0.7B on four ranks, where ZeRO-1 would need nearly twice as much: the sum of what each rank had
    at most, less that of ranks with a model of next to nothing."""
    planned, first_stage = (
        4 * planned_peak(4, "--bf16", *zero) for zero in (ZERO3[:2], DISTRIBUTED)
    )
    if host.available_memory() < planned + 2 * GIB:
        pytest.skip(f"needs {planned / GIB + 2:.0f} GiB")
    peaks = []
    for name, sizes in (("smallest", SMALLEST), ("large", ())):
        words = with_flags([*LARGE, "--bf16", *ZERO3[:2]], *sizes)
        train(tmp_path / name, words, 4, hook=resident, seconds=840)
        files = [tmp_path / name / f"resident.{rank}" for rank in range(4)]
        peaks.append(sum(int(file.read_text()) * 1024 for file in files))
    smallest, peak = peaks
    with capsys.disabled():
        print(
            f"\n0.7B on 4 ranks, ZeRO-3: {(peak - smallest) / GIB:.2f} GiB measured (4 ranks without "
            f"it: {smallest / GIB:.2f}), {planned / GIB:.2f} planned; ZeRO-1 {first_stage / GIB:.2f}"
        )
    assert peak - smallest == pytest.approx(planned, rel=0.05)
    assert first_stage > 1.8 * planned
