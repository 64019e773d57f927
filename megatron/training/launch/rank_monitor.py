"""The rank monitor: a connection from every rank to rank 0, over which all ranks are notified
within a second that a rank has failed or died, and which one.

It has its own sockets and threads, because a rank that waits inside a collective is not notified
there: gloo reports a broken connection, NCCL only the end of its time limit. How the ranks get the
address of rank 0 is the caller's matter.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.training.launch.process import Failure, ProcessId, code_location, this_process

DIED = (
    "terminated without reporting an error: killed (SIGKILL, out of memory), or its machine was "
    "lost; see the output of its launcher or the system log there"
)
# seconds, in which the same error of other ranks arrives; the lowest of them reports it
REPORT_COUNTS_AFTER = 0.3
# ... in which a request to end that went to all ranks reaches this one
DEATH_COUNTS_AFTER = 0.7
OTHERS_EXIT_WITHIN = 1.0
# where a rank fails while others are still starting: they are waited for, to be notified
OTHERS_JOIN_WITHIN = 8.0
CONNECT_WITHIN = 5.0
ANSWERS_WITHIN = 1.5
ABSENCE_REPORTED_EVERY = 60.0
ACCEPTS_AGAIN_AFTER = 1.0  # where there was no file descriptor
LONGEST_TEXT = 20_000


class _Wire:
    """JSON objects over a socket, one per line. A forked child closes its copy, so that the death
    of its parent is noticed."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._rest = b""
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=connection.close)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # a lost machine: a minute
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: str, **content: Any) -> None:
        """A message; what cannot be sent is dropped, for the reader finds out who has exited."""
        with contextlib.suppress(OSError), self._lock:
            self.socket.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for messages; None when the connection is closed."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole] if data else None


