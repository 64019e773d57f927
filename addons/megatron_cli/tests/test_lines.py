"""What whole small runs print with --log-format megatron and aurora, beside their metrics file."""

from __future__ import annotations

import math
import re
from datetime import datetime
from pathlib import Path

import pytest

from megatron.training.logging.line_format import memory_line
from tests.runs import SMALL, Finished, train, with_flags, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 260)


def run(text: str, folder: Path, *more: str, world: int = 1) -> Finished:
    words = with_flags(SMALL, "--log-format", "megatron", "--eval-iters", "0", *more)
    words += ["--data-path", text, "--split", "80,10,10", "--train-iters", "6"]
    return train(folder, words, world)


def test_the_line_of_megatron(text, tmp_path):
    """Its numbers are those of the iterations since the last line; skipped work is no work."""
    flags = "--log-interval 3 --train-range-to-skip 2 2 --log-throughput --log-params-norm"
    done = run(text, tmp_path, *flags.split(), "--log-num-zeros-in-grad")
    lines = [line for line in done.log.splitlines() if line.startswith(" iteration ")]
    for line, first, last in zip(lines, (0, 3), (3, 6), strict=True):
        fields = (part.partition(": ") for part in line.split("|")[1:-1])
        shown = {name.strip(): value.strip() for name, _, value in fields}
        rows = [row for row in done.rows[first:last] if not row["skipped"]]
        assert shown["lm loss"] == f"{math.fsum(row['lm_loss'] for row in rows) / len(rows):.6E}"
        assert shown["learning rate"] == f"{rows[-1]['learning_rate']:.3E}"
        assert shown["grad norm"] == f"{rows[-1]['grad_norm']:.3f}"
        mean = sum(row["elapsed_ms"] for row in rows) / len(rows)
        assert float(shown["elapsed time per iteration (ms)"]) == pytest.approx(mean, abs=0.06)
        assert float(shown["throughput per GPU (TFLOP/s/GPU)"]) == pytest.approx(
            len(rows) / sum(1 / row["tflops"] for row in rows), abs=0.06
        )
        assert shown.get("number of user-skipped iterations") == ("1" if last == 3 else None)
        assert float(shown["params norm"]) > 0 and float(shown["num zeros"]) >= 0


def test_lines_of_save_and_load(text, tmp_path):
    save = tmp_path / "save"
    words = ("--save", str(save), "--load", str(save), "--save-interval", "4")
    first = run(text, tmp_path, *words, "--exit-interval", "4").log
    assert (
        f"WARNING: could not find the metadata file {save}/latest_checkpointed_iteration.txt \n"
        "    will not load any checkpoints and will start from random\n"
    ) in first
    assert f"saving checkpoint at iteration       4 to {save}\n" in first
    assert f"  successfully saved checkpoint at iteration       4 to {save}\n" in first
    second = run(text, tmp_path, *words).log
    assert f" loading checkpoint from {save} at iteration 4\n checkpoint version 3.0\n" in second
    assert f"  successfully loaded checkpoint from {save} at iteration 4\n" in second


AURORA = re.compile(
    r"\[(?P<time>[-\d]+ [:.\d]+)\]\[INFO\]\[training_log:661\] - iteration= *(?P<n>\d+)/ "
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


def test_the_line_of_aurora(text, tmp_path):
    skip = ("--log-format", "aurora", "--train-range-to-skip", "2", "2")
    done = run(text, tmp_path, *skip, world=2)
    found = [
        AURORA.fullmatch(line) for line in done.log.splitlines() if "[training_log:661]" in line
    ]
    assert len(found) == 6 and all(found) and "\n iteration " not in done.log
    for match, row in zip(found, done.rows, strict=True):
        assert (int(match["n"]), int(match["of"]), int(match["batch"])) == (
            row["iteration"],
            6,
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
    done = run(text, tmp_path, "--progress", wish, "--log-interval", "2")
    found = re.findall(
        r"^ +([\d.]+) % \| 0:00:\d\d elapsed, ETA 0:00:\d\d \| [\d,]+ tokens/s$", done.log, re.M
    )
    assert found == ["33.3", "66.7", "100.0"][:count]


def test_the_line_of_a_devices_memory():
    mib = {"allocated": 1.5, "max allocated": 2, "reserved": 4, "max reserved": 8}
    report = {name: value * 2**20 for name, value in mib.items()}
    assert memory_line(0, 1, report) == (
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.5 | max allocated: 2.0 | "
        "reserved: 4.0 | max reserved: 8.0"
    )
