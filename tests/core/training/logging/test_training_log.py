"""What whole small runs write down: metrics file, iteration lines, timers, a device's memory."""

import math
import re
from pathlib import Path

import pytest
import torch

from megatron import device as devices
from megatron.training.launch.initialize import Runtime
from megatron.training.logging import training_log
from megatron.training.logging.iteration import ResultWriter
from megatron.training.result import IterationResult
from tests.core.training.tiny_run import make_run
from tests.forkrun import ROOT
from tests.runs import SMALL, Finished, train, write_text

ITERATIONS = 6
KEYS = {
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "consumed_samples",
    "consumed_tokens",
    "elapsed_ms",
    "tokens_per_second",
    "tflops",
    "loss_scale",
    "global_batch_size",
    "skipped",
    "skip_reason",
    "skipped_iterations_total",
    "skipped_samples",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 260)


def run(
    text: str, folder: Path, *extra: str, world: int = 1, iterations: int = ITERATIONS
) -> Finished:
    return train(
        folder,
        [
            *SMALL,
            "--data-path",
            text,
            "--split",
            "80,10,10",
            "--train-iters",
            str(iterations),
            *extra,
        ],
        world,
    )


def test_metrics_file(text, tmp_path):
    """One row an iteration with the documented keys, and numbers that agree with each other and
    with the log."""
    done = run(text, tmp_path / "run", "--train-range-to-skip", "3", "3")
    assert all(set(row) >= KEYS for row in done.rows)  # features add theirs
    for n, (row, line) in enumerate(zip(done.rows, done.lines, strict=True), 1):
        assert row["iteration"] == n == int(line["iteration"]) and row["consumed_samples"] == 8 * n
        assert (
            row["consumed_tokens"] == 8 * n * 32
            and row["global_batch_size"] == 8
            and row["loss_scale"] == 1.0
        )
        assert float(line["lr"]) == pytest.approx(row["learning_rate"], rel=5e-3)
        if n == 3:
            assert (row["skipped"], row["skip_reason"]) == (1, "user")
            assert [
                row[key] for key in ("lm_loss", "grad_norm", "tokens_per_second", "tflops")
            ] == [None] * 4
            assert row["elapsed_ms"] == 0.0 and "loss" not in line and "grad norm" not in line
            continue
        assert (row["skipped"], row["skip_reason"]) == (0, None)
        assert (row["skipped_iterations_total"], row["skipped_samples"]) == (
            (1, 8) if n > 3 else (0, 0)
        )
        assert line["loss"] == f"{row['lm_loss']:.4f}"
        assert line["grad norm"] == f"{row['grad_norm']:.3f}"
        assert row["tokens_per_second"] == pytest.approx(
            8 * 32 / (row["elapsed_ms"] / 1000), rel=1e-3
        )
        assert 0 < row["tflops"] < 1


def test_the_keys_are_documented():
    """Each has its row in docs/running.md, and no other has."""
    table = (ROOT / "docs/running.md").read_text().partition("## The metrics file")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(KEYS)


def test_overflows_have_a_reason_of_their_own(text, tmp_path):
    """fp16 that starts too high: skipped and counted, no norm, the loss scale after the step."""
    high = 2.0**44
    done = run(
        text,
        tmp_path / "run",
        "--fp16",
        "--initial-loss-scale",
        str(high),
        "--hysteresis",
        "1",
        "--log-interval",
        "3",
    )
    overflow = [row["skip_reason"] == "overflow" for row in done.rows]
    # of the scale before: each line has the one that its step left behind
    scale = {True: 0.5, False: 1.0}
    expected = [
        high * math.prod(scale[one] for one in overflow[: n + 1]) for n in range(len(overflow))
    ]
    assert [row["loss_scale"] for row in done.rows] == expected
    assert overflow[0] and all(row["grad_norm"] is None for row in done.rows[:3])
    intervals = (overflow[:1], overflow[1:3], overflow[3:])  # the first iteration has a line, too
    for line, skipped in zip(done.lines, intervals, strict=True):
        assert int(line.get("skipped", 0)) == sum(skipped)
        assert ("loss" in line) == (not all(skipped))


def test_an_interval_averages_its_iterations(text, tmp_path):
    """Loss and TFLOP/s of a line are those of the iterations since the last; skipped work is no
    work."""
    done = run(
        text,
        tmp_path / "run",
        "--log-interval",
        "3",
        "--train-range-to-skip",
        "2",
        "2",
        "--log-throughput",
    )
    rates = re.findall(r" (\S+) TFLOP/s per rank", done.log)
    for line, rate, first, last in zip(done.lines, rates, (0, 1, 3), (1, 3, 6), strict=True):
        rows = [row for row in done.rows[first:last] if not row["skipped"]]
        assert line["loss"] == f"{math.fsum(row['lm_loss'] for row in rows) / len(rows):.4f}"
        mean = len(rows) / sum(1 / row["tflops"] for row in rows)
        assert float(rate) == pytest.approx(mean, rel=2e-3, abs=1e-6)  # as the file rounds
        assert line.get("user-skipped") == ("1" if last == 3 else None)