class MonitorServer:
    """Rank 0's part: receives from all ranks, decides whose failure counts, and makes all others
    exit."""

    def __init__(self, world_size: int, family: int = socket.AF_INET):
        self.world_size = world_size
        self.token = secrets.token_hex(16)
        self._server = socket.create_server(("", 0), family=family, backlog=world_size)
        os.register_at_fork(after_in_child=self._server.close)
        self.port = self._server.getsockname()[1]
        self._wires: dict[int, _Wire] = {}
        self._processes: dict[int, ProcessId] = {}
        self._failures: list[Failure] = []
        self._decided: dict[str, Any] | None = None
        self._asking: set[int] = set()
        self._answers: dict[int, Any] = {}
        self._deadlines = {"absent": time.monotonic() + ABSENCE_REPORTED_EVERY}
        self._reported_limit = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="rank monitor server", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """After rank 0's own client was closed: wait until the others know that the monitor has
        ended."""
        self._thread.join(OTHERS_EXIT_WITHIN)

    def _run(self) -> None:
        while 0 in self._wires or 0 not in self._processes:
            self._listen(min(self._deadlines.values(), default=None))
            now = time.monotonic()
            due = [name for name, at in self._deadlines.items() if at <= now]
            for name in due:
                del self._deadlines[name]
                getattr(self, f"_{name}")()
        self._send_all("bye")
        self._wait_until_gone(())

    def _listen(self, until: float | None) -> None:
        wait = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(wait):
            if key.data is None:
                self._connect()
            else:
                self._receive(key)

    def _connect(self) -> None:
        """Accept a connection. Where this process has no file descriptor left for it, the next
        attempt is in a second: the connection stays ready, and waiting for it would not wait."""
        try:
            connection, _ = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if not self._reported_limit:
                    self._reported_limit = True
                    print(
                        f"WARNING: rank 0 has no file descriptor left for the connections of other "
                        f"ranks ({error.strerror}); raise its limit (ulimit -n)",
                        flush=True,
                    )
                self._selector.unregister(self._server)
                self._deadlines["accept"] = time.monotonic() + ACCEPTS_AGAIN_AFTER
            return
        # of what a stranger sends, and of what is sent
        connection.settimeout(CONNECT_WITHIN)
        self._selector.register(connection, selectors.EVENT_READ, [_Wire(connection), None])

    def _accept(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)

    def _receive(self, key: selectors.SelectorKey) -> None:
        wire, rank = key.data
        try:
            messages = wire.receive()
            for message in messages or ():
                if rank is None:
                    rank = key.data[1] = self._welcome(wire, message)
                else:
                    self._take(rank, message)
        except (ValueError, KeyError, TypeError):  # not one of the ranks
            messages = None
        if messages is None:
            self._selector.unregister(wire.socket)
            wire.socket.close()
            if self._wires.pop(rank, None):
                self._note(Failure(self._processes[rank], DIED, silent=True), DEATH_COUNTS_AFTER)

    def _welcome(self, wire: _Wire, message: dict[str, Any]) -> int:
        if not secrets.compare_digest(message["token"], self.token):
            raise ValueError("a stranger")
        process = ProcessId(**message["process"])
        self._processes[process.rank], self._wires[process.rank] = process, wire
        wire.send("welcome")
        if self._decided:
            wire.send("end", end=self._decided)
        if len(self._processes) == self.world_size:
            self._deadlines.pop("absent", None)
        return process.rank

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
            if not self._asking:
                self._answers = {}
                self._deadlines["answer"] = time.monotonic() + ANSWERS_WITHIN
                self._send_all("where")
            self._asking.add(rank)
        elif kind == "at":
            self._answers[rank] = message["at"]
            if len(self._answers) >= len(self._wires):
                self._deadlines["answer"] = 0.0

    def _note(self, failure: Failure, seconds: float) -> None:
        if self._decided:
            return
        self._failures.append(failure)
        at = time.monotonic() + seconds
        self._deadlines["end"] = min(at, self._deadlines.get("end", at))

    def _absent(self) -> None:
        missing = sorted(set(range(self.world_size)) - set(self._processes))
        print(
            f"waiting for {len(missing)} of {self.world_size} ranks to join: {_numbers(missing)}",
            flush=True,
        )
        self._deadlines["absent"] = time.monotonic() + ABSENCE_REPORTED_EVERY

    def _answer(self) -> None:
        processes = {
            rank: f"{process} does not answer" for rank, process in self._processes.items()
        } | {
            rank: f"{self._processes[rank]}: {at}" if at else None
            for rank, at in self._answers.items()
        }
        missing = [rank for rank in range(self.world_size) if rank not in self._processes]
        if missing:
            processes[missing[0]] = (
                f"rank{'s' * (len(missing) > 1)} {_numbers(missing)} never joined"
            )
        for rank in self._asking:
            if rank in self._wires:
                self._wires[rank].send(
                    "answer", processes=[text for _, text in sorted(processes.items()) if text]
                )
        self._asking.clear()

    def _end(self) -> None:
        """All but the rank that failed exit; rank 0, with this thread, after the others; the rank
        that failed reports last.

        Of several that died the first counts: a launcher kills its other ranks when it has seen one
        die.
        """
        failure = min(
            self._failures, key=lambda one: (one.silent, not one.silent and one.process.rank)
        )
        self._decided = asdict(failure)
        last = (failure.process.rank, 0)
        self._send_all("end", but=last, end=self._decided)
        deadline = time.monotonic() + OTHERS_JOIN_WITHIN
        while len(self._processes) < self.world_size and time.monotonic() < deadline:
            self._listen(deadline)
        self._wait_until_gone(last)
        if failure.process.rank and 0 in self._wires:
            self._wires[0].send("end", end=self._decided)
            time.sleep(REPORT_COUNTS_AFTER)
        if failure.process.rank in self._wires:
            self._wires[failure.process.rank].send("speak")

    def _send_all(self, kind: str, but: Iterable[int] = (), **content: Any) -> None:
        for rank, wire in self._wires.items():
            if rank not in but:
                wire.send(kind, **content)

    def _wait_until_gone(self, but: Iterable[int]) -> None:
        deadline = time.monotonic() + OTHERS_EXIT_WITHIN
        while set(self._wires) - set(but) and time.monotonic() < deadline:
            self._listen(deadline)


