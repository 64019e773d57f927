"""Whole runs with gradients and Adam moments in 16 bits: layouts, resumes, checkpoints of other
dtypes."""

import re
from pathlib import Path

import pytest
import torch

from tests.runs import NO_DROPOUT, SMALL, Finished, same_tensors, train, with_flags, write_text

BF16 = (
    "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16 --adam-beta2 0.95"
).split()
FP16 = (
    "--fp16 --initial-loss-scale 4096 --use-precision-aware-optimizer --exp-avg-dtype fp16 "
    "--exp-avg-sq-dtype fp16 --adam-beta2 0.95"
).split()
SHARDED = ["--use-distributed-optimizer"]
OVERLAP = [*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "3000"]
EXACT = ("iteration", "lm_loss", "loss_scale", "consumed_samples", "skipped")
# Shards add the squares of the gradient norm in another order: where it clips nothing, all bits are
# equal with and without them.
UNCLIPPED = ["--clip-grad", "1000"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("low-precision-data") / "text", 120)


def run(folder: Path, data: str, world: int, *flags: str) -> Finished:
    """Eight iterations of two micro-batches or more, saved at the end and at a stop."""
    base = [*SMALL, *NO_DROPOUT, "--data-path", data, "--split", "90,10,0", "--train-iters", "8"]
    where = ["--save", str(folder / "save"), "--save-interval", "100"]
    return train(folder, with_flags([*base, *where], *flags), world)


def steps(found: Finished) -> list[int]:
    return [row["iteration"] for row in found.rows]


def differences(found: Finished, other: Finished) -> list[float]:
    """Relative differences of the losses of both runs."""
    pairs = zip(found.series("lm_loss"), other.series("lm_loss"), strict=True)
    return [abs(a - b) / b for (a,), (b,) in pairs]


@pytest.mark.campaign
@pytest.mark.parametrize("flags", [BF16, FP16])
def test_layouts_agree(flags, data, tmp_path):
    """Two ranks give the same bits sharded and overlapping or not; one process differs by the
    rounding of its sums."""
    unclipped = UNCLIPPED if flags is BF16 else []
    sharded = run(tmp_path / "sharded", data, 2, *flags, *unclipped, *OVERLAP)
    whole = run(tmp_path / "whole", data, 2, *flags, *unclipped)
    one = run(tmp_path / "one", data, 1, *flags, *unclipped)
    if unclipped:
        assert sharded.series(*EXACT) == whole.series(*EXACT)
        same_tensors(sharded.tensors(), whole.tensors())
    assert max(differences(sharded, whole)) < 2e-3
    assert max(differences(whole, one)) < 2e-3
    assert not any(row["skipped"] for row in one.rows)
    assert one.rows[-1]["lm_loss"] < one.rows[0]["lm_loss"] - 0.1
    narrow = torch.bfloat16 if "--bf16" in flags else torch.float16
    for name, tensor in sharded.tensors().items():
        moment = name.startswith("optimizer.exp_avg")
        wide = name.startswith("optimizer.fp32_param")
        assert tensor.dtype == (narrow if moment or not wide else torch.float32), name


@pytest.mark.campaign  # make test: tests/core/parity/test_shards.py
@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        pytest.param(BF16, OVERLAP, OVERLAP, marks=pytest.mark.sweep),
        (FP16, OVERLAP, OVERLAP),
        ([*BF16, *UNCLIPPED], [], OVERLAP),
        pytest.param([*BF16, *UNCLIPPED], OVERLAP, [], marks=pytest.mark.sweep),
    ],
)
def test_a_resume_is_exact_with_and_without_the_distributed_optimizer(
    flags, first, second, data, tmp_path
):
    straight = run(tmp_path / "straight", data, 2, *flags, *first)
    run(tmp_path / "parts", data, 2, *flags, *first, "--exit-interval", "4")
    load = ["--load", str(tmp_path / "parts/save")]
    resumed = run(tmp_path / "parts", data, 2, *flags, *second, *load)
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.campaign)])
def test_checkpoints_of_fp32_moments_are_converted_and_back(dtype, data, tmp_path):
    wide = ["--bf16", "--adam-beta2", "0.95"]
    narrow = [
        *wide,
        "--use-precision-aware-optimizer",
        "--exp-avg-dtype",
        dtype,
        "--exp-avg-sq-dtype",
        dtype,
    ]
    straight = run(tmp_path / "straight", data, 1, *wide)
    run(tmp_path / "wide", data, 1, *wide, "--exit-interval", "3")
    load = ["--load", str(tmp_path / "wide/save")]
    low = run(tmp_path / "low", data, 1, *narrow, *load, "--exit-interval", "6")
    load = ["--load", str(tmp_path / "low/save")]
    back = run(tmp_path / "back", data, 1, *wide, *load)
    assert steps(low) == [4, 5, 6] and steps(back) == [7, 8]
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    for key in ("exp_avg", "exp_avg_sq"):
        assert re.search(f" {key} .* float32: converted .* {name}$", low.first_rank_log, re.M)
        assert re.search(f" {key} .* {name}: converted .* float32$", back.first_rank_log, re.M)
    assert "converted" not in straight.first_rank_log
    moments = [t for name, t in low.tensors().items() if ".exp_avg" in name]
    assert {t.dtype for t in moments} == {getattr(torch, name)}
    for row, expected in zip([*low.rows, *back.rows], straight.rows[3:], strict=True):
        assert row["lm_loss"] == pytest.approx(expected["lm_loss"], rel=2e-3)
