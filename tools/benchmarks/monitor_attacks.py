#!/usr/bin/env python
"""The rank monitor under attack while a run trains: losses, log lines, milliseconds per iteration.

Two ranks train on CPUs, in turns undisturbed and attacked. Rank 1 of an attacked run starts when
each attack has had its turn at the monitor's port, on which rank 0 listens until then; afterwards
somebody tries to connect 20 times a second until the run ends. The attackers know the port and the
token, which anybody can read in the rendezvous store, and the secret of the run only as far as its
messages show it. As root, some attacks come from the user nobody.

Printed: the lines that each attack added to the log (one at most), whether the losses are equal,
the connections accepted while the run trained (none), and the median milliseconds per iteration of
each run. Exit code 1 if one of these is not so. The times are for the reader: compare their
differences with those between the undisturbed runs.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECRET = "known to the ranks alone"
HALF_OPEN = 1000  # connections
RANK_0_FILES = 512  # its limit of open files
NOBODY = 65534
PATIENCE = 60.0  # seconds for anything that is waited for
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--mock-data --vocab-size 256 --tokenizer-type NullTokenizer --num-workers 0 "
    "--log-interval 1 --device cpu --seed 7"
)
# what anybody does who reaches MASTER_PORT
READ_STORE = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=60))
print(store.get("rank-monitor").decode())
"""


@dataclass(frozen=True)
class Target:
    """The monitor of a run, and what a stranger knows of it."""

    port: int
    token: str
    process: dict[str, object]

    def connect(self) -> socket.socket:
        """A new connection. Raises OSError."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    def hello(self, challenge: str, key: str, rank: int = 1) -> bytes:
        """The message of a rank whose answer to a challenge is made with `key`."""
        proof = hmac.new(key.encode(), f"rank {challenge}".encode(), "sha256").hexdigest()
        process = {**self.process, "rank": rank}
        message = {"kind": "hello", "proof": proof, "challenge": "00", "process": process}
        return json.dumps(message).encode() + b"\n"


def challenge_of(connection: socket.socket) -> str:
    """The challenge that the server sends first."""
    return json.loads(connection.makefile("rb").readline())["challenge"]


def wait_until_closed(connection: socket.socket) -> None:
    """Until the server has closed a connection."""
    connection.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass


def sends(*parts: bytes, pause: float = 0.0) -> Callable[[Target], None]:
    """An attack that sends this and waits until the connection is closed."""

    def attack(target: Target) -> None:
        with target.connect() as connection, contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            wait_until_closed(connection)

    return attack


def answers(key: Callable[[Target], str], rank: int = 1) -> Callable[[Target], None]:
    """An attack that answers the challenge of its connection with a wrong key."""

    def attack(target: Target) -> None:
        with target.connect() as connection:
            connection.sendall(target.hello(challenge_of(connection), key(target), rank))
            wait_until_closed(connection)

    return attack


def replay(target: Target) -> None:
    """A genuine message of rank 1, as it can be recorded, on another connection."""
    with target.connect() as recorded, target.connect() as connection:
        genuine = target.hello(challenge_of(recorded), target.token + SECRET)
        connection.sendall(genuine)
        wait_until_closed(connection)


def half_open(target: Target) -> None:
    """Connections that say nothing, up to the limit of open files of rank 0 and beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = HALF_OPEN + 256
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(target.connect()) for _ in range(HALF_OPEN)]
        for connection in connections:
            wait_until_closed(connection)


