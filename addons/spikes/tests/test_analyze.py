"""tools/spikes.py analyze: events, the flags it prints, the picture, and what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.spikes import program as spikes
from megatron.checkpoint.manifest import FILE_NAME
from tests.problems import numbers
from tests.runs import SMALL, with_flags


def losses(steps: int = 600, interval: int = 1) -> dict[int, float]:
    noise = np.random.default_rng(4).normal(0, 0.02, steps)
    return {interval * (i + 1): 3 + 5 * (i + 1) ** -0.5 + noise[i] for i in range(steps)}


def log(path: Path, values: dict[int, float | None], total: int = 1000) -> str:
    """A log of Megatron's lines with a batch of 8."""
    rows = []
    for n, loss in values.items():
        found = (
            f" lm loss: {loss:.6E} | grad norm: {1 + 0.001 * (n % 7):.3f} |"
            if loss is not None
            else " number of user-skipped iterations:   1 |"
        )
        rows.append(
            f" iteration {n:8d}/{total:8d} | consumed samples: {8 * n:12d} | global batch size: "
            f"    8 |{found}\n"
        )
    path.write_text("some other line\n" + "".join(rows))
    return str(path)


def checkpoint(folder: Path, iteration: int) -> None:
    """What a whole checkpoint is known by."""
    (folder / f"iter_{iteration:07d}").mkdir(parents=True)
    (folder / f"iter_{iteration:07d}" / FILE_NAME).touch()


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = spikes.main(["analyze", *argv])
    return code, capsys.readouterr().out


def test_a_healthy_run(tmp_path, capsys):
    """The warm-up of the detector is said, so that "no spike" is about the rest."""
    code, out = said(capsys, log(tmp_path / "log", losses()))
    first, blind, last = out.splitlines()
    assert (code, numbers(first), last) == (0, [600, 1, 600], "no spike")
    assert blind.startswith("not judged: ") and numbers(blind)[:2] == [1, 64]


def test_what_was_not_judged(tmp_path, capsys):
    """The first 64 records, whole intervals of them, and as many after the level has changed;
    skipped ones in between."""

    def ranges(values: dict[int, float | None]) -> list[list[int]]:
        return json.loads(said(capsys, log(tmp_path / "log", values), "--json")[1])["not_judged"]

    values = losses()
    assert ranges(values) == [[1, 64]]
    assert ranges({n: None if n in (10, 11) else loss for n, loss in values.items()}) == [[1, 66]]
    assert ranges(losses(300, interval=10)) == [[1, 640]]
    assert ranges({n: loss for n, loss in values.items() if n <= 20}) == [[1, 20]]
    # 64 of them are flagged, the 65th is a new level
    moved = {n: loss + 3 * (n > 300) for n, loss in values.items()}
    assert ranges(moved) == [[1, 64], [366, 428]]


def test_a_spike_with_its_restart_line(tmp_path, capsys):
    values = losses()
    # 399: between 4 and 6 sigma
    for n, more in ((399, 0.1), (401, 0.9), (402, 1.5), (403, 0.6)):
        values[n] += more
    for n in (100, 300, 398, 500):
        checkpoint(tmp_path / "ckpt", n)
    (tmp_path / "ckpt/iter_0000395").mkdir()  # one that was never finished
    code, out = said(capsys, log(tmp_path / "log", values), "--load", f"{tmp_path}/ckpt")
    assert code == 10
    _, _, first, second, third = out.splitlines()
    assert first.startswith("benign spike ") and numbers(first)[:3] == [401, 403, 402]
    assert numbers(second) == [398, 404, 7, 56, 0.7]
    assert third == f"  --load {tmp_path}/ckpt --ckpt-step 300 --train-range-to-skip 398 404"
    code, out = said(capsys, log(tmp_path / "log", values))
    assert "--load DIR --ckpt-step 397 --train-range-to-skip 398 404 " in out


