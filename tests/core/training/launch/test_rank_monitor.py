"""Server and clients of several ranks, here threads of one process: who is chosen to speak, who is told,
who is not believed."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from megatron.parallel.collectives import Pending
from megatron.parallel.context import Axis
from megatron.training.launch import hang, network, progress, rank_monitor
from megatron.training.launch.hang_limits import RunPhase
from megatron.training.launch.process import HUNG
from megatron.training.launch.rank_monitor import (
    DIED,
    Failure,
    MonitorClient,
    MonitorServer,
    ProcessId,
)
from tests.problems import numbers


class Ranks:
    """A server and the lines of some ranks; `ended` collects (rank, the end it was told). Which of
    these ranks, which are one process, compute is said by `computing`."""

    def __init__(self, world: int, joined: int, startup: float | None = None):
        self.computing: set[int] = set()
        self.ended: queue.Queue[tuple[int, Failure]] = queue.Queue()
        self.server = MonitorServer(world, startup=startup)
        self.places = [ProcessId(rank, 100 + rank, "here", str(rank)) for rank in range(world)]
        self.dead: set[int] = set()
        self.lines = [self.join(rank) for rank in range(joined)]

    def join(self, rank: int) -> MonitorClient:
        line: queue.Queue[MonitorClient] = queue.Queue()

        def leave(end: Failure) -> None:
            if rank not in self.dead:
                self.ended.put((rank, end))
                hang_up(line.get())

        address = [("127.0.0.1", self.server.port)]
        client = MonitorClient(address, self.server.token, self.places[0], leave, self.places[rank])
        client._computes = lambda: rank in self.computing
        line.put(client)
        return client

    def die(self, rank: int) -> None:
        self.dead.add(rank)
        hang_up(self.lines[rank])

    def told(self, count: int) -> dict[int, Failure]:
        return dict(self.ended.get(timeout=10) for _ in range(count))


def hang_up(line: MonitorClient) -> None:
    """As the end of the process would."""
    with contextlib.suppress(OSError):
        line._wire.socket.shutdown(socket.SHUT_RDWR)


def in_thread(call, *args) -> threading.Thread:
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    return thread


def test_the_lowest_of_those_that_failed_speaks():
    ranks = Ranks(4, 4)
    in_thread(ranks.lines[3].report, "the same", 1)
    ranks.lines[1].report("the same", 7)  # returns: it is to speak
    end = Failure(ranks.places[1], "the same", 7)
    assert ranks.told(3) == {0: end, 2: end, 3: end}


def test_a_failure_counts_before_a_death_and_the_first_death_before_others():
    ranks = Ranks(4, 4)
    ranks.die(1)
    ranks.lines[3].report("because", 1)
    assert ranks.told(2) == dict.fromkeys((0, 2), Failure(ranks.places[3], "because"))
    ranks = Ranks(4, 4)
    ranks.die(3)
    patience = time.monotonic() + 10.0
    while not ranks.server._failures and time.monotonic() < patience:
        time.sleep(0.01)
    ranks.die(1)
    assert ranks.told(2) == dict.fromkeys((0, 2), Failure(ranks.places[3], DIED, silent=True))


def test_the_end_of_rank_0_is_seen_by_the_others(monkeypatch):
    ranks = Ranks(3, 3)
    monkeypatch.setattr(rank_monitor, "PEERS_EXIT_WITHIN", 0.1)
    for wire in list(ranks.server._wires.values())[1:]:
        wire.socket.shutdown(socket.SHUT_RDWR)
    # rank 0's own line still stands: the server tells it of the others, sooner or later
    told = ranks.told(3)
    assert {rank: told[rank] for rank in (1, 2)} == dict.fromkeys(
        (1, 2), Failure(ranks.places[0], DIED, silent=True)
    )


def test_a_run_that_is_over_is_no_death(monkeypatch):
    monkeypatch.setattr(rank_monitor, "DEATH_COUNTS_AFTER", 0.1)
    monkeypatch.setattr(rank_monitor, "PEERS_EXIT_WITHIN", 0.2)
    ranks = Ranks(3, 3)
    for line in reversed(ranks.lines):
        line.close()
    ranks.server.finish()
    for rank in (2, 1, 0):
        ranks.die(rank)
    time.sleep(0.4)
    assert ranks.ended.empty()
    ranks.server._thread.join(10.0)
    assert not ranks.server._thread.is_alive()
    ranks = Ranks(3, 3)  # rank 0 is done first
    ranks.lines[0].close()
    ranks.server.finish()
    time.sleep(0.4)
    assert ranks.ended.empty()


def test_a_rank_that_comes_after_a_failure_is_told():
    ranks = Ranks(3, 2)
    speaks = in_thread(ranks.lines[1].report, "early", 1)
    time.sleep(0.6)
    # rank 0 and the server stay until all have come
    assert speaks.is_alive() and ranks.ended.empty()
    ranks.join(2)
    assert ranks.told(2) == dict.fromkeys((0, 2), Failure(ranks.places[1], "early"))


def test_who_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(rank_monitor, "ABSENCE_REPORTED_EVERY", 0.2)
    ranks = Ranks(9, 2)
    said = ""
    patience = time.monotonic() + 10.0
    while ": 2-8\n" not in said and time.monotonic() < patience:
        time.sleep(0.1)
        said += capsys.readouterr().out
    assert numbers(said)[:2] == [7, 9] and ": 2-8\n" in said
    answers = ranks.lines[1].ask()
    assert answers[-1] == "ranks 2-8 never joined"
    this_thread = (
        r"rank 0 \(process 100 on here\): \w+ \(megatron/training/launch/rank_monitor\.py:"
    )
    assert re.match(this_thread, answers[0])
    ranks.lines[0]._reported = True  # it waits itself, for its turn
    assert [text for text in ranks.lines[1].ask() if text.startswith("rank 0")] == []


STRANGERS = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "not UTF-8": b"\xff\xff\n",
    "no object": b"[]\n",
    "no hello": b'{"kind": "failed", "text": "gone", "code": 7}\n',
    "numbers": b"9" * 3900 + b"\n",
    "depth": b"[" * 3000 + b"\n",
    "an endless line": b"x" * 100_000,
    "another token": b'{"kind": "hello", "token": "guess", "process": {}}\n',
    "no token": b'{"kind": "hello", "token": 5, "process": 3}\n',
}


def test_strangers_on_the_port_are_turned_away():
    ranks = Ranks(2, 1)
    for name, content in STRANGERS.items():
        with socket.create_connection(("127.0.0.1", ranks.server.port), 5) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(content)
                assert stranger.recv(1000) == b"", name
    with pytest.raises(OSError):  # a rank of another run
        MonitorClient(
            [("127.0.0.1", ranks.server.port)], "other", ranks.places[0], print, ranks.places[1]
        )
    ranks.lines.append(ranks.join(1))
    assert ranks.lines[1].ask() is not None and ranks.ended.empty()
    ranks.lines[1].report("still heard")
    assert ranks.told(1) == {0: Failure(ranks.places[1], "still heard")}


def test_silent_connections_do_not_use_up_the_descriptors():
    """Only so many wait at a time, and a rank still joins; then nobody can connect any more."""
    ranks = Ranks(2, 1)
    silent = [socket.create_connection(("127.0.0.1", ranks.server.port), 5) for _ in range(120)]
    ranks.lines.append(ranks.join(1))
    assert len(ranks.server._visitors) <= 2 + rank_monitor.STRANGERS
    assert len(ranks.lines[1].ask()) >= 1 and ranks.ended.empty()
    for connection in silent:
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", ranks.server.port), 5)


@pytest.mark.parametrize("answer", [b"", b"\xff\n", b"[]\n", b'{"kind": "end", "end": {}}\n'])
def test_the_next_address_is_tried_where_another_program_answers(answer):
    server = MonitorServer(2)
    place = replace(rank_monitor.this_process(), rank=0)
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def respond() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        in_thread(respond)
        addresses = [("127.0.0.1", 1), stranger.getsockname(), ("127.0.0.1", server.port)]
        assert MonitorClient(addresses, server.token, place, print).process.pid == place.pid


# --- ways


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
wifi\t00000000\t0103A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
ib0\t00000A0A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth1\t00050A0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


@pytest.mark.parametrize(
    "host, name",
    [
        ("127.0.0.3", None),
        ("localhost", None),
        ("10.10.7.1", "ib0"),
        ("10.10.5.9", "eth1"),
        ("8.8.8.8", "eth0"),
    ],
)
def test_the_interface_is_that_of_the_longest_route(tmp_path, monkeypatch, host, name):
    monkeypatch.setattr(network, "ROUTES", tmp_path / "route")
    assert network.interface_towards(host) is None  # no such table: another system
    (tmp_path / "route").write_text(ROUTES)
    assert network.interface_towards(host) == name


def test_a_rank_within_its_limit_keeps_the_others_waiting(monkeypatch, capsys):
    """Ranks 0 and 1 have waited longer than their limit; rank 2, which has none now (it writes a
    file, say), is no hang. Later it is one."""
    monkeypatch.setattr(progress, "TICK", 0.05)
    ranks = Ranks(3, 3)
    judged = threading.Semaphore(0)
    judge = ranks.server._judge

    def counted() -> None:
        judge()
        judged.release()

    ranks.server._judge = counted
    for line in ranks.lines[:2]:
        line.begin(RunPhase("iteration", 5, 0.1, announced=False))
    for _ in range(2):
        assert judged.acquire(timeout=60)
    assert ranks.ended.empty()
    assert len(re.findall(r"^straggler: rank 2 .* rank 0-1$", capsys.readouterr().out, re.M)) <= 1
    ranks.lines[2].begin(RunPhase("iteration", 5, 0.1, announced=False))
    ends = dict(ranks.ended.get(timeout=60) for _ in range(3))
    assert {end.code for end in ends.values()} == {HUNG}


ITERATION = RunPhase("iteration", 5, 0.1, announced=False)


def named(ranks: Ranks, count: int) -> set[tuple[int, int]]:
    """(rank that was named, exit code) as so many ranks were told."""
    ends = dict(ranks.ended.get(timeout=60) for _ in range(count))
    return {(end.process.rank, end.code) for end in ends.values()}


def test_a_rank_that_never_joins_is_named(capfd):
    ranks = Ranks(3, 2, startup=0.3)
    assert named(ranks, 2) == {(2, HUNG)}
    assert "rank 2 (process unknown" in capfd.readouterr().err


def test_ranks_that_wait_for_each_other_and_the_one_at_odds(monkeypatch, capfd):
    monkeypatch.setattr(progress, "TICK", 0.05)
    ranks = Ranks(3, 3)
    for rank, line in enumerate(ranks.lines):
        where = "all_reduce over tp" if rank == 2 else "all_reduce over dp"
        monkeypatch.setattr(line, "_waits", lambda where=where: where)
        line.begin(ITERATION)
    assert named(ranks, 3) == {(2, HUNG)}
    assert re.search("0-1 .*all_reduce over dp", capfd.readouterr().err)


def test_progress_is_no_hang(monkeypatch):
    """The phase is the same for many times its limit, but its counter moves."""
    monkeypatch.setattr(progress, "TICK", 0.05)
    ranks = Ranks(2, 2)
    stalled = []
    ticks = threading.Semaphore(0)

    def count() -> int:
        ticks.release()
        stalled.append(ranks.lines[1]._state().beyond())
        return len(stalled)

    ranks.lines[1].progress = count
    ranks.lines[1].begin(ITERATION)
    for _ in range(20):
        assert ticks.acquire(timeout=60)
    assert not any(stalled) and ranks.ended.empty()


def test_a_silent_rank_is_inspected_by_a_rank_on_its_host(monkeypatch, capfd):
    monkeypatch.setattr(progress, "TICK", 0.05)
    monkeypatch.setattr(rank_monitor, "ANSWERS_WITHIN", 0.5)
    ranks = Ranks(3, 3)
    asked = []

    def inspect(known, missing=()):
        asked.append([process.rank for process in known])
        return {one: {"at": "stopped", "phase": "data", "stack": "inspected"} for one in known}

    monkeypatch.setattr(hang, "inspect", inspect)
    for line in ranks.lines:
        monkeypatch.setattr(line, "_waits", lambda: "all_reduce over dp")
    ranks.lines[2]._take = lambda message: None  # it never answers
    for line in ranks.lines[:2]:
        line.begin(ITERATION)
    rank, end = ranks.ended.get(timeout=60)
    assert (rank, end.process.rank, end.code) == (1, 2, HUNG)
    assert [2] in asked and "inspected" in capfd.readouterr().err


def test_a_rank_in_a_long_phase_need_not_answer():
    """It may hold the interpreter's lock in a save; in an iteration it does not."""
    ranks = Ranks(2, 2)
    for phase, is_late in ((RunPhase("save", limit=1000.0), False), (ITERATION, True)):
        ranks.lines[1].begin(phase)
        ranks.lines[1].ask()  # so the server has read what was sent before
        ranks.server._answers.clear()
        state = ranks.server._state_of(1)
        assert (state.answers, state.beyond()) == (False, is_late)


