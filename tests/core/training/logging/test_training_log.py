"""What whole small runs write down: metrics file, iteration lines in both dialects, timers,
progress."""

from __future__ import annotations

import math
import re
from datetime import datetime
from pathlib import Path

import pytest
import torch

from megatron import device as devices
from megatron.training.launch.initialize import Runtime
from megatron.training.logging import training_log
from megatron.training.logging.iteration import IterationResult, ResultWriter
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


def lines(log: str) -> list[dict[str, str]]:
    """Fields of the iteration lines, by name."""
    found = []
    for line in log.splitlines():
        if line.startswith(" iteration "):
            fields = [part.strip().partition(":") for part in line.split("|")[1:-1]]
            number = line.split("/")[0].split()[1]
            found.append({name: value.strip() for name, _, value in fields} | {"iteration": number})
    return found


def test_metrics_file(text, tmp_path):
    """One row an iteration with the documented keys, and numbers that agree with each other and
    with the log."""
    done = run(text, tmp_path / "run", "--train-range-to-skip", "3", "3")
    assert all(set(row) >= KEYS for row in done.rows)  # features add theirs
    shown = lines(done.log)
    for n, (row, line) in enumerate(zip(done.rows, shown, strict=True), 1):
        assert row["iteration"] == n == int(line["iteration"]) and row["consumed_samples"] == 8 * n
        assert (
            row["consumed_tokens"] == 8 * n * 32
            and row["global_batch_size"] == 8
            and row["loss_scale"] == 1.0
        )
        assert f"{row['learning_rate']:.3E}" == line["learning rate"]
        if n == 3:
            assert (row["skipped"], row["skip_reason"]) == (1, "user")
            assert [
                row[key] for key in ("lm_loss", "grad_norm", "tokens_per_second", "tflops")
            ] == [None] * 4
            assert row["elapsed_ms"] == 0.0 and "lm loss" not in line and "grad norm" not in line
            continue
        assert (row["skipped"], row["skip_reason"]) == (0, None)
        assert (row["skipped_iterations_total"], row["skipped_samples"]) == (
            (1, 8) if n > 3 else (0, 0)
        )
        assert (
            f"{row['lm_loss']:.6E}" == line["lm loss"]
            and f"{row['grad_norm']:.3f}" == line["grad norm"]
        )
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
    first, second = lines(done.log)
    assert int(first["number of skipped iterations"]) == sum(overflow[:3])
    assert int(second["number of skipped iterations"]) == sum(overflow[3:])
    assert ("lm loss" in first) == (not all(overflow[:3]))


def test_an_interval_averages_its_iterations(text, tmp_path):
    """Loss, milliseconds and TFLOP/s of a line are those of the iterations since the last; skipped
    work is no work."""
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
    for number, line in enumerate(lines(done.log)):
        rows = [row for row in done.rows[3 * number : 3 * number + 3] if not row["skipped"]]
        assert line["lm loss"] == f"{math.fsum(row['lm_loss'] for row in rows) / len(rows):.6E}"
        mean = sum(row["elapsed_ms"] for row in rows) / len(rows)
        assert float(line["elapsed time per iteration (ms)"]) == pytest.approx(mean, abs=0.06)
        assert float(line["throughput per GPU (TFLOP/s/GPU)"]) == pytest.approx(
            len(rows) / sum(1 / row["tflops"] for row in rows), abs=0.06
        )
        assert line.get("number of user-skipped iterations") == (None if number else "1")


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
    last = lines(done.log)[-1]
    assert float(last["params norm"]) == pytest.approx(norm, abs=6e-4)
    # of the input embedding: text has 40 tokens and the end of document
    unused_rows = 211 - 41
    assert unused_rows * 32 <= float(last["num zeros"]) <= unused_rows * 32 + 3 * 32, (
        "no padding is counted"
    )
    plain = lines(run(text, tmp_path / "plain").log)[-1]
    assert "params norm" not in plain and "num zeros" not in plain


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
        (0, "minmax", []),
        (1, "minmax", [n for n in TIMERS if "-compute" not in n and "batch" not in n]),
        (2, "minmax", TIMERS),
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
    after = (
        done.log.split(" iteration        4/")[1]
        .split("\n", 1)[1]
        .split("[after training is done]")[0]
    )
    after = re.split(re.escape(header) + r"\n +evaluate", after)[0]
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


