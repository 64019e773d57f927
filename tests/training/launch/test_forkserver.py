"""Ranks that torchrun restarts are forked from a server, and are to the outside what other ranks
are."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from megatron.training.launch import forkserver
from tests.forkrun import ROOT
from tools.shared import ranks

pytestmark = pytest.mark.skipif(not forkserver._SUPPORTED, reason="needs Linux")
# Says who it is, and then does what its first argument says.
PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from megatron import launcher
from megatron.training.launch import forkserver
forkserver.enter()
import signal, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
facts = "torch" in sys.modules, os.getpid(), os.getcwd(), os.environ["NAME"], sys.argv[2:]
print(*facts, launcher.starter(), flush=True)
exec(sys.argv[1])
"""


def serve(agent: int) -> subprocess.Popen:
    """The server of a torchrun."""
    command = [sys.executable, "-c", forkserver.SERVER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
    with process.stdin as pipe:
        job = {"modules": ["torch"], "path": sys.path, "agent": agent}
        pipe.write(json.dumps(job).encode())
    return process


@pytest.fixture(scope="module")
def server():
    """A server whose torchrun is this process."""
    process = serve(os.getpid())
    within(60, lambda: answers(os.getpid()))
    yield process
    process.kill()
    process.wait()


def answers(agent: int) -> bool:
    """Whether its server takes connections."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(forkserver._address(agent))
        except OSError:
            return False
    return True


def within(seconds: float, condition) -> None:
    """Wait until the condition holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    """Starts PROGRAM as torchrun does; returns the process and what it says."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = []

    def run(action: str, *words: str) -> tuple[subprocess.Popen, list[str]]:
        environ = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "NAME": "å \udcff"}
        process = subprocess.Popen(
            [sys.executable, str(program), action, *words],
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            env=environ,
            start_new_session=True,
        )
        started.append(process)
        return process, process.stdout.readline().decode(errors="surrogateescape").split()

    yield run
    for process in started:
        process.kill()
        process.wait()


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_the_program_gets_what_it_was_started_with(server, start, tmp_path):
    process, said = start("print(input('?'))", "a", "b c")
    assert process.wait() != 0  # no input
    assert said[0] == "True" and int(said[1]) != process.pid
    assert " ".join(said[2:]).startswith(f"{tmp_path} å \udcff ['a', 'b c'] torchrun {os.getpid()}")


@pytest.mark.parametrize(
    "action, code",
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("os._exit(4)", 4),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
    ],
)
def test_it_ends_as_the_forked_process_does(server, start, action, code):
    process, _ = start(action)
    assert process.wait(20) == code


def test_signals_are_passed_on(server, start):
    process, _ = start("time.sleep(60)")
    process.terminate()
    assert process.wait(20) == 3


@pytest.mark.parametrize("action", ["time.sleep(60)", "sum(range(10**12))", "signal.pause()"])
def test_the_kernel_ends_it_with_the_process_of_torchrun(server, start, action):
    process, said = start(action)
    assert is_alive(int(said[1]))
    process.kill()
    within(5, lambda: not is_alive(int(said[1])))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_gets_nothing(server):
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(forkserver._address(os.getppid()))
            os._exit(0 if connection.recv(4) == b"" else 1)
    assert os.waitpid(pid, 0)[1] == 0


AGENT = f"""
import json, os, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.training.launch import test_forkserver as tests
server = tests.serve(os.getpid())
tests.within(60, lambda: tests.answers(os.getpid()))
command = [sys.executable, sys.argv[1]]
first, second = (
    subprocess.Popen([*command, "time.sleep(60)"], stdout=subprocess.PIPE) for _ in range(2)
)
pids = [int(one.stdout.readline().split()[1]) for one in (first, second)]
server.kill()
server.wait()
codes = first.wait(20), second.wait(20)
tests.within(5, lambda: not any(map(tests.is_alive, pids)))
said = subprocess.run([*command, "pass"], stdout=subprocess.PIPE).stdout.split()
print(*codes, said[0].decode())
"""


# torchrun, where another program has taken the address, whose user is the second argument
TAKEN = f"""
import os, socket, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from megatron.training.launch import forkserver
listener = socket.socket(socket.AF_UNIX)
listener.bind(forkserver._address(os.getpid()))
listener.listen()
pid = os.fork()
if pid == 0:
    os.setuid(int(sys.argv[2]))
    listener.listen()  # the kernel takes the user of the last call
    print(listener.accept()[0].recv(4), flush=True)
    os._exit(0)
said = subprocess.run([sys.executable, sys.argv[1], "pass"], stdout=subprocess.PIPE).stdout.split()
os.waitpid(pid, 0)
print(said[0].decode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_server_of_another_user_gets_nothing(tmp_path):
    assert under_agent(TAKEN, tmp_path, "65534") == ["b''", "False"]


def test_a_rank_starts_by_itself_where_the_server_ends_before_it_answers(tmp_path):
    assert under_agent(TAKEN, tmp_path, str(os.getuid()))[-1] == "False"


def under_agent(agent: str, folder, *words: str) -> list[str]:
    """What a program in place of torchrun says."""
    (folder / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "NAME": "x"}
    command = [sys.executable, "-c", agent, str(folder / "program.py"), *words]
    said = subprocess.run(command, stdout=subprocess.PIPE, env=environ, cwd=folder, text=True)
    return said.stdout.split()


def test_a_killed_server_ends_its_ranks_and_the_next_ones_start_by_themselves(tmp_path):
    assert under_agent(AGENT, tmp_path) == ["1", "1", "False"]


def test_a_killed_rank_of_torchrun_comes_back_forked(tmp_path):
    note = """
with open(f"starts.{rank}", "a") as file:
    file.write(f"{os.getpid()} {os.environ.get(launcher.FORKED)}\\n")
from megatron.training import loop
import time
right = loop.train_step
def slow(*args, **kwargs):
    time.sleep(0.1)
    return right(*args, **kwargs)
loop.train_step = slow
"""
    ranks.write_rank(tmp_path, note)
    flags = [
        *ranks.tiny_model(),
        *"--lr 0.01 --global-batch-size 2 --eval-iters 0 --save saved --load saved".split(),
        *"--save-interval 2 --keep-last 1 --train-iters 200 --restart-forkserver".split(),
    ]
    launch = ranks.Launch("torchrun", 2, flags, 3)
    agent = ranks.start(launch, tmp_path)[0]
    try:
        starts = tmp_path / "starts.1"
        within(60, lambda: answers(agent.pid))
        within(60, lambda: (tmp_path / "saved/latest_checkpointed_iteration.txt").exists())
        os.kill(int(starts.read_text().split()[0]), signal.SIGKILL)
        within(60, lambda: starts.read_text().count("\n") == 2)
        assert starts.read_text().split()[1::2] == ["None", str(agent.pid)]
        events = tmp_path / "saved/run_events.jsonl"
        within(60, lambda: events.read_text().count('"start"') >= 2)
        agent.send_signal(signal.SIGTERM)
        agent.wait(60)
        within(10, lambda: not answers(agent.pid))
    finally:
        ranks.end(tmp_path, [agent])