def slow_reader(target: Target) -> None:
    """Sends whole messages and never reads an answer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.connect(("127.0.0.1", target.port))
        with contextlib.suppress(ConnectionError):
            while True:
                connection.sendall(b"{}\n")
                time.sleep(0.01)


def resets(target: Target) -> None:
    """Connections that are reset in the middle of a message."""
    for _ in range(200):
        with target.connect() as connection:
            connection.sendall(b'{"kind": "hello", ')
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def as_nobody(attack: Callable[[Target], None]) -> Callable[[Target], None]:
    """An attack by a process of the user nobody."""

    def other(target: Target) -> None:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                attack(target)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0, "the attack itself failed"

    return other


def attacks() -> dict[str, Callable[[Target], None]]:
    """All attacks by their names."""
    failed = b'{"kind": "failed", "text": "gone", "code": 7}\n'
    end = {"process": {"rank": 0, "pid": 1, "host": "x", "node": "x"}, "text": "x", "code": 1}
    found = {
        "garbage": sends(bytes(range(256)) * 8),
        "HTTP": sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        "TLS": sends(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\n"),
        "an endless line": sends(*[b"x" * (1 << 16)] * 4000),
        "3,000 brackets": sends(b"[" * 3000 + b"\n"),
        "200,000 brackets": sends(b"[" * 200_000 + b"\n"),
        "numbers": sends(b'{"kind": 1e400, "code": ' + b"9" * 3900 + b"}\n"),
        "wrong types": sends(b'{"kind": "hello", "proof": 5, "challenge": 7, "process": 3}\n'),
        "a failure without hello": sends(failed),
        "a spoofed end": sends(json.dumps({"kind": "end", "end": end}).encode() + b"\n"),
        "a guess": answers(lambda target: "guess"),
        "the token without the secret": answers(lambda target: target.token),
        "... as rank 0": answers(lambda target: target.token, 0),
        "... as rank 99": answers(lambda target: target.token, 99),
        "a replayed hello": replay,
        "10,000 lines": sends(b"{}\n" * 10_000),
        "a byte per 0.2 s": sends(*[b"x"] * 100, pause=0.2),
        "a slow reader": slow_reader,
        "200 resets": resets,
        f"{HALF_OPEN} half-open connections": half_open,
    }
    if os.geteuid() == 0:
        for name in ("garbage", "the token without the secret", "a replayed hello"):
            found[f"{name}, by another user"] = as_nobody(found[name])
    return found


class Run:
    """Two ranks in `folder`; rank 1 starts when it is asked to."""

    def __init__(self, folder: Path, iterations: int):
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self._flags = [*MODEL.split(), "--train-iters", str(iterations)]
        self._flags += ["--metrics-file", str(self.metrics)]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._ranks = [self._start(0)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
            "MEGATRON_RUN_SECRET": SECRET,
        }
        limit = (RANK_0_FILES, RANK_0_FILES)
        with open(self.folder / f"log.{rank}", "wb") as log:
            return subprocess.Popen(
                [sys.executable, str(ROOT / "pretrain_gpt.py"), *self._flags],
                env={**os.environ, **{name: str(value) for name, value in places.items()}},
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
            )

    def target(self) -> Target:
        """Its monitor, once rank 0 listens."""
        words = [sys.executable, "-c", READ_STORE, str(self.port)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        _, port, token, process = json.loads(said)
        return Target(port, token, process)

    def warnings(self) -> int:
        """Warnings that rank 0 has printed."""
        return (self.folder / "log.0").read_bytes().count(b"WARNING")

    def join(self) -> None:
        """Start rank 1."""
        self._ranks.append(self._start(1))

    def end(self) -> None:
        """Wait for both. Raises RuntimeError if one fails."""
        codes = [rank.wait() for rank in self._ranks]
        if any(codes):
            said = "".join((self.folder / f"log.{rank}").read_text() for rank in (0, 1))
            raise RuntimeError(f"exit codes {codes}\n{said[-3000:]}")

    def kill(self) -> None:
        """End what is left of it."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def rows(self) -> list[dict[str, float]]:
        """The metrics of all iterations."""
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return [row for row in rows if "lm_loss" in row and "split" not in row]


@dataclass(frozen=True)
class Result:
    """What a run trained, and what the attacks did to it."""

    losses: list[float]
    milliseconds: float  # median of its iterations
    lines: dict[str, int]  # that each attack added to the log of rank 0
    accepted: int  # connections after all ranks were connected


@contextlib.contextmanager
def knocking(run: Run, target: Target) -> Iterator[list[int]]:
    """Somebody who tries to connect again and again; how often that worked once the run trains."""
    accepted: list[int] = []
    done = threading.Event()

    def knock() -> None:
        while not done.wait(0.05):
            trains = run.metrics.exists()
            with contextlib.suppress(OSError), target.connect() as connection:
                connection.sendall(b"x\n")
                accepted.extend([1] * trains)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield accepted
    finally:
        done.set()
        thread.join()


def train(iterations: int, attacked: bool) -> Result:
    """Train once. Raises RuntimeError if the run fails."""
    lines = {}
    accepted: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), iterations)
        try:
            if attacked:
                target = run.target()
                for name, attack in attacks().items():
                    before = run.warnings()
                    attack(target)
                    with target.connect() as connection:
                        challenge_of(connection)  # so the server has done with the attack
                    lines[name] = run.warnings() - before
                run.join()
                with knocking(run, target) as accepted:
                    run.end()
            else:
                run.join()
                run.end()
            rows = run.rows()
        finally:
            run.kill()
    milliseconds = statistics.median(row["elapsed_ms"] for row in rows[len(rows) // 5 :])
    return Result([row["lm_loss"] for row in rows], milliseconds, lines, len(accepted))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if an attack changed the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    results = {"undisturbed": [], "attacked": []}
    for _ in range(args.rounds):
        for name, found in results.items():
            found.append(train(args.iterations, name == "attacked"))
    for name, lines in results["attacked"][0].lines.items():
        print(f"{name:45s} {lines} lines in the log")
    both = [one for found in results.values() for one in found]
    equal = all(one.losses == both[0].losses for one in both)
    accepted = sum(one.accepted for one in both)
    print(f"losses of {args.iterations} iterations: {'equal' if equal else 'DIFFERENT'}")
    print(f"connections accepted while the runs trained: {accepted}")
    for name, found in results.items():
        times = " ".join(f"{one.milliseconds:.2f}" for one in found)
        print(f"{name:12s} median ms per iteration, of each run: {times}")
    most = max(lines for one in both for lines in one.lines.values())
    return int(not equal or accepted > 0 or most > 1)


if __name__ == "__main__":
    sys.exit(main())
