"""The rank monitor: a connection from every rank to rank 0, over which all ranks are notified
within a second that a rank has failed or died, and which one.

It has its own sockets and threads, because a rank that waits inside a collective is not notified
there: gloo reports a broken connection, NCCL only the end of its time limit. How the ranks get the
address of rank 0 and the token of the run is the caller's matter.

A connection gives the token of the run before anything else is read from it. Once all ranks are
connected, rank 0 does not listen any more.
"""

import contextlib
import errno
import json
import math
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron import launcher, log
from megatron.training.launch import hang, progress
from megatron.training.launch.hang_limits import (
    HangAction,
    HangLimits,
    RankState,
    RunPhase,
    decide,
)
from megatron.training.launch.process import (
    HUNG,
    START_UP,
    Failure,
    ProcessId,
    code_location,
    this_process,
)
from megatron.training.launch.progress import Clock, RankProgress
from megatron.training.launch.start_watch import GONE

DIED = (
    "terminated without reporting an error: killed (SIGKILL, out of memory), or its machine was "
    "lost; see the output of its launcher or the system log there"
)
# seconds, in which the same error of other ranks arrives; the lowest of them reports it
REPORT_COUNTS_AFTER = 0.3
# ... in which a request to end that went to all ranks reaches this one
DEATH_COUNTS_AFTER = 0.7
PEERS_EXIT_WITHIN = 1.0
# where a rank fails while others are still starting: they are waited for, to be notified
PEERS_JOIN_WITHIN = 8.0
CONNECT_WITHIN = 5.0
ANSWERS_WITHIN = 4.0  # of the request, or of the latest answer of another rank
ABSENCE_REPORTED_EVERY = 60.0
LONGEST_HELLO = 1 << 12  # bytes of what a connection sends that has yet to give the token
SERVER_IS_SILENT_AFTER = 6  # ticks
NOTIFIES_EVERY = 5  # ticks of a stall
MOST_REPORTS = 8  # ranks
STRANGERS = 64  # connections beyond one per rank that may wait to give the token


class _Wire:
    """JSON objects over a socket, one per line. A forked child closes its copy, so that the death
    of its parent is noticed."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.rank: int | None = None  # until it has given the token
        self._unread = b""
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=connection.close)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # a lost machine: a minute
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: str, **content: Any) -> None:
        """A message; what cannot be sent is dropped, for the reader finds out who has exited."""
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        with contextlib.suppress(OSError), self._lock:
            self.socket.sendall(line)

    def receive(self, limit: float = math.inf) -> list[dict[str, Any]] | None:
        """Wait for messages; None when the connection is closed. Raises ValueError for a line above
        `limit` bytes and what is not JSON, RecursionError for brackets nested too deeply."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        if max(map(len, (*lines, self._unread))) > limit:
            raise ValueError(f"a line of more than {limit} bytes")
        return [json.loads(line) for line in lines] if data else None


NO_LIMITS = HangLimits(None, None, None, None, None)