@pytest.mark.parametrize(("after", "kind"), [(0, "benign"), (210, "slow"), (260, "malignant")])
def test_what_becomes_of_it(after, kind, tmp_path, capsys):
    values = losses(900)
    values[300] += 2
    for n in range(301, 301 + after):
        values[n] += 0.5
    values = {n: loss for n, loss in values.items() if n <= 560}
    _, out = said(capsys, log(tmp_path / "log", values), "--json")
    assert [e["kind"] for e in json.loads(out)["events"]] == [kind]


def test_the_log_ends_before_it_can_be_said(tmp_path, capsys):
    values = losses(300)
    values[299] += 2
    values[300] += 1
    _, out = said(capsys, log(tmp_path / "log", values), "--json")
    (event,) = json.loads(out)["events"]
    assert (
        event["kind"],
        event["first"],
        event["last"],
        event["peak"],
        event["start"],
        event["end"],
    ) == ("open", 299, 300, 299, 298, 301)


def test_a_number_that_is_none(tmp_path, capsys):
    values = losses(300)
    values[200] = float("nan")
    code, out = said(capsys, log(tmp_path / "log", values), "--json")
    (event,) = json.loads(out)["events"]
    assert (code, event["kind"], event["start"], event["end"], event["loss"]) == (
        10,
        "non-finite",
        199,
        201,
        "nan",
    )


def test_a_wide_log_interval_widens_the_range(tmp_path, capsys):
    values = losses(300, 10)
    values[2000] += 2
    code, out = said(capsys, log(tmp_path / "log", values, 4000))
    assert "+-10 iterations" in out
    assert "--train-range-to-skip 1981 2010" in out, (
        "the interval 1991 to 2000, the one before and the one behind"
    )


def test_a_restart_that_skips_it_has_no_event(tmp_path, capsys):
    values = losses()
    values[402] += 1.5
    first = log(tmp_path / "first", values)
    again = losses()
    second = log(
        tmp_path / "second",
        {n: None if 401 <= n <= 403 else loss for n, loss in again.items() if n > 300},
    )
    code, out = said(capsys, first, second)
    first, _, last = out.splitlines()
    assert (code, numbers(first), last) == (0, [597, 1, 600, 301], "no spike")


def test_pictures(tmp_path, capsys):
    values: dict[int, float | None] = dict(losses())
    values[402] += 1.5
    values |= dict.fromkeys(range(500, 520))
    checkpoint(tmp_path, 300)
    source = log(tmp_path / "log", values)
    for name, start in (("x.svg", b"<?xml"), ("x.png", b"\x89PNG")):
        assert (
            said(capsys, source, "--plot", f"{tmp_path}/{name}", "--load", str(tmp_path))[0] == 10
        )
        assert (tmp_path / name).read_bytes().startswith(start)
    picture = (tmp_path / "x.svg").read_text()
    assert all(word in picture for word in ("spike: skip", "checkpoint", "not judged"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "[file-not-readable]"),
        ("nothing\n", "[log-without-losses]"),
        ('{"iteration": 1}\n{"iteration": 2}\n', ", line 1: "),
    ],
)
def test_what_cannot_be_read(text, message, tmp_path, capsys):
    if text is not None:
        (tmp_path / "log").write_text(text)
    assert spikes.main(["analyze", f"{tmp_path}/log"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"error: {tmp_path}/log") and message in error and error.count("\n") == 1
    )


def test_an_iteration_that_the_run_has_not(capsys):
    mock = with_flags(SMALL, "--mock-data", "--train-iters", "4", "--eval-iters", "0")
    assert spikes.main(["docs", "--iteration", "5", "--", *mock]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --iteration 5: ") and numbers(error)[1:] == [1, 4]
    assert spikes.main(["docs", "--iteration", "1"]) == 2
    assert "--save" in capsys.readouterr().err
    assert spikes.main(["docs", "--iteration", "1", "--", *mock]) == 0
    assert "iteration 1 reads" in capsys.readouterr().out


def test_a_directory_is_quoted_in_the_flags_of_spikes():
    class Spike:
        start = 20
        end = 22

    assert spikes.restart([Spike()], "my runs; rm x", [10]).startswith(
        "--load 'my runs; rm x' --ckpt"
    )
