#!/usr/bin/env python
"""What continuous batching gives, and whether the server keeps its promises under load:
tools/benchmarks/serve.py CHECKPOINT. Needs the extra `serve`.

Starts tools/serve.py, takes the greedy answer to each of some prompts from one request at a time,
then alternates between one client and --clients clients for --seconds altogether of the latter and
prints tokens per second of both, and the median ratio of the turns. Then --requests requests by all
clients. Every answer must be the one of the request alone; wrong answers, lost ones (an error, a
connection that ends) and the server's resident memory are printed. The clients are threads of this
process and take processor time from the server on a machine of few cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [f"{number} times {number % 7} is" for number in range(16)]
WARM_UP = 4  # requests of each client before memory is read


class Server:
    """A process of tools/serve.py on a free port."""

    def __init__(self, checkpoint: str, clients: int):
        words = ["--port", "0", "--batch-size", str(clients), "--queue-size", str(clients)]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "serve.py"), checkpoint, *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        said = ""
        for line in self.process.stderr:
            said += line
            if found := re.search(r"at http://([\d.]+):(\d+)", line):
                self.host, self.port = found[1], int(found[2])
                return
        raise SystemExit(f"error: the server did not start: {said.strip()}")

    def memory(self) -> float:
        """Resident MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def stop(self) -> int:
        """Ends it by SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Load:
    """Requests to a server, each connection by one client, and a count of what came of them."""

    def __init__(self, server: Server, tokens: int, stream: bool):
        self.counts: Counter[str] = Counter()
        self._server = server
        self._tokens = tokens
        self._stream = stream
        self._right: dict[str, str] = {}
        self._lock = threading.Lock()

    def learn(self) -> None:
        """Take the answer to each prompt alone as the right one."""
        connection = self._connect()
        for prompt in PROMPTS:
            self._right[prompt], _ = self._ask(connection, prompt)
        connection.close()

    def run(self, clients: int, go_on: Callable[[int], bool]) -> tuple[int, float]:
        """Ask by so many clients while `go_on` (number of the request) holds; (tokens, seconds)."""
        numbers = iter(range(1 << 60))
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            jobs = [pool.submit(self._client, numbers, go_on) for _ in range(clients)]
            tokens = sum(job.result() for job in jobs)
        return tokens, time.perf_counter() - start

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._server.host, self._server.port, timeout=600)

    def _client(self, numbers: Iterator[int], go_on: Callable[[int], bool]) -> int:
        connection = self._connect()
        total = 0
        while go_on(number := next(numbers)):
            prompt = PROMPTS[number % len(PROMPTS)]
            try:
                text, tokens = self._ask(connection, prompt)
                found = "right" if text == self._right[prompt] else "wrong"
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                found = "lost"
                tokens = 0
                connection.close()
            total += tokens
            with self._lock:
                self.counts[found] += 1
        connection.close()
        return total

    def _ask(self, connection: http.client.HTTPConnection, prompt: str) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": self._tokens, "temperature": 0}
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise ValueError(content)
        if not self._stream:
            found = json.loads(content)
            return found["choices"][0]["text"], found["usage"]["completion_tokens"]
        *events, last, done = (line[6:] for line in content.split(b"\n\n") if line)
        if done != b"[DONE]":
            raise ValueError("the stream has no end")
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        return text, json.loads(last)["usage"]["completion_tokens"]


def for_seconds(seconds: float) -> Callable[[int], bool]:
    """True for so long."""
    end = time.perf_counter() + seconds
    return lambda number: time.perf_counter() < end


def measure(options: argparse.Namespace, server: Server) -> bool:
    """Print the figures; were all answers right?"""
    load = Load(server, options.max_tokens, options.stream)
    load.learn()
    load.run(options.clients, lambda number: number < WARM_UP * options.clients)
    before = server.memory()
    ratios = []
    for turn in range(options.turns):
        rates = []
        for clients in (1, options.clients):
            part = options.seconds / options.turns / (4 if clients == 1 else 1)
            tokens, seconds = load.run(clients, for_seconds(part))
            rates.append(tokens / seconds)
        ratios.append(rates[1] / rates[0])
        print(
            f"turn {turn + 1}: 1 client {rates[0]:.0f} tokens/s, {options.clients} clients "
            f"{rates[1]:.0f} tokens/s, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}")
    middle = server.memory()
    load.run(options.clients, lambda number: number < options.requests)
    print(
        f"memory of the server: {before:.1f} MiB at the start, {middle:.1f} MiB after the turns, "
        f"{server.memory():.1f} MiB after {options.requests} more requests"
    )
    counts = load.counts
    print(f"answers: {counts['right']} right, {counts['wrong']} wrong, {counts['lost']} lost")
    return not counts["wrong"] and not counts["lost"]


def main(argv: list[str]) -> int:
    """Exit codes: 0 measured, 1 wrong or lost answers, 2 a wrong command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="run directory")
    parser.add_argument("--clients", type=int, default=64, help="clients at once")
    parser.add_argument("--seconds", type=float, default=60, help="of all clients at once")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each side")
    parser.add_argument("--requests", type=int, default=2000, help="requests for the memory")
    parser.add_argument("--max-tokens", type=int, default=32, help="new tokens of an answer")
    parser.add_argument("--stream", action="store_true", help="streamed answers")
    options = parser.parse_args(argv)
    server = Server(options.checkpoint, options.clients)
    try:
        fine = measure(options, server)
    finally:
        code = server.stop()
    print(f"exit code of the server after SIGTERM: {code}")
    return 0 if fine and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