class MonitorServer:
    """Rank 0's part: receives from all ranks, decides whose failure counts, and makes all others
    exit.

    It listens at `host` ("": all addresses of this machine) until all ranks are connected. A rank
    needs `token`. `noticed` is called at once with each failure, for a launcher may end this
    process before one is decided on. `gone` returns the process of a rank, of those that have not
    joined, that is known to have ended.
    """

    def __init__(
        self,
        world_size: int,
        family: int = socket.AF_INET,
        host: str = "",
        noticed: Callable[[Failure], None] = lambda failure: None,
        startup: float | None = None,
        gone: Callable[[Collection[int]], ProcessId | None] = lambda ranks: None,
    ):
        self.world_size = world_size
        self._noticed = noticed
        self._gone = gone
        self.token = secrets.token_hex(16)
        self._visitors: list[_Wire] = []  # not yet ranks, the oldest first
        self._server = socket.create_server(
            (host, 0), family=family, backlog=world_size + STRANGERS
        )
        os.register_at_fork(after_in_child=self._server.close)
        self.port = self._server.getsockname()[1]
        self._wires: dict[int, _Wire] = {}
        self._processes: dict[int, ProcessId] = {}
        self._failures: list[Failure] = []
        self._decided: dict[str, Any] | None = None
        self._asking: set[int] = set()
        self._stall_of = 0.0  # seconds, while the ranks are asked why
        self._waited: dict[int, float] = {}  # for a core, until they were asked; of this host's
        self._answers: dict[int, Any] = {}
        # long ones: name, begin and limit
        self._phases: dict[int, tuple[str, float, float | None]] = dict.fromkeys(
            range(world_size), ("", 0.0, 0.0)
        )
        self._stragglers: set[tuple[int, str]] = set()  # that were reported
        self._inspected: list[dict[str, Any]] = []  # by ranks of other hosts
        self._startup_limit = startup or 0.0
        self._now = Clock().now
        self._deadlines = {"absent": self._now() + ABSENCE_REPORTED_EVERY, "look": 0.0}
        if startup:
            self._deadlines["joined"] = self._now() + startup
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="rank monitor server", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """After rank 0's own client was closed: wait until the others know that the monitor has
        ended."""
        self._thread.join(PEERS_EXIT_WITHIN)

    def _run(self) -> None:
        """A failure of this thread is reported, and the ranks carry on without it."""
        try:
            self._serve()
        except Exception as error:
            where = code_location(traceback.extract_tb(error.__traceback__))
            print(
                f"WARNING: the rank monitor on rank 0 failed ({type(error).__name__}: {error}; "
                f"{where}); if a rank fails, others notice only when a collective fails",
                flush=True,
            )
            self._send_all("bye")
            self._stop_listening()

    def _serve(self) -> None:
        while 0 in self._wires or 0 not in self._processes:
            self._listen(min(self._deadlines.values(), default=math.inf))
            now = self._now()
            due = [name for name, deadline in self._deadlines.items() if deadline <= now]
            for name in due:
                del self._deadlines[name]
                getattr(self, f"_{name}")()
        self._send_all("bye")
        self._wait_until_gone(())

    def _listen(self, until: float) -> None:
        wait = min(progress.TICK, until - self._now())
        for key, _ in self._selector.select(max(0.0, wait)):
            if key.data is None:
                self._accept()
            elif key.data.socket.fileno() >= 0:  # not closed since it was selected
                self._receive(key.data)

    def _accept(self) -> None:
        """Accept a connection. Where this process has no file descriptor left for it, the next
        attempt is in a second: the connection stays ready, and waiting for it would not wait."""
        try:
            connection, _ = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                log.warn_once(
                    "rank 0 has no file descriptor left for the connections of other ranks "
                    f"({error.strerror}); raise its limit (ulimit -n)"
                )
                time.sleep(progress.TICK)
            return
        connection.settimeout(CONNECT_WITHIN)  # of what is sent
        if len(self._visitors) >= self.world_size + STRANGERS:
            self._close(self._visitors.pop(0))
        wire = _Wire(connection)
        self._visitors.append(wire)
        self._selector.register(connection, selectors.EVENT_READ, wire)

    def _stop_listening(self) -> None:
        """All ranks are connected: nobody else has a reason to connect."""
        if self._server.fileno() >= 0:
            self._selector.unregister(self._server)
            self._server.close()
            for wire in self._visitors:
                self._close(wire)
            self._visitors.clear()

    def _close(self, wire: _Wire) -> None:
        self._selector.unregister(wire.socket)
        wire.socket.close()

    def _receive(self, wire: _Wire) -> None:
        if wire.rank is None:
            self._welcome(wire)
            return
        messages = wire.receive()
        for message in messages or ():
            self._take(wire.rank, message)
        if messages is None:
            self._close(wire)
            if self._wires.pop(wire.rank, None):
                process = self._processes[wire.rank]
                self._note(Failure(process, DIED, silent=True), DEATH_COUNTS_AFTER)

    def _welcome(self, wire: _Wire) -> None:
        """Take the hello of a rank; close the connection of anybody else."""
        try:
            messages = wire.receive(LONGEST_HELLO)
            if messages == []:
                return  # the rest of the line is to come
            hello = messages[0] if messages else {}
            if not secrets.compare_digest(hello["token"], self.token):
                raise ValueError("not a rank of this run")
            process = ProcessId(**hello["process"])
        except (ValueError, KeyError, TypeError, RecursionError):
            self._visitors.remove(wire)
            self._close(wire)
            return
        self._visitors.remove(wire)
        wire.rank = process.rank
        self._processes[process.rank] = process
        self._wires[process.rank] = wire
        wire.send("welcome")
        if self._decided:
            wire.send("end", end=self._decided)
        if len(self._processes) == self.world_size:
            self._deadlines.pop("absent", None)
            self._deadlines.pop("joined", None)
            self._stop_listening()

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "bye":
            self._wires.pop(rank, None)
        elif kind == "failed":
            self._note(
                Failure(self._processes[rank], message["text"], message["code"]),
                REPORT_COUNTS_AFTER,
            )
        elif kind == "ask":
            self._ask_where()
            self._asking.add(rank)
        elif kind == "phase":
            self._phases[rank] = (message["name"], self._now(), message["limit"])
        elif kind == "inspected":
            self._inspected.append(message)
        elif kind == "stalled":
            self._stalled(rank, message["seconds"])
        elif kind == "at":
            self._answers[rank] = message
            if "answer" in self._deadlines:
                # nobody is silent while this thread has answers to read
                complete = self._wires.keys() <= self._answers.keys()
                self._deadlines["answer"] = 0.0 if complete else self._now() + ANSWERS_WITHIN

    def _stalled(self, rank: int, seconds: float) -> None:
        """A rank has made no progress for longer than its limit: ask all what they do."""
        if self._stall_of or self._decided:
            self._wires[rank].send("wait")
            return
        self._stall_of = seconds
        self._ask_where()

    def _ask_where(self) -> None:
        if "answer" not in self._deadlines:
            self._answers = {}
            self._waited = {
                rank: hang.waited_for_core(process.pid)
                for rank, process in self._processes.items()
                if process.host == socket.gethostname()
            }
            self._deadlines["answer"] = self._now() + ANSWERS_WITHIN
            self._send_all("where")

    def _note(self, failure: Failure, seconds: float) -> None:
        if self._decided:
            return
        self._noticed(failure)
        self._failures.append(failure)
        deadline = self._now() + seconds
        self._deadlines["end"] = min(deadline, self._deadlines.get("end", deadline))

    def _look(self) -> None:
        """End the run where a rank has ended before it joined."""
        missing = set(range(self.world_size)) - set(self._processes)
        if not missing or self._decided:
            return
        if process := self._gone(missing):
            self._note(Failure(process, GONE, silent=True), 0.0)
        self._deadlines["look"] = self._now() + progress.TICK

    def _absent(self) -> None:
        missing = sorted(set(range(self.world_size)) - set(self._processes))
        print(
            f"waiting for {len(missing)} of {self.world_size} ranks to join: "
            f"{hang.numbers(missing)}",
            flush=True,
        )
        self._deadlines["absent"] = self._now() + ABSENCE_REPORTED_EVERY

    def _answer(self) -> None:
        processes = {
            rank: f"{process} does not answer" for rank, process in self._processes.items()
        } | {
            rank: f"{self._processes[rank]}: {answer['at']}" if answer["at"] else None
            for rank, answer in self._answers.items()
        }
        missing = [rank for rank in range(self.world_size) if rank not in self._processes]
        if missing:
            processes[missing[0]] = (
                f"rank{'s' * (len(missing) > 1)} {hang.numbers(missing)} never joined"
            )
        for rank in self._asking:
            if rank in self._wires:
                self._wires[rank].send(
                    "answer", processes=[text for _, text in sorted(processes.items()) if text]
                )
        self._asking.clear()
        if self._stall_of:
            self._judge()
            self._stall_of = 0.0

    def _judge(self) -> None:
        """Some rank has made no progress for longer than its limit."""
        if self._failures:
            return
        states = {rank: self._state_of(rank) for rank in self._wires}
        decision = decide(states, self.world_size)
        if decision.action is HangAction.WARN:
            self._report_stragglers(decision.ranks, states)
        elif decision.action is HangAction.END:
            self._hang(decision.ranks)

    def _state_of(self, rank: int) -> RankState:
        """As the rank answered. It need not in a phase that may hold the interpreter's lock for
        long, within the limit of that."""
        if rank in self._answers:
            return RankState(**self._answers[rank]["state"])
        pid = self._processes[rank].pid
        is_near = rank in self._waited
        stopped = is_near and hang.process_state(pid) in ("T", "t")
        starved = is_near and hang.waited_for_core(pid) - self._waited[rank] > ANSWERS_WITHIN / 2
        _, begun, limit = self._phases[rank]
        return RankState(self._now() - begun, limit, None, starved, answers=False, stopped=stopped)

    def _report_stragglers(self, ranks: Iterable[int], states: Mapping[int, RankState]) -> None:
        """A line for a rank that is slow, or in a long phase; once for each of its phases."""
        for rank in ranks:
            answer, state = self._answers[rank], states[rank]
            if (rank, answer["known"]) in self._stragglers:
                continue
            self._stragglers.add((rank, answer["known"]))
            stall = f"; no progress for {state.seconds:.0f} s, but it computes"
            waiting = sorted(set(self._answers) - set(ranks))
            print(
                f"straggler: {self._processes[rank]} is still in {answer['known']} "
                f"(phase: {answer['phase']}) after {answer['elapsed']:.0f} s"
                f"{stall if state.beyond() else ''}; "
                f"waiting for it: rank {hang.numbers(waiting) or 'none'}",
                flush=True,
            )

    def _hang(self, ranks: Collection[int]) -> None:
        """End the run in which these ranks hang."""
        silent = {
            self._processes[rank]: self._phases[rank][0] or "iteration"
            for rank in ranks
            if rank not in self._answers
        }
        hung = self._inspect(silent)
        for rank in self._answers.keys() & set(ranks):
            answer = self._answers[rank]
            if waits := answer["state"]["waits"]:
                answer |= {"phase": f"collective ({waits})", "at": "all ranks wait for each other"}
            hung[self._processes[rank]] = answer
        self._report_hang(self._stall_of, hung)

    def _report_hang(self, seconds: float, hung: Mapping[ProcessId, Mapping[str, Any]]) -> None:
        """Report processes with what they do, and end the run; those that do not answer cannot be
        asked to exit."""
        processes = sorted(hung, key=lambda process: process.rank)
        failures = {process: hang.failure(process, seconds, hung[process]) for process in processes}
        for process in processes[:MOST_REPORTS]:
            print(hang.report(failures[process], hung[process]), file=sys.stderr)
        ranks = [process.rank for process in processes]
        if ranks[MOST_REPORTS:]:
            not_shown = hang.numbers(ranks[MOST_REPORTS:])
            print(f"hang: also rank {not_shown}, in the same way", file=sys.stderr)
        waits: dict[str, list[int]] = {}
        for rank in sorted(set(self._wires) - set(ranks)):
            collective = self._answers[rank]["state"]["waits"] if rank in self._answers else None
            waits.setdefault(f" in {collective}" if collective else "", []).append(rank)
        text = "; ".join(
            f"{hang.numbers(ranks)}{collective}" for collective, ranks in waits.items()
        )
        print(f"waiting for it: rank {text or 'none'}", file=sys.stderr, flush=True)
        self._note(failures[processes[0]], 0.0)
        killed = [
            (process, failures[process].text)
            for process in processes
            if process.rank not in self._answers
        ]
        for process, text in killed:
            hang.kill(process, text)
        self._send_all("kill", processes=[(asdict(process), text) for process, text in killed])

    def _inspect(
        self, known: Mapping[ProcessId, str], missing: Iterable[int] = ()
    ) -> dict[ProcessId, dict[str, Any]]:
        """What processes do that do not respond, and where ranks are that never joined; each host's
        are inspected by a rank there that responds."""
        self._send_all("wait")
        missing = list(missing)
        hostname = socket.gethostname()
        hosts: dict[str, int] = {}
        quiet = {process.rank for process in known}
        for rank in sorted(set(self._wires) - quiet):
            if self._processes[rank].host != hostname:
                hosts.setdefault(self._processes[rank].host, rank)
        self._inspected = []
        for host, rank in hosts.items():
            silent = [
                (asdict(process), text) for process, text in known.items() if process.host == host
            ]
            if silent or missing:
                self._wires[rank].send("inspect", processes=silent, missing=missing)
        asked = len(hosts) if missing else len({process.host for process in known} & set(hosts))
        answers = hang.inspect(known, missing)
        deadline = self._now() + hang.STACK_WITHIN
        while len(self._inspected) < asked and self._now() < deadline:
            self._listen(deadline)
        for message in self._inspected:
            answers |= {ProcessId(**process): answer for process, answer in message["answers"]}
        return answers

    def _joined(self) -> None:
        """The time for start-up is over, and some ranks never joined."""
        missing = [rank for rank in range(self.world_size) if rank not in self._processes]
        answers = self._inspect({}, missing)
        absent = {
            ProcessId(rank, 0, node, node): hang.unknown(START_UP) | {"at": hang.NEVER_JOINED}
            for rank in set(missing) - {process.rank for process in answers}
            for node in [self._node_of(rank)]
        }
        self._answers = {}
        self._report_hang(self._startup_limit, answers | absent)

    def _node_of(self, rank: int) -> str:
        """The host of a rank that never joined, if each host has as many consecutive ranks as this
        one."""
        size = launcher.info().local_world_size or 1
        hosts = {
            process.host
            for process in self._processes.values()
            if process.rank // size == rank // size
        }
        return f"{hosts.pop()}, probably" if len(hosts) == 1 else "an unknown host"

    def _end(self) -> None:
        """All but the rank that failed exit; rank 0, with this thread, after the others; the rank
        that failed reports last.

        Of several that died the first counts: a launcher kills its other ranks when it has seen one
        die.
        """
        failure = min(
            self._failures,
            key=lambda failed: (failed.silent, not failed.silent and failed.process.rank),
        )
        self._decided = asdict(failure)
        hung = failure.code == HUNG
        last = (0,) if hung else (failure.process.rank, 0)
        self._send_all("end", but=last, end=self._decided)
        deadline = self._now() + PEERS_JOIN_WITHIN
        # those that start notice it themselves when one of them has ended
        joined = hung or failure.text == GONE or len(self._processes) == self.world_size
        while not joined and self._now() < deadline:
            self._listen(deadline)
            joined = len(self._processes) == self.world_size
        self._wait_until_gone(last)
        if (failure.process.rank or hung) and 0 in self._wires:
            self._wires[0].send("end", end=self._decided)
            time.sleep(REPORT_COUNTS_AFTER)
        if failure.process.rank in self._wires:
            self._wires[failure.process.rank].send("speak")

    def _send_all(self, kind: str, but: Collection[int] = (), **content: Any) -> None:
        for rank, wire in self._wires.items():
            if rank not in but:
                wire.send(kind, **content)

    def _wait_until_gone(self, but: Iterable[int]) -> None:
        deadline = self._now() + PEERS_EXIT_WITHIN
        while set(self._wires) - set(but) and self._now() < deadline:
            self._listen(deadline)


