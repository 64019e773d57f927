"""--log-format short, its state: the status line of a terminal, which iterations have a line, the
time left."""

import io
import time

import pytest

from megatron import log
from megatron.arguments import config_from
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from megatron.training.logging.iteration import Interval
from megatron.training.logging.short_format import REFRESH, ShortLog
from megatron.training.result import IterationResult

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8}
SHAPE |= {"max_position_embeddings": 8, "micro_batch_size": 1, "lr": 0.1, "train_iters": 100}


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def printed(monkeypatch):
    """Call it to make standard output a stream (a terminal), with --log-format short; it returns
    the stream."""

    def start(stream: io.StringIO | None = None) -> io.StringIO:
        stream = stream or Terminal()
        monkeypatch.setattr("sys.stdout", stream)  # in the test: pytest sets it anew after fixtures
        return stream

    monkeypatch.setenv("TERM", "xterm")
    log.show_details(False)
    yield start
    log.show_details(True)


def make(speaks: bool = True, clock=time.perf_counter, **flags) -> ShortLog:
    config = config_from(Config, {**SHAPE, **flags})
    return ShortLog(config, make_plan(config, 1, 100), speaks, clock)


def trained(seconds: float, iteration: int = 1, **changes) -> IterationResult:
    """An iteration of one sample."""
    return IterationResult(iteration=iteration, global_batch_size=1, seconds=seconds, **changes)


def print_line(short: ShortLog, iteration: int, **changes) -> None:
    short.line(trained(0.1, iteration, **changes), Interval([2.0], 1, 0.1, 1), None)


def test_a_status_line_stands_between_lines_and_a_line_replaces_it(printed):
    out = printed()
    short = make()
    short.add(trained(0.1))
    print_line(short, 1)
    short.status(2, 0.1)
    print_line(short, 10)
    pieces = out.getvalue().split(log.CLEAR_LINE)
    assert pieces[0] == "" and [piece[-1] for piece in pieces[1:]] == ["\n", "s", "\n"]
    assert pieces[2].startswith(" iter   2/100 | 2.0 % | 100 ms | ETA ")


def test_it_is_not_written_more_often_than_can_be_read(printed):
    now = [1000.0]
    out = printed()
    short = make(clock=lambda: now[0])
    for _ in range(100):
        now[0] += REFRESH / 9
        short.status(2, 0.1)
    assert out.getvalue().count(log.CLEAR_LINE) == pytest.approx(11, abs=2)


@pytest.mark.parametrize("case", ["off", "pipe", "dumb", "rank"])
def test_no_control_characters_where_there_is_no_status_line(printed, monkeypatch, case):
    out = printed(io.StringIO() if case == "pipe" else None)
    if case == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    short = make(case != "rank", progress="off" if case == "off" else "auto")
    short.status(2, 0.1)
    assert out.getvalue() == ""
    if case in ("pipe", "dumb"):
        print_line(short, 1)
        assert out.getvalue().startswith(" iter") and "\x1b" not in out.getvalue()


def test_first_last_and_every_interval_have_a_line():
    short = make(speaks=False, log_interval=10, train_iters=37, exit_interval=25)
    due = []
    for iteration in range(3, 38):
        if short.line_due(iteration):
            print_line(short, iteration)
            due.append(iteration)
    assert due == [3, 10, 20, 25, 30, 37]


def test_the_time_left_leaves_the_first_iteration_and_skipped_ones_out():
    now = [50.0]
    short = make(clock=lambda: now[0], train_range_to_skip=("91", "100"))
    assert short.eta(0) is None
    now[0] += 30.0
    short.add(trained(30.0))  # a first iteration that compiles
    assert short.eta(1) == 89 * 30.0
    for _ in range(10):
        now[0] += 2.0
        short.add(trained(1.0))
    assert short.eta(11) == 79 * 2.0  # with what stands between iterations


def test_a_dynamic_loss_scale_is_shown_where_it_changed(capsys):
    for flags, expected in (
        ({"fp16": True}, [1, 0, 1]),
        ({"fp16": True, "loss_scale": 8.0}, [0, 0, 0]),
        ({}, [0, 0, 0]),
    ):
        short = make(**flags)
        for iteration, scale in ((1, 16.0), (2, 16.0), (3, 8.0)):
            print_line(short, iteration, loss_scale=scale)
        lines = capsys.readouterr().out.replace("\n      ", " | ").splitlines()
        assert [line.count("loss scale") for line in lines] == expected
