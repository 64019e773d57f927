"""A resumed run is the same run, bit for bit: losses, gradient norms, weights and optimizer
state."""

import re
from pathlib import Path

import pytest

from megatron.checkpoint import reading
from tests.runs import SMALL, same_tensors, train, write_text

EXACT = (
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "consumed_samples",
    "skipped",
)


def flags(folder: Path, data: str, part: int, extra: list[str]) -> list[str]:
    """A run of four times `part` iterations that saves after each part."""
    save = str(folder / "save")
    return [
        *SMALL,
        *extra,
        "--data-path",
        data,
        "--split",
        "90,10,0",
        "--train-iters",
        str(4 * part),
        "--save",
        save,
        "--load",
        save,
        "--save-interval",
        str(part),
    ]


CASES = {
    "default dropout, tied, over an epoch end": (1, []),
    "two ranks": (2, []),
    "an optimizer without state": (
        1,
        ["--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "0.1"],
    ),
    "bf16, untied, rope, swiglu, RMSNorm, GQA": (
        1,
        [
            "--bf16",
            "--untie-embeddings-and-output-weights",
            "--position-embedding-type",
            "rope",
            "--swiglu",
            "--normalization",
            "RMSNorm",
            "--group-query-attention",
            "--num-query-groups",
            "2",
            "--disable-bias-linear",
        ],
    ),
    "fp16 whose first checkpoint precedes the first update": (
        1,
        ["--fp16", "--initial-loss-scale", str(2.0**42), "--hysteresis", "1"],
    ),
    "selective recompute, document masks": (
        1,
        [
            "--recompute-activations",
            "--reset-attention-mask",
            "--reset-position-ids",
            "--eod-mask-loss",
        ],
    ),
    "sgd, clipping off, log of zeros": (
        1,
        ["--optimizer", "sgd", "--clip-grad", "0", "--log-num-zeros-in-grad"],
    ),
}


OFTEN = ("two ranks",)
RARE = ("selective recompute, document masks", "sgd, clipping off, log of zeros")


def mark(case: str) -> tuple[pytest.MarkDecorator, ...]:
    """The tier of a case."""
    if case in RARE:
        return (pytest.mark.sweep,)
    return () if case in OFTEN else (pytest.mark.campaign,)


@pytest.mark.parametrize("case", [pytest.param(case, marks=mark(case)) for case in CASES])
def test_killed_twice_and_resumed(case, tmp_path):
    world, extra = CASES[case]
    part = 10 if case.startswith(("fp16", "sgd")) else 4
    # the samples of the run are more than an epoch of this
    data = write_text(tmp_path / "text", 26 * part)
    straight = train(tmp_path / "straight", flags(tmp_path / "straight", data, part, extra), world)
    assert [row["iteration"] for row in straight.rows] == list(range(1, 4 * part + 1))
    argv = flags(tmp_path / "killed", data, part, extra)
    # dies in that one, resumes from `part`
    train(tmp_path / "killed", argv, world, kill_at=part + 2)
    # dies in 2 * part + 2, resumes from 2 * part
    train(tmp_path / "killed", argv, world, kill_at=part + 2)
    resumed = train(tmp_path / "killed", argv, world)
    assert resumed.resumes[-1] == 2 * part
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())
    if "fp16" in case:
        assert (
            all(row["skipped"] for row in straight.rows[:10]) and not straight.rows[39]["skipped"]
        )
        assert reading.load(straight.save, 10).state.optimizer["step"] == 0
    else:
        losses = [row["lm_loss"] for row in straight.rows]
        assert losses[-1] < losses[0] - 0.1
    preamble = " ".join(straight.first_rank_log.split())
    epochs = re.search(r" data /.*? samples \(([\d.]+) epochs\)", preamble)
    assert 1.0 < float(epochs[1]) < 2.0


def test_workers_and_prefetch_change_nothing(tmp_path):
    """Position is counters alone: another micro-batch size after the resume reads the same
    samples."""
    data = write_text(tmp_path / "text", 260)
    base = [*SMALL, "--fp64", "--hidden-dropout", "0", "--attention-dropout", "0"]
    run = [
        *base,
        "--data-path",
        data,
        "--split",
        "90,10,0",
        "--train-iters",
        "12",
        "--save-interval",
        "6",
    ]
    one = train(tmp_path / "one", [*run, "--save", str(tmp_path / "one/save")])
    train(tmp_path / "two", [*run, "--save", str(tmp_path / "two/save"), "--exit-interval", "6"])
    two = train(
        tmp_path / "two",
        [
            *run,
            "--save",
            str(tmp_path / "two/save"),
            "--load",
            str(tmp_path / "two/save"),
            "--micro-batch-size",
            "4",
        ],
        world=2,
    )
    for (loss, norm), (other_loss, other_norm) in zip(
        one.series("lm_loss", "grad_norm"), two.series("lm_loss", "grad_norm"), strict=True
    ):
        assert loss == pytest.approx(other_loss, rel=1e-10) and norm == pytest.approx(
            other_norm, rel=1e-10
        )
