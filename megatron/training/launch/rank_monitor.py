"""The rank monitor: a connection from every rank to rank 0, over which all ranks are notified
within a second that a rank has failed or died, and which one.

It has its own sockets and threads, because a rank that waits inside a collective is not notified
there: gloo reports a broken connection, NCCL only the end of its time limit. How the ranks get the
address of rank 0 and the secret of the run is the caller's matter.

A connection proves with the secret that it is a rank before anything else is read from it, and the
server proves itself in the same way; nothing that was sent before is of use (HMAC of a random
challenge). Once all ranks are connected, rank 0 does not listen any more.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron import launcher
from megatron.training.launch import hang
from megatron.training.launch.hang_limits import Limits, Phase
from megatron.training.launch.process import (
    HUNG,
    Failure,
    ProcessId,
    code_location,
    this_process,
)
from megatron.training.launch.start_watch import GONE

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
LONGEST_LINE = 1 << 18  # bytes of a message of a rank
LONGEST_HELLO = 1 << 12  # ... and of one that has yet to prove that it is a rank
LONGEST_ANSWER = 1 << 26  # ... and of rank 0's: it describes every rank
HELLO_WITHIN = 5.0
TICK = 1.0  # seconds between looks at the progress of a rank
ANSWERS_ABOUT_STALL_WITHIN = 4.0
SERVER_IS_SILENT_AFTER = 6  # ticks
# seconds before a limit at which ranks are asked for a sign of life, so that who gives none is
# known at the limit
ASKS_AHEAD = 7.0
ASKS_AGAIN_AFTER = 5  # ticks
MOST_REPORTS = 8  # ranks
ALL_WAIT_LIMITS = 4  # limits that all may wait for each other: a network may recover
TOKEN = 32  # characters
STRANGERS = 64  # connections beyond one per rank that may wait to prove themselves


def _line(kind: str, content: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **content}).encode() + b"\n"


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
        self.send_line(_line(kind, content))

    def send_line(self, line: bytes) -> None:
        """A message that has been encoded."""
        with contextlib.suppress(OSError), self._lock:
            self.socket.sendall(line)

    def receive(self, limit: int) -> list[dict[str, Any]] | None:
        """Wait for messages; None when the connection is closed. Raises ValueError for what is no
        message: a line above `limit` bytes, brackets nested too deeply, something else than JSON
        objects."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*whole, self._rest))) > limit:
            raise ValueError(f"a line of more than {limit} bytes")
        if not data:
            return None
        try:
            found = [json.loads(line) for line in whole]
        except RecursionError:
            raise ValueError("brackets nested too deeply") from None
        if not all(isinstance(message, dict) for message in found):
            raise ValueError("no JSON object")
        return found

    def receive_one(self, backlog: list[dict[str, Any]], limit: int) -> dict[str, Any]:
        """The first message of `backlog`, to which what arrives is added. Raises OSError for a
        closed connection, ValueError as `receive` does."""
        while not backlog:
            got = self.receive(limit)
            if got is None:
                raise OSError("the connection was closed")
            backlog += got
        return backlog.pop(0)


def _proof(key: str, side: str, challenge: str) -> str:
    """What only one who knows the key can answer to a challenge."""
    return hmac.new(key.encode(), f"{side} {challenge}".encode(), "sha256").hexdigest()


class SecretDiffers(ValueError):
    """Rank 0 refused this rank, which has another secret of the run."""


NO_LIMITS = Limits(None, None, None, None, None)


@dataclass
class _Visitor:
    """A connection, and its rank once it has proved that it is one."""

    wire: _Wire
    address: str
    challenge: str
    deadline: float
    rank: int | None = None


