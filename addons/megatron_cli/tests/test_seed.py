"""The two runs of the seed's log, read back and written again by the code that writes a run's
log."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron.analysis.log_reader import Record, read_text
from megatron.config import command_line
from megatron.config.plan.plan import make_plan
from megatron.features.registry import RunConfig
from megatron.optimizer.scheduler import build_scheduler
from megatron.parallel.context import Axis
from megatron.timers import Timers
from megatron.training.logging.training_log import TrainingLog
from megatron.training.result import IterationResult
from tests.forkrun import ROOT
from tests.runs import SMALL, train, with_flags, write_text

SEED = (ROOT / "tests/golden/seed_log.txt").read_text()
RANKS = 24
VOCABULARY = 32000
# The configuration that the printed numbers follow from.
FLAGS = """--num-layers 3 --hidden-size 4096 --ffn-hidden-size 11008 --swiglu --num-attention-heads 32
 --group-query-attention
 --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --untie-embeddings-and-output-weights
 --disable-bias-linear --normalization RMSNorm --use-rotary-position-embeddings --recompute-granularity full
 --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 4 --global-batch-size 768 --train-iters 635782
 --lr 3e-4 --lr-warmup-fraction 0.05 --lr-decay-style cosine --mock-data --vocab-size 32000 --bf16
 --make-vocab-size-divisible-by 1 --log-format aurora --log-interval 1""".split()


def test_the_seeds_log_is_read():
    records = read_text(SEED).records
    assert [r.iteration for r in records] == [1, 2, 3, 4, 1, 2, 3]
    assert [r.loss for r in records] == [
        11.167250,
        11.164009,
        11.164038,
        11.171233,
        11.167250,
        None,
        None,
    ]
    assert [r.grad_norm for r in records] == [6.363, 6.271, 6.279, 6.272, 6.363, None, None], (
        "stale norms are not taken"
    )
    assert [r.skipped for r in records] == [0, 0, 0, 0, 0, 1, 1]
    assert {(r.train_iters, r.global_batch_size) for r in records} == {(635782, 768)}
    assert records[1].numbers["lm_tflops"] == 70.98 and records[1].numbers["ds_tflops"] == 91.53


class Optimizer:
    """What the scheduler moves."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0}]


def printed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    records: list[Record],
    all_trained: bool,
) -> list[str]:
    """The lines of a run of 24 ranks with the losses, norms and times of `records`, blanks folded
    as the page folded them.

    Learning rate and counters are the scheduler's and the plan's. With `all_trained` the skipped
    iterations are rated as work, as the seed's loop did."""
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    monkeypatch.setenv("RANK", str(RANKS - 1))
    ranks = {"WORLD_SIZE": str(RANKS), "RANK": "0"}
    config = command_line.read(FLAGS, ranks, tree=RunConfig).config
    plan = make_plan(config, RANKS, VOCABULARY)
    optimizer = Optimizer()
    scheduler = build_scheduler(config, plan, optimizer)
    log = TrainingLog(config, plan, Timers(0, lambda: None), Axis("world"), [])
    capsys.readouterr()
    for r in records:
        scheduler.after_iteration(plan.global_batch_size(r.iteration))
        seconds = plan.global_batch_size(r.iteration) * 4096 / (RANKS * r.numbers["tokens_per_gpu"])
        result = IterationResult(
            iteration=r.iteration,
            global_batch_size=plan.global_batch_size(r.iteration),
            consumed_samples=plan.consumed_samples(r.iteration),
            learning_rate=optimizer.param_groups[0]["lr"],
            seconds=seconds,
            loss=r.loss,
            grad_norm=r.grad_norm,
        )
        skipped = not r.trained and not all_trained
        log.add(replace(result, skipped="user", seconds=0.0) if skipped else result)
    return [
        re.sub(r" +", " ", line).partition(" - ")[2]
        for line in capsys.readouterr().out.splitlines()
    ]


def seed_lines() -> list[str]:
    """The seed's iteration lines up to their last figure, its two ways of writing a number made
    one."""
    text = (
        SEED.replace("global_batch_size=768", "global_batch_size= 768")
        .replace("| [DS]", " | [DS]")
        .replace("  ", " ")
    )
    return re.findall(r"iteration= \d/ 635782 .*?\[DS\]TFLOPs=[\d.]+", text)


@pytest.mark.parametrize("records", [slice(0, 4), slice(4, 7)], ids=["unskipped", "skipped"])
def test_the_seeds_lines_are_written_to_the_digit(records, capsys, monkeypatch):
    ours = printed(capsys, monkeypatch, read_text(SEED).records[records], all_trained=True)
    theirs = seed_lines()[records]
    assert len(ours) == len(theirs) == records.stop - records.start
    for mine, seeds in zip(ours, theirs, strict=True):
        # the two things that the seed's loop got from the line before or from its skip
        if "lm loss" not in seeds:
            seeds = re.sub(r"grad_norm=\S+ \| ", "", seeds).replace(
                "skipped_iterations= 1", "skipped_iterations= 0"
            )
        assert mine == seeds + " |"


def test_a_skipped_line_of_ours_has_no_stale_norm_and_no_rate(capsys, monkeypatch):
    ours = printed(capsys, monkeypatch, read_text(SEED).records[4:], all_trained=False)
    theirs = seed_lines()[4:]
    for mine, seeds in zip(ours[1:], theirs[1:], strict=True):
        seeds = re.sub(r"grad_norm=\S+ \| | \| samples_per_second.*", "", seeds)
        assert mine == re.sub(r"ms=[\d.]+", "ms=0.0", seeds) + " |"


def test_the_seeds_tflops_follow_from_its_rates(capsys, monkeypatch):
    for mine, record in zip(
        read_text(
            "\n".join(printed(capsys, monkeypatch, read_text(SEED).records, all_trained=True))
        ).records,
        read_text(SEED).records,
        strict=True,
    ):
        for name in ("lm_tflops", "ds_tflops"):
            assert mine.numbers[name] == pytest.approx(record.numbers[name], abs=0.01)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


@pytest.mark.parametrize(
    "ranges",
    [pytest.param([], marks=pytest.mark.campaign), ["--train-range-to-skip", "2", "3"]],
    ids=["whole", "skips"],
)
def test_the_learning_rates_of_the_seed(text, tmp_path, ranges):
    """Its batch size, length, peak and warm-up: what its two logs print at iterations 1 to 4."""
    words = with_flags(
        SMALL,
        *(
            "--data-order epoch --train-iters 635782 --global-batch-size 768 --micro-batch-size "
            "768 --lr 3e-4 --lr-warmup-fraction 0.05 --log-format aurora --seq-length 2 "
            "--max-position-embeddings 2 --eval-iters 0 --exit-interval 4"
        ).split(),
        "--data-path",
        text,
        *ranges,
    )
    at = words.index("--lr-warmup-iters")
    done = train(tmp_path / "run", words[:at] + words[at + 2 :])
    assert re.findall(r"learning_rate=(\S+)", done.log) == [
        "9.4372e-09",
        "1.88744e-08",
        "2.83116e-08",
        "3.77488e-08",
    ]
    assert re.findall(r"consumed_samples= *(\d+)", done.log) == ["768", "1536", "2304", "3072"]
    assert [
        "lm loss=" in line for line in done.log.splitlines() if "[training_log:661]" in line
    ] == [
        True,
        not ranges,
        not ranges,
        True,
    ]
