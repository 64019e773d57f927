#!/usr/bin/env python
"""The rank monitor of many ranks: rank 0 is a process of its own, all others are connections of
this process that speak its protocol.

Printed: the seconds from the first connection until all ranks are connected, rank 0's share of a
core while the ranks train (each announces a save twice in that time), the seconds from the moment
at which all ranks but one report that they make no progress until the silent one is named, and from
there until all ranks were asked to exit. Exit code 1 if one of them is above its goal. Needs Linux,
and as many open files as ranks (ulimit -Hn).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.training.launch import network, rank_monitor  # noqa: E402
from megatron.training.launch.process import ProcessId  # noqa: E402

GOALS = {"connected": 5.0, "share": 0.02, "named": 15.0, "ended": 5.0}
RANKS_PER_NODE = 8
PATIENCE = 120.0  # seconds
AT_ONCE = 256  # connections that are being made
WAITING = {
    "at": None,
    "waits": "all_reduce over dp (ranks 0-4095)",
    "known": "iteration 17",
    "phase": "collective",
    "stalled": True,
    "seconds": 16.0,
    "limit": 15.0,
    "elapsed": 17.0,
    "share": 0.1,
    "stack": "",
}


def process_of(rank: int) -> ProcessId:
    """Where a simulated rank is."""
    node = f"node{rank // RANKS_PER_NODE}"
    return ProcessId(rank, 1000 + rank, node, node)


def serve(ranks: int) -> None:
    """Rank 0 until it is asked to exit: the server, and its own connection to it."""
    network.allow_open_files()
    server = rank_monitor.MonitorServer(ranks, host="127.0.0.1")
    address = ("127.0.0.1", server.port)
    client = rank_monitor.MonitorClient(
        [address],
        server.token,
        process_of(0),
        lambda failure: os._exit(failure.code),
        process_of(0),
    )
    client._waits = lambda: WAITING["waits"]
    print(json.dumps([server.port, server.token]), flush=True)
    sys.stdin.read()


class Rank:
    """A simulated rank and its connection."""

    def __init__(self, rank: int, key: str):
        self.rank = rank
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.welcome = False
        self.ended = False
        self.silent = False
        self._key = key
        self._rest = b""

    def send(self, kind: str, **content: object) -> None:
        """A message."""
        self.socket.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def receive(self) -> None:
        """Take what has arrived."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.ended = self.ended or not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in () if self.silent else lines:
            self._take(json.loads(line))

    def _take(self, message: dict[str, object]) -> None:
        kind = message["kind"]
        if kind == "challenge":
            proof = rank_monitor._proof(self._key, "rank", str(message["challenge"]))
            mine = secrets.token_hex(16)
            self.send("hello", proof=proof, challenge=mine, process=asdict(process_of(self.rank)))
        elif kind == "welcome":
            self.welcome = True
        elif kind == "where":
            self.send("at", **WAITING)
        elif kind == "inspect":
            answer = {"at": "stopped", "phase": "data", "stack": "  File x"}
            theirs = [(process, answer) for process, _ in message["processes"]]
            self.send("inspected", answers=theirs)
        elif kind == "end":
            self.ended = True


class Ranks:
    """All ranks but rank 0."""

    def __init__(self, count: int, port: int, key: str):
        self._selector = selectors.DefaultSelector()
        self.all = [Rank(rank, key) for rank in range(1, count)]
        for number, rank in enumerate(self.all):
            rank.socket.connect_ex(("127.0.0.1", port))
            self._selector.register(rank.socket, selectors.EVENT_READ, rank)
            self.until(lambda n=number: self._joined() > n - AT_ONCE, 10.0)
        self.until(lambda: self._joined() == len(self.all), PATIENCE)

    def _joined(self) -> int:
        return sum(rank.welcome for rank in self.all)

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        """Answer until `done`. Raises RuntimeError after so many seconds."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {seconds:.0f} seconds")
            for key, _ in self._selector.select(0.05):
                key.data.receive()
                if key.data.ended:
                    self._selector.unregister(key.fileobj)
                    key.data.socket.close()

    def train(self, seconds: float) -> None:
        """Iterate, and announce a save twice."""
        for name, limit in 2 * (("save", 540.0), ("", 0.0)):
            for rank in self.all:
                rank.send("phase", name=name, limit=limit)
            deadline = time.monotonic() + seconds / 4
            self.until(lambda d=deadline: time.monotonic() > d, seconds)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(count: int, seconds: float) -> dict[str, float]:
    """The figures of so many ranks. Raises RuntimeError."""
    network.allow_open_files()
    rank_0 = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--ranks", str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        port, token = json.loads(rank_0.stdout.readline())
        start = time.monotonic()
        ranks = Ranks(count, port, token)
        found = {"connected": time.monotonic() - start}
        used = cpu_seconds(rank_0.pid)
        found["connect_cpu"] = used
        start = time.monotonic()
        ranks.train(seconds)
        found["share"] = (cpu_seconds(rank_0.pid) - used) / (time.monotonic() - start)
        culprit = ranks.all[count * 2 // 3]
        culprit.silent = True
        start = time.monotonic()
        for rank in ranks.all:
            if rank is not culprit:
                rank.send("stalled", seconds=16.0)
        others = [rank for rank in ranks.all if rank is not culprit]
        named: list[float] = []

        def is_named() -> bool:
            if any(rank.ended for rank in others):
                named.append(time.monotonic() - start)
            return bool(named)

        ranks.until(is_named, PATIENCE)
        found["named"] = named[0]
        ranks.until(lambda: all(rank.ended for rank in others), PATIENCE)
        found["ended"] = time.monotonic() - start - named[0]
        said = rank_0.communicate(timeout=PATIENCE)[1]
        match = re.search(r"hang: rank (\d+) ", said)
        if not match or int(match[1]) != culprit.rank:
            raise RuntimeError(f"rank {culprit.rank} was not named: {said[-1000:]}")
        return found
    finally:
        rank_0.kill()
        rank_0.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if one is above its goal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(args.ranks)
        return 0
    found = measure(args.ranks, args.seconds)
    print(f"{args.ranks} ranks, of which {args.ranks - 1} are simulated by one process")
    print(f"all connected after {found['connected']:.2f} s (goal: below {GOALS['connected']:g})")
    print(f"processor time of rank 0 until then: {found['connect_cpu']:.2f} s, imports included")
    print(f"rank 0 while they train: {found['share']:.2%} of a core (goal: {GOALS['share']:.0%})")
    print(f"the silent rank was named after {found['named']:.1f} s (goal: {GOALS['named']:g})")
    print(f"all were asked to exit {found['ended']:.2f} s later (goal: {GOALS['ended']:g})")
    return int(any(found[name] > goal for name, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