def test_norms_and_zeros(text, tmp_path):
    """The parameters' norm is that of the checkpoint; gradients of vocabulary rows that do not
    occur are zeros."""
    save = ["--save", str(tmp_path / "run/save"), "--save-interval", str(ITERATIONS)]
    done = run(
        text,
        tmp_path / "run",
        "--log-params-norm",
        "--log-num-zeros-in-grad",
        "--untie-embeddings-and-output-weights",
        *save,
    )
    weights = [t for name, t in done.tensors().items() if not name.startswith("optimizer.")]
    norm = math.sqrt(sum(t.double().square().sum().item() for t in weights))
    last = done.lines[-1]
    assert float(last["params norm"]) == pytest.approx(norm, rel=6e-4)
    # of the input embedding: text has 40 tokens and the end of document
    unused_rows = 211 - 41
    assert unused_rows * 32 <= float(last["zeros"]) <= unused_rows * 32 + 3 * 32, (
        "no padding is counted"
    )
    plain = run(text, tmp_path / "plain").lines[-1]
    assert "params norm" not in plain and "zeros" not in plain


TIMERS = [
    "forward-backward",
    "batch-generator",
    "forward-compute",
    "backward-compute",
    "all-grads-sync",
    "optimizer",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
]


@pytest.mark.parametrize(
    "level, option, names",
    [
        pytest.param(0, "minmax", [], marks=pytest.mark.campaign),
        (1, "minmax", [n for n in TIMERS if "-compute" not in n and "batch" not in n]),
        pytest.param(2, "minmax", TIMERS, marks=pytest.mark.campaign),
        (2, "all", TIMERS),
        pytest.param(2, "max", TIMERS, marks=pytest.mark.campaign),
    ],
)
def test_timers(text, tmp_path, level, option, names):
    """The block after each iteration line, by level and option; printed by the last rank over
    both."""
    done = run(
        text,
        tmp_path / "run",
        "--timing-log-level",
        str(level),
        "--timing-log-option",
        option,
        "--log-num-zeros-in-grad",
        world=2,
        iterations=4,
    )
    header = {"minmax": "(min, max) time", "max": "max time", "all": "times"}[
        option
    ] + " across ranks (ms):"
    after = done.log.split(" iter 4/4 ")[1].split("\n", 1)[1]
    after = re.split(re.escape(header) + r"\n +evaluate| final validation", after)[0]
    if not names:
        assert header not in after
        return
    assert after.startswith(header + "\n") and "forward-backward" not in done.first_rank_log
    if option == "all":
        assert (
            re.findall(
                r"^  ([-\w/]+):\n     rank  0: \d+\.\d\d\n     rank  1: \d+\.\d\d$", after, re.M
            )
            == names
        )
        return
    number = r"\d+\.\d\d"
    value = rf"\(({number}), ({number})\)" if option == "minmax" else f"({number})"
    rows = re.findall(rf"^    ([-\w/]+) \.*: {value}$", after, re.M)
    assert [row[0] for row in rows] == names
    if option == "minmax":
        assert all(float(low) <= float(high) for _, low, high in rows)
    by_name = {row[0]: float(row[-1]) for row in rows}
    assert by_name["optimizer"] <= by_name["forward-backward"] * 1000


GIB = 2**30
REPORT = {
    "allocated": 1.5 * GIB,
    "max allocated": 2 * GIB,
    "reserved": 4 * GIB,
    "max reserved": 8 * GIB,
    "allocations": 17,
}


class Memory(ResultWriter):
    """Asks for the device's memory."""

    def __init__(self):
        self.asked = []

    def iteration(self, result, teraflops, memory):
        self.asked.append(memory())


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_memory_of_a_device(monkeypatch, capsys, dp_rank):
    """Where the device has memory: one line after the first iteration line."""
    test_run = make_run(log_interval=1)
    monkeypatch.setattr(devices, "memory_report", lambda device: REPORT)
    ctx = type("Ctx", (), {"dp": type("Axis", (), {"rank": dp_rank})})
    writer = Memory()
    log = training_log.TrainingLog(
        test_run.config,
        test_run.plan,
        test_run.timers,
        test_run.runtime.ctx.world,
        [writer],
        Runtime(torch.device("cpu"), ctx, 1, 0),
    )
    for iteration in (1, 2):
        log.add(IterationResult(iteration=iteration, global_batch_size=4, seconds=0.5, loss=2.0))
    memory = (
        " memory of rank 0 after iteration 1 | allocated 1.50 GiB | peak 2.00 GiB | "
        "reserved 4.00 GiB\n"
    )
    assert capsys.readouterr().out.count(memory) == (1 if dp_rank == 0 else 0)
    assert writer.asked == [REPORT, REPORT]
