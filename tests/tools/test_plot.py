"""tools/plot.py: what it reads, what counts where a run repeated iterations, what it prints and
draws, what it refuses."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from megatron.analysis.run_reader import read_run
from megatron.training.logging.iteration import Interval
from megatron.training.logging.short_format import evaluation_line, iteration_line
from megatron.training.result import IterationResult
from tests.load_tool import load_tool

LOSSES = [5.0, 4.0, 3.0, 2.5]
plot = load_tool("plot")


def row(line, iteration: int, loss: float, *values, **named) -> str:
    """The line of an iteration in a format."""
    result = IterationResult(
        iteration=iteration,
        global_batch_size=8,
        seconds=0.5,
        grad_norm=1.5,
        consumed_samples=8 * iteration,
        learning_rate=1e-3,
    )
    return line(result, Interval([loss], 1, 0.5, 8), *values, **named)


def metrics(iteration: int, loss: float | None, **changes) -> str:
    plain = {"iteration": iteration, "lm_loss": loss, "grad_norm": 1.5, "learning_rate": 1e-3}
    plain |= {
        "consumed_samples": 8,
        "consumed_tokens": 512,
        "elapsed_ms": 500.0,
        "global_batch_size": 8,
    }
    plain |= {"tokens_per_second": 1024.0, "skipped": 0, "skip_reason": None}
    return json.dumps(plain | changes)


SHORT_VALIDATION = evaluation_line("validation", 4, {"lm loss": 2.25}, 1.5)
VALIDATION_ROW = json.dumps(
    {"iteration": 4, "split": "validation", "lm_loss": 2.25, "bits_per_byte": None}
)
SIZES = {"train_iters": 4, "seq_length": 64}
SOURCES = {
    "short": (partial(row, iteration_line, eta=1.0, **SIZES), SHORT_VALIDATION, 1020.0),
    "metrics": (metrics, VALIDATION_ROW, 1024.0),
}


def write(path: Path, source: str, losses: list[float] = LOSSES) -> str:
    line, validation, _ = SOURCES[source]
    lines = [line(n, loss) for n, loss in enumerate(losses, 1)]
    path.write_text("\n".join([*lines, validation, ""]))
    return str(path)


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_gives_the_same_curves(source, tmp_path):
    run = read_run(write(tmp_path / "log", source))
    assert run.panels["loss"] == ([1, 2, 3, 4], LOSSES)
    assert run.panels["grad_norm"] == ([1, 2, 3, 4], [1.5] * 4)
    assert run.panels["learning_rate"][1] == pytest.approx([1e-3] * 4)
    assert run.panels["tokens_per_second"][1] == pytest.approx([SOURCES[source][2]] * 4)
    assert run.evaluations == {"validation": ([4], [2.25])}


def test_of_repeated_iterations_the_last_counts(tmp_path):
    """A run that went back to iteration 2 and ended at 3: neither the old 3 nor the old 4 is
    shown."""
    rows = [metrics(n, loss) for n, loss in [(1, 5.0), (2, 4.0), (3, 9.0), (4, 9.5)]]
    rows += [VALIDATION_ROW, metrics(2, 4.25), metrics(3, 3.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    run = read_run(str(tmp_path))
    assert run.panels["loss"] == ([1, 2, 3], [5.0, 4.25, 3.0]) and run.evaluations == {}


def test_a_directory_is_searched_for_metrics_then_logs(tmp_path):
    write(tmp_path / "log.txt", "short", [1.0, 1.0])
    (tmp_path / "notes.txt").write_text("nothing\n")
    (tmp_path / "run_events.jsonl").write_text('{"event": "start", "time": 1.0}\n')
    assert read_run(str(tmp_path)).panels["loss"][1] == [1.0, 1.0]
    write(tmp_path / "metrics.jsonl", "metrics", [2.0, 2.0])
    assert read_run(str(tmp_path)).panels["loss"][1] == [2.0, 2.0]


def test_skipped_iterations_interrupt_a_curve_and_infinite_ones_do_not_hurt(tmp_path, capsys):
    rows = [
        metrics(1, 5.0),
        metrics(2, None, grad_norm=None, skipped=1, skip_reason="user"),
        metrics(3, "inf"),
    ]
    (tmp_path / "m").write_text("\n".join([*rows, metrics(4, 3.0)]) + "\n")
    loss = read_run(str(tmp_path / "m")).panels["loss"][1]
    assert math.isnan(loss[1]) and loss[2] == math.inf
    assert plot.main([str(tmp_path / "m"), "--smooth", "3"]) == 0
    assert "nan" not in capsys.readouterr().out


def test_as_text(tmp_path, capsys):
    """Plain ASCII of at most 80 columns; each run has its letter; the highest value is on the first
    row."""
    runs = [write(tmp_path / "a", "short"), write(tmp_path / "b", "metrics", [7.0, 6.0, 5.0, 4.0])]
    assert plot.main(runs) == 0
    text = capsys.readouterr().out
    assert (
        text.isascii()
        and text.isprintable() is False
        and not set(map(ord, text)) & (set(range(32)) - {10})
    )
    assert max(map(len, text.splitlines())) <= max(80, len(runs[0]) + 40)
    loss = text.split("loss (nats per token)\n")[1].splitlines()
    assert loss[0].strip().startswith("7 |b") and "B" in text and "a" in loss[5]
    assert all(
        title in text for title in ("\ngradient norm\n", "\ntokens/s\n", "\nlearning rate\n")
    )


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_as_a_picture(tmp_path, capsys, ending):
    pytest.importorskip("matplotlib")
    runs = [write(tmp_path / "a", "short"), write(tmp_path / "b", "metrics")]
    file = tmp_path / f"x.{ending}"
    assert plot.main([*runs, "--output", str(file), "--smooth", "2"]) == 0
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm")
    assert capsys.readouterr().out == f"wrote {file}\n"


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["none"], "none: "),
        (["empty"], "empty: "),
        (["text"], "text: "),
        (["a", "--first", "9"], "a: "),
        (["a", "--output", "x.gif"], "--output x.gif: "),
        (["a", "--smooth", "0"], "--smooth 0: "),
        (["a", "--output", "no/folder/x.svg"], "--output no/folder/x.svg: "),
        ([], ""),
    ],
)
def test_what_it_refuses(words, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello\n")
    write(tmp_path / "a", "short")
    if "no/folder/x.svg" in words:
        pytest.importorskip("matplotlib")
    try:
        code = plot.main(words)
    except SystemExit as leave:
        code = leave.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith(f"error: {start}") and len(error.splitlines()) == 1
