"""What is said of an error, and what a worker process does about signals; whole runs are in
tests/campaigns/e2e."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.checkpoint.filesystem import CheckpointError
from megatron.training.launch import leaving, signals, start_watch
from tests.forkrun import ROOT


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ValueError("--x 3: too large"), ["--x 3: "]),
        (FileNotFoundError(2, "No such file", "/x"), ["[Errno 2]", "'/x'"]),
        (CheckpointError("cannot write /x: ENOSPC"), ["/x: ENOSPC"]),
        (ZeroDivisionError(), ["ZeroDivisionError"]),
        (
            RuntimeError("[gloo/pair.cc:5] Connection closed by peer [::1]\nmore"),
            ["another rank", "([gloo/pair.cc:5] ", "[::1])"],
        ),
        (
            type("DistBackendError", (RuntimeError,), {})("NCCL error\nncclRemoteError: closed"),
            ["another rank", "(NCCL error)"],
        ),
        (type("DistNetworkError", (RuntimeError,), {})("reset"), ["another rank", "(reset)"]),
        (
            RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore"),
            ["--torch-compile", "C++"],
        ),
    ],
)
def test_one_line_for_what_needs_no_traceback(error, named):
    text = leaving.describe(error)
    assert text.startswith("error: ") and text.endswith("\n") and text.count("\n") == 1
    assert "more" not in text and "ncclRemoteError" not in text
    for each in named:
        assert each in text
    assert ("another rank" in text) == ("another rank" in named)


def test_what_nccl_refuses_is_no_lost_connection():
    """Two ranks on one device: NCCL's own reason is printed whole, without a wait."""
    error = type("DistBackendError", (RuntimeError,), {})(
        "NCCL error\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    )
    assert "Duplicate GPU detected" in leaving.describe(error)


def test_a_fault_of_the_program_keeps_its_traceback():
    assert leaving.describe(AssertionError("x")) == "AssertionError: x\n"
    with pytest.raises(TypeError) as caught:
        len(5)
    assert leaving.describe(caught.value).startswith("Traceback (most recent call last):\n")


@pytest.fixture
def handlers():
    """The handlers of this process, put back afterwards."""
    numbers = (signal.SIGINT, *signals.WATCHED)
    before = {number: signal.getsignal(number) for number in numbers}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_worker_outlives_the_first_request(handlers):
    """A request goes to the whole process group, perhaps twice; the parent needs its data until it
    has saved."""
    for number in signals.WATCHED:
        signal.signal(number, signals.leave_to_listener)
    left = []
    now = [100.0]
    signals.WorkerSignals(lambda: now[0], left.append).install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    for after, expected in ((0.0, []), (0.5, []), (2.0, [128 + signal.SIGTERM])):
        now[0] = 100.0 + after
        signal.raise_signal(signal.SIGTERM)
        assert left == expected


def test_a_worker_of_a_parent_that_does_not_listen_ends_as_usual(handlers):
    for number in signals.WATCHED:
        signal.signal(number, signal.SIG_DFL)
    signals.WorkerSignals().install()
    assert [signal.getsignal(number) for number in signals.WATCHED] == [signal.SIG_DFL] * 2


LISTENS = """
import sys, time
from megatron.training.launch.signals import SignalWatch
SignalWatch().catch_interrupts()
open(sys.argv[1], "w").close()
time.sleep(60)
"""
RUNS = """
import sys, time
from megatron import interrupt
interrupt.exit_at_once()
open(sys.argv[1], "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("program", [LISTENS, RUNS], ids=["training", "tools"])
def test_ctrl_c_ends_a_process_whose_stderr_is_gone(program, tmp_path):
    """As in `pretrain_gpt.py ... 2>&1 | tee log`, where Ctrl-C ends tee, too."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "ready")],
        cwd=ROOT,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    os.close(reader)
    try:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()


def orphan(write_end: int, torchrun: bool) -> None:
    """A rank that watches its launcher for five seconds."""
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    if torchrun:
        os.environ["TORCHELASTIC_RUN_ID"] = "x"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    watch = signals.SignalWatch()
    failures = []
    watch.on_failure = failures.append
    watch.leaving = lambda: os.write(write_end, b"%d" % failures[0].code)
    start_watch.StartWatch(watch.leave, watch.leave_for)
    os.write(write_end, b"r")
    time.sleep(5.0 if torchrun else 1.0)
    os.write(write_end, b"o")
    os._exit(0)


@pytest.mark.parametrize("torchrun, word", [(True, b"1"), (False, b"o")])
def test_a_rank_ends_when_torchrun_was_killed(torchrun, word):
    """Other parents, say a shell, may end before the rank."""
    read_end, write_end = os.pipe()
    agent = os.fork()
    if agent == 0:
        if os.fork() == 0:
            orphan(write_end, torchrun)
        time.sleep(60)
        os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1) == b"r"
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    assert os.read(read_end, 1) == word
    assert os.read(read_end, 1) == b""
    os.close(read_end)
