"""A server of tools/serve.py in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import warm
from tests.forkrun import ROOT
from tests.runs import NO_DROPOUT, train

KEY = "sk-test"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 1 --train-iters 4 --lr 1e-2 --eval-iters 0 "
    "--save-interval 4 --mock-data --tokenizer-type ByteTokenizer --vocab-size 257 --device cpu "
    "--num-workers 0 --init-method-std 0.3"
).split()


def trained_run(folder: Path) -> Path:
    """A run directory with a model of bytes."""
    run = folder / "bytes" / "checkpoints"
    train(folder / "log", [*MODEL, *NO_DROPOUT, "--save", str(run)])
    return run


class Server:
    """A running server: its address, its process, and what it has said on stderr."""

    def __init__(self, run: Path, *flags: str, key: str | None = KEY, descriptors: int = 0):
        """`descriptors`: the process's limit of open files, 0 for that of the tests."""
        import httpx

        words = [str(run), "--port", "0", "--device", "cpu", *flags]
        if key:
            words += ["--api-key", key]
        python = sys.executable if descriptors else warm.python("fastapi", "uvicorn")
        self.process = subprocess.Popen(
            [python, str(ROOT / "tools" / "serve.py"), *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        if descriptors:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        self.said = ""
        for line in self.process.stderr:
            self.said += line
            if found := re.search(r"at (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError(self.said)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.http = httpx.Client(
            base_url=self.url,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
            timeout=60,
        )
        self.http.get("/health").raise_for_status()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.said += line

    def metrics(self) -> dict[str, float]:
        """The values of /metrics without their common prefix."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = [line.removeprefix("megatron_").split() for line in lines if line[:1] != "#"]
        return {name: float(value) for name, value in pairs}

    def post(self, path: str, **body) -> Any:
        """The answer to a JSON body."""
        return self.http.post(f"/v1/{path}", json=body)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join()
        return code


@contextlib.contextmanager
def serving(run: Path, *flags: str, **options: Any) -> Iterator[Server]:
    """A server, ended in the end."""
    server = Server(run, *flags, **options)
    try:
        yield server
    finally:
        server.http.close()
        server.process.kill()
        server.process.wait()