@pytest.mark.campaign
def test_a_rank_that_computes_has_ten_limits(monkeypatch, capfd):
    """Rank 0 waits for rank 1, which is starved of cores, and later computes without end."""
    monkeypatch.setattr(progress, "TICK", 0.05)
    ranks = Ranks(2, 2)
    ranks.computing.add(1)
    monkeypatch.setattr(ranks.lines[0], "_waits", lambda: "all_reduce over dp")
    actions = 0
    ranks.lines[1].progress = lambda: actions
    limit = RunPhase("iteration", 5, 0.3, announced=False)
    for line in ranks.lines:
        line.begin(limit)
    for _ in range(3):
        with pytest.raises(queue.Empty):
            ranks.ended.get(timeout=1.0)
        actions += 1
    begun = time.monotonic()
    assert named(ranks, 2) == {(1, HUNG)}
    assert time.monotonic() - begun > 1.0
    output = capfd.readouterr()
    assert re.search("^straggler: rank 1 .* rank 0$", output.out, re.M)
    assert output.err.count("hang: rank 1") == 1


def test_a_rank_that_stops_computing_has_one_limit(monkeypatch):
    monkeypatch.setattr(progress, "TICK", 0.05)
    ranks = Ranks(2, 2)
    ranks.computing.add(1)
    monkeypatch.setattr(ranks.lines[0], "_waits", lambda: "all_reduce over dp")
    for line in ranks.lines:
        line.begin(RunPhase("iteration", 5, 0.4, announced=False))
    with pytest.raises(queue.Empty):
        ranks.ended.get(timeout=1.2)
    ranks.computing.clear()
    begun = time.monotonic()
    assert named(ranks, 2) == {(1, HUNG)}
    assert time.monotonic() - begun < 5.0


