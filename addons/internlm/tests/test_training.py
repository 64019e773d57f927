"""InternLM's knobs through the whole program: each changes the numbers that it should; resumed runs
go on with them."""

import math
import re
from pathlib import Path

import pytest

from tests.runs import NO_DROPOUT, SMALL, train, with_flags, write_text

pytestmark = pytest.mark.campaign
LLAMA = [
    "--swiglu",
    "--normalization",
    "RMSNorm",
    "--position-embedding-type",
    "rope",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    "--train-iters",
    "6",
    "--split",
    "90,10,0",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text", 200)


@pytest.fixture
def flags(corpus):
    return [*with_flags(SMALL, *NO_DROPOUT, *LLAMA), "--data-path", corpus]


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    """What the same run does without any of these flags."""
    return train(
        tmp_path_factory.mktemp("plain"),
        [*with_flags(SMALL, *NO_DROPOUT, *LLAMA), "--data-path", corpus],
    )


# flag, first iteration that differs, what differs there; before it and beside it all is equal
TOGGLES = [
    ("--label-smoothing 0.1", 1, {"lm_loss", "grad_norm"}),
    ("--embed-grad-scale 0.1", 1, {"grad_norm"}),
    ("--init-scheme internlm", 1, {"lm_loss", "grad_norm"}),
    ("--ffn-multiple-of 96", 1, {"lm_loss", "grad_norm", "tflops"}),
    ("--lr-init-iters 2", 1, {"learning_rate"}),
    ("--lr-warmup-first-step", 1, {"learning_rate"}),
    ("--apply-wd-to-all --weight-decay 0.5", 3, {"lm_loss", "grad_norm"}),
    ("--adam-beta2-schedule-c 0.9 --adam-beta2 0.1", 4, {"lm_loss", "grad_norm"}),
    (
        "--rampup-micro-batches 1 1 2",
        1,
        {"lm_loss", "grad_norm", "global_batch_size", "consumed_samples", "consumed_tokens"},
    ),
]
KEYS = (
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "global_batch_size",
    "consumed_samples",
    "consumed_tokens",
)
BESIDE = {
    "--adam-beta2-schedule-c 0.9 --adam-beta2 0.1": ["--adam-beta2", "0.1"],
    "--apply-wd-to-all --weight-decay 0.5": ["--weight-decay", "0.5"],
}


def differing(row: dict, other: dict) -> set[str]:
    """What differs by more than the order in which a norm's parameter groups are summed."""
    return {key for key in KEYS if row[key] != pytest.approx(other[key], rel=1e-12, abs=0.0)}


@pytest.mark.parametrize(("typed", "first", "what"), TOGGLES, ids=[row[0] for row in TOGGLES])
def test_a_flag_changes_what_it_says(typed, first, what, flags, plain, tmp_path):
    words = typed.split()
    other = plain
    if typed in BESIDE:
        other = train(tmp_path / "beside", with_flags(flags, *BESIDE[typed]))
    rows = train(tmp_path / "run", with_flags(flags, *words)).rows
    for row, before in zip(rows[: first - 1], other.rows, strict=False):
        assert not differing(row, before)
    assert differing(rows[first - 1], other.rows[first - 1]) == what & set(KEYS)


def test_the_batch_grows_and_the_rate_stays_a_function_of_the_iteration(flags, plain, tmp_path):
    save = str(tmp_path / "save")
    words = with_flags(
        flags, "--rampup-micro-batches", "1", "1", "2", "--save", save, "--save-interval", "3"
    )
    rows = train(tmp_path / "run", words).rows
    assert [row["global_batch_size"] for row in rows] == [2, 2, 4, 4, 6, 6]
    assert [row["learning_rate"] for row in rows] == [row["learning_rate"] for row in plain.rows]
    again = train(tmp_path / "again", [*words, "--load", save, "--ckpt-step", "3"]).rows
    for key in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [row[key] for row in again] == [row[key] for row in rows[3:]]


def test_schedules_go_on_after_a_resume(flags, tmp_path):
    knobs = [
        "--adam-beta2-schedule-c",
        "0.9",
        "--adam-beta2",
        "0.1",
        "--lr-init-iters",
        "1",
        "--lr-warmup-first-step",
        "--label-smoothing",
        "0.05",
        "--embed-grad-scale",
        "0.5",
        "--apply-wd-to-all",
        "--init-scheme",
        "internlm",
    ]
    words = with_flags(flags, *knobs, "--save", str(tmp_path / "save"), "--save-interval", "3")
    straight = train(tmp_path / "run", words).rows
    again = train(
        tmp_path / "again", [*words, "--load", str(tmp_path / "save"), "--ckpt-step", "3"]
    ).rows
    for key in ("lm_loss", "grad_norm", "learning_rate"):
        assert [row[key] for row in again] == [row[key] for row in straight[3:]]


def test_the_scalers_factors_reach_a_run(flags, tmp_path):
    words = with_flags(
        flags,
        "--fp16",
        "--initial-loss-scale",
        "1024",
        "--max-loss-scale",
        "20000",
        "--loss-scale-window",
        "1",
        "--loss-scale-growth-factor",
        "4",
    )
    assert [row["loss_scale"] for row in train(tmp_path, words).rows[:4]] == [
        4096.0,
        16384.0,
        20000.0,
        20000.0,
    ]


def test_a_fraction_of_recomputed_layers_changes_no_number(flags, plain, tmp_path):
    rows = train(tmp_path, [*flags, "--recompute-fraction", "0.5"]).rows
    assert [(r["lm_loss"], r["grad_norm"]) for r in rows] == [
        (r["lm_loss"], r["grad_norm"]) for r in plain.rows
    ]


def test_the_first_loss_is_that_of_internlms_deviation(tmp_path: Path):
    """ln V + 0.0052^2 h / 2 for a narrow stand-in."""
    words = with_flags(
        [*SMALL, *NO_DROPOUT, *LLAMA[:-2]],
        "--vocab-size",
        "4096",
        "--hidden-size",
        "256",
        "--train-iters",
        "1",
        "--init-scheme",
        "internlm",
        "--ffn-multiple-of",
        "256",
        "--lr-warmup-iters",
        "0",
    )
    [row] = train(tmp_path, [*words, "--mock-data"]).rows
    assert row["lm_loss"] == pytest.approx(math.log(4096) + 0.0052**2 * 256 / 2, abs=0.03)


WHOLE = ("--use-distributed-optimizer", "--zero-partition", "whole-params")
DUMMY = with_flags(
    [*SMALL, *NO_DROPOUT, *LLAMA[:-2]],
    "--packed-samples",
    "--dummy-data",
    "internlm",
    "--fp64",
    "--train-iters",
    "4",
    "--log-accuracy",
    "--log-format",
    "internlm",
    "--micro-batch-size",
    "2",
    "--lr",
    "0.02",
    "--eval-iters",
    "0",
)


def test_the_share_of_right_labels_and_the_dialect(tmp_path):
    """The same counts on two ranks that share the vocabulary as on one; the line has what the
    metrics file has."""
    one = train(tmp_path / "one", DUMMY)
    two = train(tmp_path / "two", [*DUMMY, "--tensor-model-parallel-size", "2"], 2)
    for row, other in zip(one.rows, two.rows, strict=True):
        assert (
            row["acc"] == other["acc"] == row["acc/en"]
            and row["tokens/en"] == other["tokens/en"] > 0
        )
        assert row["loss/en"] == pytest.approx(row["lm_loss"], rel=1e-12) and row["acc/cn"] is None
    assert one.first_rank_log.count(" in set_device -- process rank 0 is bound to host:") == 1
    size = re.search(r"model parallel rank \(0, 0\): (\d+)", one.first_rank_log)[1]
    shared = train(tmp_path / "shared", with_flags(DUMMY, *WHOLE, "--exit-interval", "1"), 2)
    parts = re.search(
        r" -- Number of elements on ranks: \[(\d+), (\d+)\], rank:0", shared.first_rank_log
    )
    assert int(parts[1]) + int(parts[2]) == int(size) and parts[1] != parts[2]
    assert (
        "data parallel size: 2, pipeline parallel size: 1, tensor parallel size: 1\n"
        in shared.first_rank_log
    )
    assert shared.rows[0]["loss_from_metric"] == pytest.approx(one.rows[0]["lm_loss"], rel=1e-10)
    smoothed = train(
        tmp_path / "smoothed",
        [
            *with_flags(DUMMY, "--label-smoothing", "0.3", "--exit-interval", "1"),
            "--tensor-model-parallel-size",
            "2",
        ],
        2,
    ).rows[0]
    plain = one.rows[0]
    assert smoothed["lm_loss"] != plain["lm_loss"] and smoothed["acc"] == plain["acc"]
    for key in ("loss_from_metric", "loss/en"):
        assert smoothed[key] == pytest.approx(plain["lm_loss"], rel=1e-12)
    assert smoothed["perplexity"] == pytest.approx(math.exp(plain["lm_loss"]), rel=1e-9)
    # the samples repeat themselves: four steps find something
    assert one.rows[-1]["acc"] > 0.02
    lines = [line for line in one.first_rank_log.splitlines() if " tgs/tgs_all=" in line]
    assert len(lines) == 4
    for line, row in zip(lines, one.rows, strict=True):
        for text in (
            f" step={row['iteration'] - 1} ",
            f" acc={round(row['acc'], 4)} ",
            f" tokens/en={row['tokens/en']} ",
            f" num_samples_in_batch={row['num_samples_in_batch']} ",
            f" lr={row['learning_rate']} ",
            f" num_consumed_tokens={row['consumed_tokens']} ",
            " adam_beta2=0.999 ",
        ):
            assert text in line