AURORA = re.compile(
    r"\[(?P<time>[-\d]+ [:.\d]+)\]\[INFO\]\[training_log\] - iteration= *(?P<n>\d+)/ "
    r"*(?P<of>\d+) \| "
    r"consumed_samples= *(?P<samples>\d+) \| consumed_tokens= *(?P<tokens>\d+) \| "
    r"elapsed_time_per_iteration_ms=(?P<ms>[\d.]+) \| learning_rate=(?P<lr>\S+) \| "
    r"global_batch_size= *(?P<batch>\d+) \| "
    r"(?:lm loss=(?P<loss>[\d.]+) \| )?loss_scale=1\.0 \| (?:grad_norm=(?P<norm>[\d.]+) \| "
    r")?actual_seqlen= *32 \| "
    r"number_of_skipped_iterations= *(?P<skipped>\d+) \| number_of_nan_iterations= *0 \|"
    r"(?: samples_per_second=(?P<rate>[\d.]+) \| tokens_per_gpu_per_second_tgs=(?P<tgs>[\d.]+) \| "
    r"\[LM\]TFLOPs=[\d.]+ \| \[DS\]TFLOPs=[\d.]+ \|)?"
)


def test_aurora_dialect(text, tmp_path):
    done = run(
        text, tmp_path / "run", "--log-format", "aurora", "--train-range-to-skip", "2", "2", world=2
    )
    found = [AURORA.fullmatch(line) for line in done.log.splitlines() if "[training_log]" in line]
    assert len(found) == ITERATIONS and all(found) and "\n iteration " not in done.log
    for match, row in zip(found, done.rows, strict=True):
        assert (int(match["n"]), int(match["of"]), int(match["batch"])) == (
            row["iteration"],
            ITERATIONS,
            8,
        )
        assert int(match["tokens"]) == 32 * int(match["samples"]) == row["consumed_tokens"]
        assert float(match["lr"]) == pytest.approx(row["learning_rate"], rel=1e-5)
        assert int(match["skipped"]) == row["skipped"]
        datetime.fromisoformat(match["time"])
        if row["skipped"]:
            assert (match["loss"], match["norm"], match["rate"]) == (None, None, None)
        else:
            assert (
                match["loss"] == f"{row['lm_loss']:.6f}"
                and match["norm"] == f"{row['grad_norm']:.3f}"
            )
            assert float(match["tgs"]) == pytest.approx(float(match["rate"]) * 32 / 2, rel=1e-4)


@pytest.mark.parametrize("wish, count", [("on", 3), ("off", 0), ("auto", 0)])
def test_progress(text, tmp_path, wish, count):
    """Beside each iteration line; `auto` is off where stderr is no terminal."""
    done = run(
        text, tmp_path / "run", "--progress", wish, "--log-interval", "2", "--eval-iters", "0"
    )
    found = re.findall(
        r"^ +([\d.]+) % \| 0:00:\d\d elapsed, ETA 0:00:\d\d \| [\d,]+ tokens/s$", done.log, re.M
    )
    assert found == ["33.3", "66.7", "100.0"][:count]


MIB = 2**20
REPORT = {
    "allocated": 1.5 * MIB,
    "max allocated": 2 * MIB,
    "reserved": 4 * MIB,
    "max reserved": 8 * MIB,
    "allocations": 17,
}


class Memory(ResultWriter):
    """Asks for the device's memory."""

    def __init__(self):
        self.asked = []

    def iteration(self, result, teraflops, counts, memory):
        self.asked.append(memory())


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_memory_of_a_device(monkeypatch, capsys, dp_rank):
    """Where the device has memory: one line after the first iteration line."""
    test_run = make_run(log_format="megatron", log_interval=1)
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
        log.add(IterationResult(iteration, 4, 4 * iteration, 0.1, 1.0, 0.5, loss=2.0))
    memory = (
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.5 | max allocated: 2.0 | "
        "reserved: 4.0 | max reserved: 8.0\n"
    )
    assert capsys.readouterr().out.count(memory) == (1 if dp_rank == 0 else 0)
    assert writer.asked == [REPORT, REPORT]