class Machine:
    """A clock that can jump, as where a machine is suspended with all its clocks."""

    def __init__(self, monkeypatch):
        self.asleep = 0.0
        awake = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: awake() + self.asleep)


def test_a_machine_that_sleeps_is_no_hang(monkeypatch, capfd):
    """In start-up, and while the ranks are asked what they do; a rank that is missing is still
    named."""
    monkeypatch.setattr(progress, "TICK", 0.2)
    machine = Machine(monkeypatch)
    ranks = Ranks(3, 2, startup=3.0)
    for _ in range(3):
        time.sleep(0.3)
        machine.asleep += 3600.0
    assert ranks.ended.empty()
    ranks.lines.append(ranks.join(2))
    asked = threading.Event()

    def sleep() -> dict:
        asked.set()
        machine.asleep += 3600.0
        time.sleep(0.5)
        return answer

    answer = ranks.lines[2]._answer()
    monkeypatch.setattr(ranks.lines[2], "_answer", sleep)
    for line in ranks.lines[:2]:
        line._waits = lambda: "all_reduce over dp"
        line.begin(ITERATION)
    assert asked.wait(60)
    with pytest.raises(queue.Empty):
        ranks.ended.get(timeout=1.5)
    assert named(Ranks(2, 1, startup=0.5), 1) == {(1, HUNG)}