class MonitorClient:
    """This rank's connection to the server.

    `on_failure` is called, in a separate thread, when another rank has failed or died; it is to end
    the process. `process` is this process, unless given.
    """

    def __init__(
        self,
        addresses: Iterable[tuple[str, int]],
        token: str,
        server: ProcessId,
        on_failure: Callable[[Failure], None],
        process: ProcessId | None = None,
    ):
        self.process = process or this_process()
        self._server_process = server
        self._on_failure = on_failure
        self._main = threading.main_thread().ident
        self._reported = self._closed = self._ended = False
        self._turn = threading.Event()
        self._answered = threading.Event()
        self._locations: list[str] = []
        self._early: list[dict[str, Any]] = []
        self._wire = self._connect(addresses, token)
        threading.Thread(target=self._run, name="rank monitor", daemon=True).start()

    def _connect(self, addresses: Iterable[tuple[str, int]], token: str) -> _Wire:
        problem = OSError("no address")
        for address in addresses:
            try:
                wire = _Wire(socket.create_connection(address, CONNECT_WITHIN))
                wire.send("hello", token=token, process=asdict(self.process))
                if messages := wire.receive():
                    self._early = messages[1:]
                    wire.socket.settimeout(None)
                    return wire
            except (OSError, ValueError) as error:
                problem = error
        raise OSError(str(problem))

    def report(self, text: str, code: int = 1) -> None:
        """Report that this rank has failed, and wait until it is its turn to print the error; it
        does not return if another rank prints it."""
        self._reported = True
        self._wire.send("failed", text=text[:LONGEST_TEXT], code=code)
        self._turn.wait(OTHERS_JOIN_WITHIN + OTHERS_EXIT_WITHIN + 2.0)
        while self._ended:
            time.sleep(1.0)  # the other thread ends this process

    def ask(self) -> list[str]:
        """Of each rank that does not wait for others: its process and the line of code it
        executes."""
        self._answered.clear()
        self._wire.send("ask")
        self._answered.wait(2 * ANSWERS_WITHIN)
        return self._locations

    def close(self) -> None:
        """The run is over: from now on the end of this process is no failure."""
        self._closed = True
        self._wire.send("bye")

    def _run(self) -> None:
        messages: list[dict[str, Any]] | None = self._early
        while messages is not None:
            for message in messages:
                self._take(message)
            messages = self._wire.receive()
        if not self._closed and not self._reported:
            time.sleep(DEATH_COUNTS_AFTER)
            self._leave(Failure(self._server_process, DIED, silent=True))
        self._wire.socket.close()
        self._turn.set()
        self._answered.set()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "end":
            self._leave(
                Failure(**message["end"] | {"process": ProcessId(**message["end"]["process"])})
            )
        elif kind == "speak":
            self._turn.set()
        elif kind == "where":
            self._wire.send("at", at=None if self._reported else self._doing())
        elif kind == "answer":
            self._locations = message["processes"]
            self._answered.set()
        elif kind == "bye":
            self._closed = True

    def _leave(self, failure: Failure) -> None:
        self._ended = True
        self._on_failure(failure)

    def _doing(self) -> str | None:
        """The line of code of the main thread; None while any thread waits for other ranks."""
        found = sys._current_frames()
        stacks = {ident: traceback.extract_stack(frame) for ident, frame in found.items()}
        if any(_waits(stack[-1]) for stack in stacks.values()) or any(
            f.name == "leave_with" for f in stacks[self._main]
        ):
            return None
        return code_location(stacks[self._main])


def _waits(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename).as_posix()
    return "/torch/distributed/" in path or path.endswith(
        ("megatron/parallel/collectives.py", "megatron/parallel/pipeline.py")
    )


def _numbers(ranks: Sequence[int]) -> str:
    """`0, 2-5`."""
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in _spans(ranks)
    )


def _spans(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            yield ranks[first], ranks[i - 1]
            first = i