class MonitorClient(RankProgress):
    """This rank's connection to the server.

    `on_failure` is called, in a separate thread, when another rank has failed or died; it is to end
    the process. `token`: the server's. `process` is this process, unless given. `noticed` is called
    at once with the death of rank 0, for a launcher may end this process before `on_failure` is
    called.
    """

    def __init__(
        self,
        addresses: Iterable[tuple[str, int]],
        token: str,
        server: ProcessId,
        on_failure: Callable[[Failure], None],
        process: ProcessId | None = None,
        noticed: Callable[[Failure], None] = lambda failure: None,
        limits: HangLimits = NO_LIMITS,
    ):
        super().__init__(limits)
        self.process = process or this_process()
        self.server_process = server
        self._on_failure = on_failure
        self._noticed = noticed
        self._reported = self._closed = self._ended = False
        self._began = time.monotonic()  # this phase
        self._notifies_at = 0  # ticks at which rank 0 is notified of a stall next
        self._unanswered = 0  # ticks since it was
        self._turn = threading.Event()
        self._answered = threading.Event()
        self._locations: list[str] | None = None
        self._early: list[dict[str, Any]] = []
        self._wire = self._connect(addresses, token)
        threading.Thread(target=self._run, name="rank monitor", daemon=True).start()

    def _connect(self, addresses: Iterable[tuple[str, int]], token: str) -> _Wire:
        problem: Exception = OSError("no address")
        for address in addresses:
            try:
                wire = _Wire(socket.create_connection(address, CONNECT_WITHIN))
            except OSError as error:
                problem = error
                continue
            wire.send("hello", token=token, process=asdict(self.process))
            messages: list[dict[str, Any]] | None = []
            with contextlib.suppress(ValueError, RecursionError):
                while messages == []:
                    messages = wire.receive()
            if messages and messages[0] == {"kind": "welcome"}:
                wire.socket.settimeout(None)
                self._early = messages
                return wire
            problem = OSError(f"{address} is not the rank monitor of this run")
            wire.socket.close()
        raise OSError(str(problem))

    def report(self, text: str, code: int = 1) -> None:
        """Report that this rank has failed, and wait until it is its turn to print the error; it
        does not return if another rank prints it."""
        self._reported = True
        self._wire.send("failed", text=text, code=code)
        self._turn.wait(PEERS_JOIN_WITHIN + PEERS_EXIT_WITHIN + 2.0)
        while self._ended:
            time.sleep(1.0)  # the other thread ends this process

    def ask(self) -> list[str] | None:
        """Of each rank that does not wait for others: its process and the line of code it
        executes. None where rank 0 does not answer."""
        self._answered.clear()
        self._locations = None
        self._wire.send("ask")
        self._answered.wait(ANSWERS_WITHIN + 1.0)
        return self._locations

    def close(self) -> None:
        """The run is over: from now on the end of this process is no failure."""
        self._closed = True
        self._wire.send("bye")

    def begin(self, phase: RunPhase) -> None:
        before = self._phase
        super().begin(phase)
        self._began = time.monotonic()
        if phase.announced or before.announced:
            name, limit = (str(phase), phase.limit) if phase.announced else ("", 0.0)
            self._wire.send("phase", name=name, limit=limit)

    def _tick(self) -> None:
        self._look()
        if not super()._state().beyond():
            self._unanswered = self._notifies_at = 0
            return
        if self._notifies_at <= self._ticks:
            self._notifies_at = self._ticks + NOTIFIES_EVERY
            self._wire.send("stalled", seconds=self._ticks * progress.TICK)
            self._unanswered = self._unanswered or 1
        elif self._unanswered:
            self._unanswered += 1
        if self._unanswered > SERVER_IS_SILENT_AFTER and self.process.rank:
            self._give_up_server()

    def _give_up_server(self) -> None:
        """Rank 0 does not answer: rank 1 reports it and ends it, the others follow."""
        server = self.server_process
        if self.process.rank == 1:
            answer = hang.inspect({server: str(self._phase)})[server]
            failure = hang.name(server, self._state().seconds, answer)
            hang.kill(server, failure.text)
        else:
            failure = hang.failure(server, self._state().seconds, hang.unknown(""))
            time.sleep(hang.STACK_WITHIN + DEATH_COUNTS_AFTER)
        self._leave(failure)

    def _run(self) -> None:
        """A failure of this thread is reported, and the rank carries on without it."""
        try:
            self._listen()
        except Exception as error:
            print(
                f"WARNING: the rank monitor of rank {self.process.rank} failed "
                f"({type(error).__name__}: {error}); if another rank fails, this one notices only "
                "when a collective fails",
                flush=True,
            )
        self._wire.socket.close()
        self._turn.set()
        self._answered.set()

    def _listen(self) -> None:
        messages: list[dict[str, Any]] | None = self._early
        while messages is not None:
            for message in messages:
                self._take(message)
            self._unanswered = 0
            with selectors.DefaultSelector() as selector:
                selector.register(self._wire.socket, selectors.EVENT_READ)
                while not selector.select(progress.TICK):
                    self._tick()
            messages = self._wire.receive()
        if not self._closed and not self._reported:
            failure = Failure(self.server_process, DIED, silent=True)
            self._noticed(failure)
            time.sleep(DEATH_COUNTS_AFTER)
            self._leave(failure)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "end":
            self._leave(
                Failure(**message["end"] | {"process": ProcessId(**message["end"]["process"])})
            )
        elif kind == "speak":
            self._turn.set()
        elif kind == "where":
            self._wire.send("at", **self._answer())
        elif kind == "inspect":
            known = {ProcessId(**process): text for process, text in message["processes"]}
            answers = hang.inspect(known, message["missing"])
            self._wire.send("inspected", answers=[(asdict(p), a) for p, a in answers.items()])
        elif kind == "kill":
            for process, text in message["processes"]:
                hang.kill(ProcessId(**process), text)
        elif kind == "answer":
            self._locations = message["processes"]
            self._answered.set()
        elif kind == "bye":
            self._closed = True
            self._answered.set()

    def _leave(self, failure: Failure) -> None:
        self._ended = True
        self._on_failure(failure)

    def _answer(self) -> dict[str, Any]:
        """What this rank is doing, for rank 0: its state, and the line of code and the stack of its
        main thread unless it waits."""
        answer = hang.describe(str(self._phase), self._main_frames())
        state = self._state()
        if state.waits is not None:
            answer |= {"at": None, "stack": ""}
        return answer | {
            "state": asdict(state),
            "known": str(self._phase),
            "elapsed": time.monotonic() - self._began,
        }

    def _state(self) -> RankState:
        return replace(super()._state(), waits=self._waits())

    def _waits(self) -> str | None:
        """The collective in which a thread of this rank waits for others; "" where it exits, None
        if it does neither."""
        leaves = any(frame.f_code.co_name == "leave_with" for frame in self._main_frames())
        waiting = map(hang.waiting_in, sys._current_frames().values())
        texts = [text for text in waiting if text is not None]
        return "" if leaves or self._reported else next(iter(texts), None)