def test_the_collective_and_its_axis_are_read_off_the_stack():
    begun, end = threading.Event(), threading.Event()

    class Work:
        def wait(self) -> None:
            begun.set()
            end.wait(60)

    def start_all_reduce(axis: Axis) -> Pending:
        return Pending([Work()], lambda: None, axis)

    thread = in_thread(start_all_reduce(Axis("tp", 4, 1, (0, 1, 2, 3))))
    assert begun.wait(60)
    frame = sys._current_frames()[thread.ident]
    while "collectives" not in frame.f_code.co_filename:  # it waits in Python here, in C otherwise
        frame = frame.f_back
    assert hang.waiting_in(frame).endswith(" over tp (ranks 0-3)")
    end.set()
    assert hang.waiting_in(sys._getframe()) is None


def test_torchrun_is_told_why_a_rank_that_hangs_was_killed(tmp_path):
    """It reads the file of the first process that it sees end, whoever wrote it."""
    file = tmp_path / "error.json"
    code = f"import os, time; os.memfd_create('{hang.STACKS}'); print(flush=True); time.sleep(600)"
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)},
        stdout=subprocess.PIPE,
    )
    program.stdout.readline()
    process = ProcessId(1, program.pid, socket.gethostname(), "0")
    hang.kill(process, "made no progress")
    assert program.wait(60) == -signal.SIGKILL
    told = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
    assert told == f"hang: {process} made no progress"
