"""Megatron's tags on TensorBoard, which runs have with Megatron's log."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.runs import SMALL, Finished, train, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 260)


def run(text: str, folder: Path, *extra: str, world: int = 1) -> Finished:
    data = ["--data-path", text, "--split", "80,10,10", "--train-iters", "6"]
    return train(folder, [*SMALL, "--log-format", "megatron", *data, *extra], world)


def events(folder: Path):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def points(board, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in board.Scalars(tag)]


SWITCHED_ON = (
    "--log-timers-to-tensorboard --log-batch-size-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard "
    "--log-world-size-to-tensorboard --log-throughput --log-params-norm --log-num-zeros-in-grad "
    "--timing-log-level 1"
).split()


def test_tensorboard_with_everything(text, tmp_path):
    """Megatron's tags, against iterations and against samples, from the last of two ranks."""
    board = tmp_path / "board"
    done = run(
        text,
        tmp_path / "run",
        "--tensorboard-dir",
        str(board),
        *SWITCHED_ON,
        "--eval-interval",
        "3",
        "--train-range-to-skip",
        "2",
        "2",
        world=2,
    )
    found = events(board)
    both = [
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "world-size",
        "grad-norm",
        "num-zeros",
        "params-norm",
        "lm loss validation",
        "lm loss validation ppl",
    ]
    alone = [
        "iteration-time",
        "throughput",
        "forward-backward-time",
        "optimizer-time",
        "all-grads-sync-time",
        "optimizer-inner-step-time",
    ]
    tags = set(found.Tags()["scalars"])
    assert tags >= {*both, *(f"{tag} vs samples" for tag in both), *alone}
    # this device has no memory of its own to tell of
    assert not any(tag.startswith("mem-") for tag in tags)
    trained = [row for row in done.rows if not row["skipped"]]
    for tag, key in (("lm loss", "lm_loss"), ("grad-norm", "grad_norm")):
        got = points(found, tag)
        assert [step for step, _ in got] == [1, 3, 4, 5, 6]
        assert [value for _, value in got] == pytest.approx([row[key] for row in trained], rel=1e-6)
    assert [s for s, _ in points(found, "lm loss vs samples")] == [
        row["consumed_samples"] for row in trained
    ]
    assert points(found, "skipped") == [(2, 1.0)]
    rates = points(found, "learning-rate")
    assert [s for s, _ in rates] == list(range(1, 7))
    assert [v for _, v in rates] == pytest.approx(
        [row["learning_rate"] for row in done.rows], rel=1e-6
    )
    assert points(found, "batch-size") == [(n, 8.0) for n in range(1, 7)]
    assert points(found, "world-size") == [(n, 2.0) for n in range(1, 7)]
    losses = [loss for *_, loss in done.evaluations]
    valid = points(found, "lm loss validation")
    assert [s for s, _ in valid] == [3, 6, 6, 6] and [v for _, v in valid] == pytest.approx(
        losses, rel=1e-6
    )
    perplexities = [v for _, v in points(found, "lm loss validation ppl")]
    assert perplexities == pytest.approx(list(map(math.exp, losses)), rel=1e-5)
    texts = {
        tag.removesuffix("/text_summary"): found.Tensors(tag)[0] for tag in found.Tags()["tensors"]
    }
    assert texts["num_layers"].step == 0 and texts["num_layers"].tensor_proto.string_val[0] == b"2"
    assert len(texts) > 200


def test_tensorboard_with_defaults(text, tmp_path):
    board = tmp_path / "board"
    done = run(
        text,
        tmp_path / "run",
        "--tensorboard-dir",
        str(board),
        "--tensorboard-log-interval",
        "2",
        "--no-log-loss-scale-to-tensorboard",
    )
    after, line, before = (
        done.log.index(f"{words} ...\n")
        for words in ("tokenizer", "> setting tensorboard", "torch distributed")
    )
    assert after < line < before
    found = events(board)
    expected = {
        f"{tag}{suffix}"
        for tag in ("learning-rate", "lm loss", "grad-norm", "lm loss validation")
        for suffix in ("", " vs samples")
    }
    assert set(found.Tags()["scalars"]) == expected
    assert [s for s, _ in points(found, "lm loss")] == [2, 4, 6]
