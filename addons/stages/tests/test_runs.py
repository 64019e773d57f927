"""Runs in stages: three stages in one are three jobs to the bit, whatever interrupts them, and the
ledger has the samples that the data sets give."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.runs import (
    EXACT,
    NO_DROPOUT,
    SMALL,
    same_tensors,
    stop_in,
    train,
    with_flags,
    write_text,
)

STAGES = """
[[stage]]
until_iterations = 3
data-path = ["0.7", "{0}/a", "0.3", "{0}/b"]

[[stage]]
until_tokens = 1920
data-path = ["0.5", "{0}/a", "0.5", "{0}/b"]
seq-length = 48
global-batch-size = 4
micro-batch-size = 2
rotary-base = 50000

[[stage]]
data-path = "{0}/b"
lr = 0.001
min-lr = 0.0001
"""
ENDS = "3,9"
FP64 = "--fp64"
# the flags of the three stages as those of three jobs
JOBS = (
    "--data-path 0.7 {0}/a 0.3 {0}/b --seq-length 32 "
    "--step-batch-size-schedule 0:8,768:4 --global-batch-size 4",
    "--data-path 0.5 {0}/a 0.5 {0}/b --seq-length 48 --rotary-base 50000 "
    "--step-batch-size-schedule 0:8,1152:4 --global-batch-size 4",
    "--data-path {0}/b --seq-length 48 --rotary-base 50000 --lr 0.001 --min-lr 0.0001 "
    "--step-batch-size-schedule 0:8,1152:4 --global-batch-size 4",
)
RESUMED = ("--allow-data-order-change", "--override-opt_param-scheduler")
LAYOUTS = {
    "one rank, Megatron's order": (1, ()),
    "dp2, distributed optimizer, epoch order": (
        2,
        ("--use-distributed-optimizer", "--data-order", "epoch"),
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "a", 90, seed=1)
    write_text(folder / "b", 40, seed=2)
    (folder / "stages.toml").write_text(STAGES.format(folder))
    return folder


def argv(texts: Path, save: Path, *more: str) -> list[str]:
    mine = ["--data-path", f"{texts}/a", "--split", "80,20,0", "--train-iters", "12"]
    rope = ["--position-embedding-type", "rope", "--max-position-embeddings", "64"]
    return with_flags(
        [*SMALL, *NO_DROPOUT, *rope, *mine], "--save", str(save), "--load", str(save), *more
    )


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_stages_are_three_jobs(texts, tmp_path, layout):
    """Losses, norms, rates and every tensor of every checkpoint at the end of a stage, and after a
    kill in the second stage."""
    world, flags = LAYOUTS[layout]
    stages = ("--stages", str(texts / "stages.toml"))
    run = train(tmp_path / "run", argv(texts, tmp_path / "run/save", *stages, *flags), world)
    save = tmp_path / "jobs/save"
    for number, words in enumerate(JOBS):
        job = ("--phase-transition-iterations", ENDS, *words.format(texts).split(), *flags)
        resumed = RESUMED if number else ()
        jobs = train(tmp_path / "jobs", argv(texts, save, *job, *resumed), world)
    assert run.saved == [3, 9, 12]
    assert len(run.rows) == 12
    assert run.series(*EXACT) == jobs.series(*EXACT)
    for iteration in run.saved:
        same_tensors(run.tensors(iteration), jobs.tensors(iteration))

    killed = argv(texts, tmp_path / "killed/save", *stages, *flags, "--save-interval", "5")
    train(tmp_path / "killed", killed, world, kill_at=7)
    resumed = train(tmp_path / "killed", killed, world)
    assert resumed.resumes[0] == 0 or 5 in resumed.resumes
    assert resumed.series(*EXACT) == run.series(*EXACT)
    same_tensors(resumed.tensors(), run.tensors())


def test_a_signal_at_the_end_of_a_stage_ends_the_run(texts, tmp_path):
    """The next stage is for the job that resumes."""
    stages = ("--stages", str(texts / "stages.toml"))
    run = train(
        tmp_path / "run",
        argv(texts, tmp_path / "run/save", *stages),
        hook=functools.partial(stop_in, 3),
    )
    assert run.saved == [3] and len(run.rows) == 3


@pytest.mark.campaign
def test_rotary_base_and_length_change_alike_in_a_layout(texts, tmp_path):
    """With tensor parallelism the losses and norms of one process, after the change too."""
    base = argv(texts, tmp_path / "one/save", "--stages", str(texts / "stages.toml"), FP64)
    one = train(tmp_path / "one", base)
    save = ("--save", str(tmp_path / "two/save"), "--load", str(tmp_path / "two/save"))
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    two = train(tmp_path / "two", with_flags(base, *save, *layout), 2)
    for row, other in zip(one.rows, two.rows, strict=True):
        assert row["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-10)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-10)
    # Adam's moments go on: v is at least what is left of it after the six updates of the stage
    before, after = one.tensors(3), one.tensors(9)
    names = [name for name in before if name.startswith("optimizer.exp_avg_sq.")]
    assert names and all(before[name].max() > 0 for name in names)
    for name in names:
        assert (after[name] >= before[name] * (0.999**6 * (1 - 1e-9))).all(), name