class MonitorServer:
    """Rank 0's part: receives from all ranks, decides whose failure counts, and makes all others
    exit.

    It listens at `host` ("": all addresses of this machine) until all ranks are connected. A rank
    needs `token` and, unless it is empty, `secret` (which is not published). `noticed` is called at
    once with each failure, for a launcher may end this process before one is decided on. `gone`
    returns the process of a rank, of those that have not joined, that is known to have ended.
    """

    def __init__(
        self,
        world_size: int,
        family: int = socket.AF_INET,
        host: str = "",
        secret: str = "",
        noticed: Callable[[Failure], None] = lambda failure: None,
        startup: float | None = None,
        gone: Callable[[Collection[int]], ProcessId | None] = lambda ranks: None,
    ):
        self.world_size = world_size
        self._noticed = noticed
        self._gone = gone
        self.token = secrets.token_hex(TOKEN // 2)
        self._key = self.token + secret
        self._visitors: dict[socket.socket, _Visitor] = {}  # not yet ranks, the oldest first
        self._turned_away: set[str] = set()
        self._listening = True
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
        self._stall_of: int | None = None  # seconds, while the ranks are asked why
        self._answers: dict[int, Any] = {}
        self._pinged_at = -ASKS_AHEAD
        self._heard_at: dict[int, float] = {}
        self._quiet: set[int] = set()  # ranks that are not waited for
        self._phases: dict[int, tuple[str, float]] = {}  # long ones, and when their limit ends
        self._stragglers: set[tuple[int, str]] = set()  # that were reported
        self._inspected: list[dict[str, Any]] = []  # by ranks of other hosts
        self._doomed: list[ProcessId] = []  # that do not respond
        self._delegates: list[int] = []  # ranks that end those of their hosts
        self._startup_limit = startup or 0.0
        self._deadlines = {"absent": time.monotonic() + ABSENCE_REPORTED_EVERY, "look": 0.0}
        if startup:
            self._deadlines["joined"] = time.monotonic() + startup
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
            connection, address = self._server.accept()
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
        connection.settimeout(CONNECT_WITHIN)  # of what is sent
        while len(self._visitors) >= self.world_size + STRANGERS:
            self._turn_away(next(iter(self._visitors.values())), "too many connections")
        visitor = _Visitor(
            _Wire(connection),
            str(address[0]),
            secrets.token_hex(16),
            time.monotonic() + HELLO_WITHIN,
        )
        self._visitors[connection] = visitor
        self._selector.register(connection, selectors.EVENT_READ, visitor)
        visitor.wire.send("challenge", challenge=visitor.challenge)
        self._deadlines.setdefault("silent_visitors", visitor.deadline)

    def _accept(self) -> None:
        if self._listening:
            self._selector.register(self._server, selectors.EVENT_READ)

    def _stop_listening(self) -> None:
        """All ranks are connected: nobody else has a reason to connect."""
        if self._listening:
            self._listening = False
            if self._deadlines.pop("accept", None) is None:
                self._selector.unregister(self._server)
            self._server.close()
            for visitor in list(self._visitors.values()):
                self._close(visitor)

    def _silent_visitors(self) -> None:
        """Close connections that have not proved in time that they are ranks."""
        now = time.monotonic()
        for visitor in list(self._visitors.values()):
            if visitor.deadline <= now:
                self._turn_away(visitor, f"nothing valid within {HELLO_WITHIN:.0f} seconds")
        if self._visitors:
            self._deadlines["silent_visitors"] = next(iter(self._visitors.values())).deadline

    def _turn_away(self, visitor: _Visitor, reason: str) -> None:
        """Close the connection of one that is not a rank; a reason is logged once."""
        self._close(visitor)
        if reason not in self._turned_away and len(self._turned_away) < STRANGERS:
            self._turned_away.add(reason)
            print(
                f"WARNING: the rank monitor closed a connection from {visitor.address} that is not "
                f"a rank of this run ({reason})",
                flush=True,
            )

    def _close(self, visitor: _Visitor) -> None:
        self._visitors.pop(visitor.wire.socket, None)
        self._selector.unregister(visitor.wire.socket)
        visitor.wire.socket.close()

    def _receive(self, key: selectors.SelectorKey) -> None:
        visitor = key.data
        if visitor.wire.socket.fileno() < 0:  # closed since it was selected
            return
        try:
            limit = LONGEST_HELLO if visitor.rank is None else LONGEST_LINE
            messages = visitor.wire.receive(limit)
            for message in messages or ():
                if visitor.rank is None:
                    visitor.rank = self._welcome(visitor, message)
                else:
                    self._take(visitor.rank, message)
        except (ValueError, KeyError, TypeError) as error:
            messages = None
            if visitor.rank is None:
                self._turn_away(visitor, "invalid message")
                return
            print(
                f"WARNING: the rank monitor closed the connection of rank {visitor.rank}: invalid "
                f"message ({type(error).__name__}: {error})",
                flush=True,
            )
        if messages is None:
            self._close(visitor)
            if self._wires.get(visitor.rank) is visitor.wire:
                del self._wires[visitor.rank]
                process = self._processes[visitor.rank]
                self._note(Failure(process, DIED, silent=True), DEATH_COUNTS_AFTER)

    def _welcome(self, visitor: _Visitor, message: dict[str, Any]) -> int:
        expected = _proof(self._key, "rank", visitor.challenge)
        if not secrets.compare_digest(message["proof"], expected):
            # proved with what is published alone: a rank has another secret
            proof = _proof(self.token, "server", str(message["challenge"]))
            visitor.wire.send("refused", proof=proof)
            raise ValueError("not a rank of this run")
        process = ProcessId(**message["process"])
        wire = visitor.wire
        del self._visitors[wire.socket]
        self._processes[process.rank] = process
        self._wires[process.rank] = wire
        wire.send("welcome", proof=_proof(self._key, "server", str(message["challenge"])))
        if self._decided:
            wire.send("end", end=self._decided)
        if len(self._processes) == self.world_size:
            self._deadlines.pop("absent", None)
            self._deadlines.pop("joined", None)
            self._stop_listening()
        return process.rank

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        self._heard_at[rank] = time.monotonic()
        if kind == "bye":
            self._wires.pop(rank, None)
        elif kind == "ping":
            if time.monotonic() - self._pinged_at >= ASKS_AHEAD:
                self._pinged_at = time.monotonic()
                self._send_all("ping")
            self._wires[rank].send("pong")
        elif kind == "failed":
            self._note(
                Failure(self._processes[rank], message["text"], message["code"]),
                REPORT_COUNTS_AFTER,
            )
        elif kind == "ask":
            if not self._asking:
                self._answers = {}
                self._quiet = set()
                self._deadlines["answer"] = time.monotonic() + ANSWERS_WITHIN
                self._send_all("where")
            self._asking.add(rank)
        elif kind == "phase":
            limit = message["limit"]
            until = float("inf") if limit is None else time.monotonic() + float(limit)
            self._phases[rank] = (str(message["name"]), until)
        elif kind == "inspected":
            self._inspected.append(message)
        elif kind == "stalled":
            self._stalled(rank, int(message["seconds"]))
        elif kind == "at":
            self._answers[rank] = message
            if self._wires.keys() <= self._answers.keys() | self._quiet:
                self._deadlines["answer"] = 0.0

    def _stalled(self, rank: int, seconds: int) -> None:
        """A rank has made no progress for longer than its limit: ask all what they do."""
        if self._stall_of is not None or self._decided:
            self._wires[rank].send("wait")
            return
        self._stall_of = seconds
        self._answers = {}
        waited = ANSWERS_ABOUT_STALL_WITHIN <= time.monotonic() - self._pinged_at <= 2 * ASKS_AHEAD
        self._quiet = {
            one for one in self._wires if waited and self._heard_at.get(one, 0.0) < self._pinged_at
        }
        self._deadlines["answer"] = time.monotonic() + ANSWERS_ABOUT_STALL_WITHIN
        self._send_all("where")

    def _note(self, failure: Failure, seconds: float) -> None:
        if self._decided:
            return
        self._noticed(failure)
        self._failures.append(failure)
        at = time.monotonic() + seconds
        self._deadlines["end"] = min(at, self._deadlines.get("end", at))

    def _look(self) -> None:
        """End the run where a rank has ended before it joined."""
        missing = set(range(self.world_size)) - set(self._processes)
        if not missing or self._decided:
            return
        if process := self._gone(missing):
            self._note(Failure(process, GONE, silent=True), 0.0)
        self._deadlines["look"] = time.monotonic() + TICK

    def _absent(self) -> None:
        missing = sorted(set(range(self.world_size)) - set(self._processes))
        print(
            f"waiting for {len(missing)} of {self.world_size} ranks to join: "
            f"{hang.numbers(missing)}",
            flush=True,
        )
        self._deadlines["absent"] = time.monotonic() + ABSENCE_REPORTED_EVERY

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
        if self._stall_of is not None:
            self._judge(self._stall_of)
            self._stall_of = None

    def _judge(self, seconds: int) -> None:
        """Some rank has made no progress for longer than its limit: end the run, unless a rank that
        the others may wait for is within its own limit, or all have waited for each other not long
        enough."""
        busy = {rank: one for rank, one in self._answers.items() if one["at"]}
        silent = [
            rank for rank in sorted(set(self._wires) - set(self._answers)) if self._late(rank)
        ]
        within = [rank for rank, one in busy.items() if not one["stalled"]]
        if self._failures:
            return
        if within and not any(self._stopped(rank) for rank in silent):
            self._report_stragglers(within)
        elif silent or busy:
            self._hang(seconds, silent, busy)
        elif len(self._answers) == len(self._wires) and all(
            one["stalled"] and one["seconds"] > ALL_WAIT_LIMITS * one["limit"]
            for one in self._answers.values()
        ):
            self._hang(seconds, [], self._at_odds())

    def _late(self, rank: int) -> bool:
        """Should this rank have answered? In a phase that may hold the interpreter's lock for long
        it need not, within the limit of that, unless it is stopped."""
        _, until = self._phases.get(rank, ("", 0.0))
        return self._stopped(rank) or time.monotonic() > until

    def _stopped(self, rank: int) -> bool:
        process = self._processes[rank]
        here = process.host == socket.gethostname()
        return here and hang.process_state(process.pid) in ("T", "t")

    def _at_odds(self) -> dict[int, dict[str, Any]]:
        """Where all ranks wait: those that wait for something else than most of the others."""
        waits = {rank: one["waits"] for rank, one in self._answers.items()}
        texts = list(waits.values())
        usual = max(texts, key=texts.count)
        odd = [rank for rank, text in waits.items() if text != usual] or list(waits)
        return {
            rank: {
                **self._answers[rank],
                "phase": f"collective ({waits[rank]})",
                "at": "all ranks wait for each other",
            }
            for rank in odd
        }

    def _report_stragglers(self, ranks: Iterable[int]) -> None:
        """A line for a rank that is slow, or in a long phase, but within its limit; once for each
        of its phases."""
        for rank in ranks:
            answer = self._answers[rank]
            if (rank, answer["known"]) in self._stragglers:
                continue
            self._stragglers.add((rank, answer["known"]))
            waiting = sorted(set(self._answers) - set(ranks))
            print(
                f"straggler: {self._processes[rank]} is still in {answer['known']} "
                f"(phase: {answer['phase']}) after {answer['elapsed']:.0f} s, "
                f"{answer['share']:.0%} of them without waiting for others; "
                f"waiting for it: rank {hang.numbers(waiting) or 'none'}",
                flush=True,
            )

    def _hang(
        self, seconds: int, silent: Iterable[int], busy: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """End the run: these ranks do not respond, and those are not waiting for others."""
        known = {
            self._processes[rank]: self._phases.get(rank, ("", 0.0))[0] or "iteration"
            for rank in silent
        }
        found: dict[int, tuple[ProcessId, Mapping[str, Any]]] = {
            process.rank: (process, one) for process, one in self._inspect(known).items()
        }
        for rank, answer in busy.items():
            found[rank] = (self._processes[rank], answer)
        self._report_hang(seconds, found)

    def _report_hang(
        self, seconds: float, found: Mapping[int, tuple[ProcessId, Mapping[str, Any]]]
    ) -> None:
        ranks = sorted(found)
        failures = [hang.failure(found[rank][0], seconds, found[rank][1]) for rank in ranks]
        for failure in failures[:MOST_REPORTS]:
            answer = found[failure.process.rank][1]
            print(hang.report(failure, answer), file=sys.stderr)
        if ranks[MOST_REPORTS:]:
            more = hang.numbers(ranks[MOST_REPORTS:])
            print(f"hang: also rank {more}, in the same way", file=sys.stderr)
        waits: dict[str, list[int]] = {}
        for rank in sorted(set(self._wires) - set(found)):
            answer = self._answers.get(rank, {})
            where = f" in {answer['waits']}" if answer.get("waits") else ""
            waits.setdefault(where, []).append(rank)
        text = "; ".join(f"{hang.numbers(ranks)}{where}" for where, ranks in waits.items())
        print(f"waiting for it: rank {text or 'none'}", file=sys.stderr, flush=True)
        self._note(failures[0], 0.0)
        self._kill_silent({failure.process.rank: failure.text for failure in failures})

    def _inspect(
        self, known: Mapping[ProcessId, str], missing: Iterable[int] = ()
    ) -> dict[ProcessId, dict[str, Any]]:
        """What processes do that do not respond, and where ranks are that never joined; each host's
        are inspected by a rank there that responds."""
        self._send_all("wait")
        missing = list(missing)
        here = socket.gethostname()
        hosts: dict[str, int] = {}
        quiet = {process.rank for process in known}
        for rank in sorted(set(self._wires) - quiet):
            if self._processes[rank].host != here:
                hosts.setdefault(self._processes[rank].host, rank)
        self._inspected = []
        for host, rank in hosts.items():
            theirs = [(asdict(one), text) for one, text in known.items() if one.host == host]
            if theirs or missing:
                self._wires[rank].send("inspect", processes=theirs, missing=missing)
        asked = len(hosts) if missing else len({one.host for one in known} & set(hosts))
        answers = hang.inspect(known, missing)
        deadline = time.monotonic() + hang.STACK_WITHIN
        while len(self._inspected) < asked and time.monotonic() < deadline:
            self._listen(deadline)
        for message in self._inspected:
            answers |= {ProcessId(**one): answer for one, answer in message["answers"]}
        self._doomed = list(answers)
        self._delegates = list(hosts.values())
        return answers

    def _kill_silent(self, texts: Mapping[int, str]) -> None:
        """End the processes that were inspected, which cannot be asked to exit; `texts`: their
        failures by rank."""
        for process in self._doomed:
            hang.kill(process, texts[process.rank])
        doomed = [(asdict(process), texts[process.rank]) for process in self._doomed]
        for rank in self._delegates if doomed else ():
            if rank in self._wires:
                self._wires[rank].send("kill", processes=doomed)

    def _joined(self) -> None:
        """The time for start-up is over, and some ranks never joined."""
        missing = [rank for rank in range(self.world_size) if rank not in self._processes]
        answers = {one.rank: (one, answer) for one, answer in self._inspect({}, missing).items()}
        for rank in missing:
            node = self._node_of(rank)
            place = ProcessId(rank, 0, node, node)
            answers.setdefault(
                rank, (place, hang.unknown(hang.START_UP) | {"at": hang.NEVER_JOINED})
            )
        self._answers = {}
        self._report_hang(self._startup_limit, answers)

    def _node_of(self, rank: int) -> str:
        """The host of a rank that never joined, if each host has as many consecutive ranks as this
        one."""
        size = launcher.info().local_world_size or 1
        hosts = {one.host for one in self._processes.values() if one.rank // size == rank // size}
        return f"{hosts.pop()}, probably" if len(hosts) == 1 else "an unknown host"

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
        hung = failure.code == HUNG
        last = (0,) if hung else (failure.process.rank, 0)
        self._send_all("end", but=last, end=self._decided)
        deadline = time.monotonic() + OTHERS_JOIN_WITHIN
        # those that start notice it themselves when one of them has ended
        joined = hung or failure.text == GONE or len(self._processes) == self.world_size
        while not joined and time.monotonic() < deadline:
            self._listen(deadline)
            joined = len(self._processes) == self.world_size
        self._wait_until_gone(last)
        if (failure.process.rank or hung) and 0 in self._wires:
            self._wires[0].send("end", end=self._decided)
            time.sleep(REPORT_COUNTS_AFTER)
        if failure.process.rank in self._wires:
            self._wires[failure.process.rank].send("speak")

    def _send_all(self, kind: str, but: Collection[int] = (), **content: Any) -> None:
        line = _line(kind, content)
        for rank, wire in self._wires.items():
            if rank not in but:
                wire.send_line(line)

    def _wait_until_gone(self, but: Iterable[int]) -> None:
        deadline = time.monotonic() + OTHERS_EXIT_WITHIN
        while set(self._wires) - set(but) and time.monotonic() < deadline:
            self._listen(deadline)


class MonitorClient:
    """This rank's connection to the server.

    `on_failure` is called, in a separate thread, when another rank has failed or died; it is to end
    the process. `key`: the server's token followed by the secret of the run. `process` is this
    process, unless given. `noticed` is called at once with the death of rank 0, for a launcher may
    end this process before `on_failure` is called.
    """

    def __init__(
        self,
        addresses: Iterable[tuple[str, int]],
        key: str,
        server: ProcessId,
        on_failure: Callable[[Failure], None],
        process: ProcessId | None = None,
        noticed: Callable[[Failure], None] = lambda failure: None,
        limits: Limits = NO_LIMITS,
    ):
        self.process = process or this_process()
        self.limits = limits
        self.server_process = server
        self._on_failure = on_failure
        self._noticed = noticed
        self._main = threading.main_thread().ident or 0  # it has one, since it runs
        self._reported = self._closed = self._ended = False
        # the actions of the pipeline that are done, say
        self.progress: Callable[[], int] = lambda: 0
        self._phase = Phase(hang.START_UP, limit=limits.startup)
        self._seen: tuple[Any, ...] = ()  # phase and progress at the last tick
        self._ticks = 0  # since progress
        self._phase_ticks = 0  # since the phase began
        self._busy_ticks = 0  # ... of which this rank did not wait for others
        self._asks_at = 0  # ticks at which rank 0 is notified next
        self._unanswered = 0  # ticks since it was
        self._turn = threading.Event()
        self._answered = threading.Event()
        self._locations: list[str] | None = None
        self._early: list[dict[str, Any]] = []
        self._wire = self._connect(addresses, key)
        threading.Thread(target=self._run, name="rank monitor", daemon=True).start()

    def _connect(self, addresses: Iterable[tuple[str, int]], key: str) -> _Wire:
        problem: Exception = OSError("no address")
        for address in addresses:
            try:
                wire = _Wire(socket.create_connection(address, CONNECT_WITHIN))
            except OSError as error:
                problem = error
                continue
            try:
                self._early = self._introduce(wire, key)
                wire.socket.settimeout(None)
                return wire
            except SecretDiffers:
                raise
            except (OSError, ValueError, KeyError, TypeError) as error:
                problem = error
                wire.socket.close()
        raise OSError(str(problem))

    def _introduce(self, wire: _Wire, key: str) -> list[dict[str, Any]]:
        """Prove that this is a rank, and check that the other end is the server of this run; the
        messages that came after. Raises OSError, ValueError, KeyError or TypeError; SecretDiffers
        where the server refuses it."""
        backlog: list[dict[str, Any]] = []
        challenge = wire.receive_one(backlog, LONGEST_HELLO)["challenge"]
        mine = secrets.token_hex(16)
        proof = _proof(key, "rank", challenge)
        wire.send("hello", proof=proof, challenge=mine, process=asdict(self.process))
        message = wire.receive_one(backlog, LONGEST_ANSWER)
        refused = message["kind"] == "refused"
        known = key[:TOKEN] if refused else key
        if not secrets.compare_digest(message["proof"], _proof(known, "server", mine)):
            raise ValueError("the other end is not the rank monitor of this run")
        if refused:
            raise SecretDiffers(
                "MEGATRON_RUN_SECRET (or the file of MEGATRON_RUN_SECRET_FILE) is not that of rank "
                "0; give all ranks the same, or none [run-secret-differs]"
            )
        return backlog

    def report(self, text: str, code: int = 1) -> None:
        """Report that this rank has failed, and wait until it is its turn to print the error; it
        does not return if another rank prints it."""
        self._reported = True
        self._wire.send("failed", text=text[:LONGEST_TEXT], code=code)
        self._turn.wait(OTHERS_JOIN_WITHIN + OTHERS_EXIT_WITHIN + 2.0)
        while self._ended:
            time.sleep(1.0)  # the other thread ends this process

    def ask(self) -> list[str] | None:
        """Of each rank that does not wait for others: its process and the line of code it
        executes. None where rank 0 does not answer."""
        self._answered.clear()
        self._locations = None
        self._wire.send("ask")
        self._answered.wait(2 * ANSWERS_WITHIN)
        return self._locations

    def close(self) -> None:
        """The run is over: from now on the end of this process is no failure."""
        self._closed = True
        self._wire.send("bye")

    def begin(self, phase: Phase) -> None:
        """This rank is in `phase` from now on. The time without progress is counted in looks of a
        thread, so that a machine without a free core is no hang."""
        before = self._phase
        self._phase = phase
        if phase.announced or before.announced:
            name, limit = (str(phase), phase.limit) if phase.announced else ("", 0.0)
            self._wire.send("phase", name=name, limit=limit)

    def _tick(self) -> None:
        phase = self._phase
        now = (phase, self.progress(), hang.mib_moved() if phase.announced else 0)
        self._phase_ticks = self._phase_ticks + 1 if self._seen[:1] == now[:1] else 0
        if self._phase_ticks == 0:
            self._busy_ticks = 0
        elif self._phase_ticks > 1:
            self._busy_ticks += self._waits() is None
        if now != self._seen:
            self._seen = now
            self._ticks = self._unanswered = self._asks_at = 0
            return
        self._ticks += 1
        if phase.limit is None or self._ticks * TICK <= phase.limit - ASKS_AHEAD:
            return
        stalled = self._is_stalled()
        if self._asks_at <= self._ticks:
            self._asks_at = (
                self._ticks + ASKS_AGAIN_AFTER if stalled else int(phase.limit / TICK) + 1
            )
            self._unanswered = self._unanswered or 1
            self._wire.send("stalled" if stalled else "ping", seconds=self._ticks * TICK)
        elif self._unanswered:
            self._unanswered += 1
        if stalled and self._unanswered > SERVER_IS_SILENT_AFTER and self.process.rank:
            self._give_up_server()

    def _is_stalled(self) -> bool:
        limit = self._phase.limit
        return limit is not None and self._ticks * TICK > limit and self._seen[0] == self._phase

    def _give_up_server(self) -> None:
        """Rank 0 does not answer: rank 1 reports it and ends it, the others follow."""
        server = self.server_process
        first = self.process.rank == 1
        known = {server: str(self._phase)}
        answer = hang.inspect(known)[server] if first else hang.unknown("")
        failure = hang.failure(server, int(self._ticks * TICK), answer)
        if first:
            print(hang.report(failure, answer), file=sys.stderr, flush=True)
            hang.kill(server, failure.text)
        else:
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
                while not selector.select(TICK):
                    self._tick()
            messages = self._wire.receive(LONGEST_ANSWER)
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
        elif kind == "ping":
            self._wire.send("pong")
        elif kind == "where":
            self._wire.send("at", **self._state())
        elif kind == "inspect":
            known = {ProcessId(**one): text for one, text in message["processes"]}
            answers = hang.inspect(known, message["missing"])
            self._wire.send("inspected", answers=[(asdict(p), a) for p, a in answers.items()])
        elif kind == "kill":
            for one, text in message["processes"]:
                hang.kill(ProcessId(**one), text)
        elif kind == "answer":
            self._locations = message["processes"]
            self._answered.set()
        elif kind == "bye":
            self._closed = True

    def _leave(self, failure: Failure) -> None:
        self._ended = True
        self._on_failure(failure)

    def _state(self) -> dict[str, Any]:
        """What this rank is doing, for rank 0: where it waits, or the line of code and the stack of
        its main thread."""
        waits = self._waits()
        phase = self._phase
        frames = hang.frames_of(sys._current_frames()[self._main])
        places = [(one.f_code.co_filename, one.f_code.co_name) for one in frames]
        leaves = self._reported or any(name == "leave_with" for _, name in places)
        idle = leaves or waits is not None
        return {
            "at": None if idle else code_location(traceback.extract_stack(frames[-1])),
            "waits": waits,
            "known": str(phase),
            "phase": hang.full_phase(str(phase), places),
            "stalled": self._is_stalled(),
            "seconds": self._ticks * TICK,
            "limit": phase.limit,
            "elapsed": self._phase_ticks * TICK,
            "share": self._busy_ticks / max(1, self._phase_ticks - 1),
            "stack": "" if idle else hang.stack_text(frames)[-LONGEST_TEXT:],
        }

    def _waits(self) -> str | None:
        """The collective in which a thread of this rank waits for others; None if none does."""
        found = map(hang.waiting_in, sys._current_frames().values())
        return next((text for text in found if text is not None), None)
