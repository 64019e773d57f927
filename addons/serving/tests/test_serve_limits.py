"""tools/serve.py as a process that clients cannot stop: bodies that ask for too much, requests that
never end, connections beyond the most, clients that leave; keys, and pages of other sites."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from megatron.inference.engine import Engine, Request
from megatron.inference.load_model import open_trained_model
from megatron.inference.sampling import Sampling
from megatron.inference.speculative import SpeculativeModel
from tests.core.model.tiny import tiny_model
from tests.forkrun import ROOT

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
from megatron.addons.finetuning.chat_prompts import chat_of  # noqa: E402
from megatron.addons.serving import app  # noqa: E402
from megatron.addons.serving.access import Access  # noqa: E402
from megatron.addons.serving.tests.server import KEY, serving, trained_run  # noqa: E402
from megatron.addons.serving.worker import Job, TextChunk, Worker  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.campaign]
JSON = {"Content-Type": "application/json"}
DEADLINE = 30  # seconds for a request to arrive
MB = 1_000_000
MANY = json.dumps({"prompt": [[1]] * 200_000, "n": 64, "max_tokens": 1})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(run):
    """Without a key, and with few descriptors."""
    with serving(run, key=None, descriptors=256) as server:
        yield server


def connect(server, buffer: int = 0) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.settimeout(60)
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((address.hostname, address.port))
    return connection


def cpu_seconds(server) -> float:
    times = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def megabytes(server, kind: str = "VmRSS") -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+)", status)[1]) / 1000


def list_of(element: str, size: int = MB - 100) -> str:
    return f"[{','.join([element] * (size // (len(element) + 1)))}]"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("completions", MANY, 413),
        ("completions", f'{{"prompt": {list_of("1.5")}}}', 413),
        ("completions", f'{{"prompt": {list_of("[]")}}}', 413),
        ("completions", f'{{"prompt": {list_of("1")[:-1]},[]]}}', 400),
        ("completions", f'{{"prompt": [{list_of("1.5")}]}}', 400),
        ("completions", f'{{"prompt": "a", "stop": {list_of("1")}}}', 400),
        ("completions", f'{{"prompt": "a", "logit_bias": {{"1": {list_of("{}")}}}}}', 400),
        ("chat/completions", f'{{"messages": [1], "tools": {list_of("1")}}}', 400),
        ("chat/completions", '{"messages": [1], "n": 65}', 400),
    ],
    ids=range(9),
)
def test_a_megabyte_is_refused_in_a_moment(server, path, body, status):
    memory = megabytes(server)
    used = cpu_seconds(server)
    answer = server.http.post(f"/v1/{path}", content=body, timeout=30)
    assert answer.status_code == status and answer.json()["error"]["param"] != "model"
    assert server.http.get("/health").status_code == 200
    assert cpu_seconds(server) - used < 15
    assert megabytes(server, "VmHWM") - memory < 50 or memory > 320  # a peak stays in VmHWM


def test_answers_are_counted_before_a_request_is_made(run, monkeypatch):
    made = []

    def counted(*values) -> Request:
        made.append(Request(*values))
        assert len(made) < 100
        return made[-1]

    monkeypatch.setattr(app, "EngineRequest", counted)
    trained = open_trained_model(str(run), device="cpu")
    worker = Worker(Engine(trained.model, 2), trained.tokenizer, 2)
    access = Access(None, "127.0.0.1", True)
    served = app.Served(worker, chat_of(trained), "bytes", app.Limits(1 << 20, 64), access)

    async def ask(bodies: list[str]) -> list[int]:
        transport = httpx.ASGITransport(app.build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return [
                (await http.post("/v1/completions", content=body, headers=JSON)).status_code
                for body in bodies
            ]

    try:
        five = json.dumps({"prompt": ["a"] * 5, "max_tokens": 1})
        assert asyncio.run(ask([MANY, five, '{"prompt": "a", "n": 5}'])) == [413] * 3
        assert not made
        four = json.dumps({"prompt": ["a"] * 2, "n": 2, "max_tokens": 1})
        assert asyncio.run(ask([four])) == [200] and len(made) == 4
    finally:
        worker.close()


class Letters:
    """A tokenizer of letters, as far as a worker needs one."""

    def detokenize(self, ids) -> str:
        return "".join(chr(ord("A") + token) for token in ids)


def answers(worker: Worker, jobs: list[tuple[Request, str]]) -> list[tuple[str, str]]:
    """(text, why it ended) of each request with its stop string; ends the worker."""
    told: list[list[TextChunk]] = [[] for _ in jobs]
    ended = threading.Semaphore(0)

    def emit(chunks: list[TextChunk], chunk: TextChunk) -> None:
        chunks.append(chunk)
        if chunk.finish_reason:
            ended.release()

    try:
        for (request, stop), chunks in zip(jobs, told, strict=True):
            worker.submit([Job(request, [stop] if stop else [], partial(emit, chunks))])
        assert all(ended.acquire(timeout=60) for _ in jobs)
    finally:
        worker.close()
    return [("".join(c.text for c in chunks), chunks[-1].finish_reason) for chunks in told]


def test_answers_with_drafts_are_those_without(monkeypatch):
    def worker(drafts: int) -> Worker:
        flags = dict(mtp_num_layers=2, position_embedding_type="rope", seq_length=64)
        model = tiny_model(torch.float64, scramble=True, max_position_embeddings=64, **flags)
        return Worker(Engine(model, 2, drafts=drafts), Letters(), 8)

    requests = [Request([n, 2, 3], 20, Sampling(temperature=0.7, seed=n)) for n in range(4)]
    without = worker(0)
    plain = answers(without, [(request, "") for request in requests])
    texts = {n: [ord(letter) - ord("A") for letter in text] for n, (text, _) in enumerate(plain)}

    def right(model, sequences, row=0):
        return [[*texts[ids[0]], 0, 0][len(ids) - 3 :][:2] for ids, _ in sequences]

    monkeypatch.setattr(SpeculativeModel, "draft", right)
    stops = ["", plain[1][0][4:6], "", plain[3][0][7]]
    drafting = worker(2)
    drafted = answers(drafting, list(zip(requests, stops, strict=True)))
    for (text, reason), (whole, _), stop in zip(drafted, plain, stops, strict=True):
        cut = whole[: whole.find(stop)] if stop else whole
        assert (text, reason) == (cut, "stop" if stop else "length")
    counts = re.findall(
        r'^megatron_tokens_(\w+)_total{depth="(\d)"} (\d+)$', app._metrics(drafting), re.M
    )
    assert {(name, depth) for name, depth, _ in counts} == {
        (name, depth) for name in ("drafted", "accepted") for depth in "12"
    }
    assert all(int(count) > 10 for *_, count in counts)
    assert "depth" not in app._metrics(without)


def test_connections_without_a_request_keep_nobody_out(server):
    """More than there are descriptors: the oldest give way, with little in the log."""
    held = []
    try:
        for _ in range(330):
            held.append(connect(server))
            held[-1].sendall(b"GET /hea")
        for _ in range(5):
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
            time.sleep(0.2)
    finally:
        for each in held:
            each.close()
    assert server.said.count("\n") < 20


def test_a_request_has_a_deadline_and_an_answer_has_none(server):
    begun = time.monotonic()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(server.url).netloc}\r\n".encode()
    head += b"Content-Type: application/json\r\nContent-Length: 999\r\n"
    slow = {connect(server): head, connect(server): head + b"\r\n{", connect(server): b""}
    for each, data in slow.items():
        each.sendall(data)
        each.settimeout(0.5)
    reader = connect(server, buffer=1 << 17)  # of more than the sockets hold
    body = {"prompt": "a", "max_tokens": 400, "n": 64, "logprobs": 20, "stream": True}
    data = json.dumps(body).encode()
    reader.sendall(head.replace(b"999", b"%d" % len(data)) + b"Connection: close\r\n\r\n" + data)
    ended = []
    while len(ended) < len(slow) and time.monotonic() - begun < DEADLINE + 30:
        for each in slow.keys() - set(ended):
            try:
                each.sendall(b" ")  # a byte now and then is no excuse
                if each.recv(100) == b"":
                    ended.append(each)
            except TimeoutError:
                pass
            except OSError:
                ended.append(each)
    assert len(ended) == len(slow) and time.monotonic() - begun > DEADLINE - 5
    time.sleep(max(0, begun + DEADLINE + 5 - time.monotonic()))
    with reader.makefile("rb") as file:
        answer = file.read()
    assert len(answer) > 6 * MB and b"data: [DONE]" in answer[-200:]


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n",
        b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
        b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\nz",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nz",  # refused before its body
    ],
)
def test_a_body_that_breaks_off_is_no_traceback(server, rest):
    before = len(server.said)
    host = urlsplit(server.url).netloc.encode()
    for _ in range(20):
        with connect(server) as gone:
            gone.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: " + host + b"\r\n" + rest[:-1])
            time.sleep(0.01)
            gone.sendall(rest[-1:])
    time.sleep(0.5)
    assert server.http.get("/health").status_code == 200
    said = server.said[before:]
    assert said.count("\n") <= 20 and "Traceback" not in said


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": None}, 415),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:{port}"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:{port}"}, 200),
        ({"Host": "127.1.2.3:1"}, 200),
        ({"Host": "[::1]:{port}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1.evil.example:{port}"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
    ],
)
def test_pages_of_other_sites_are_refused(server, headers, status):
    port = urlsplit(server.url).port
    given = {name: value and value.format(port=port) for name, value in (JSON | headers).items()}
    given = {name: value for name, value in given.items() if value}
    body = b'{"prompt": "a", "max_tokens": 1}'
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=given, timeout=60)
    assert answer.status_code == status and ("error" in answer.json()) == (status != 200)
    if status == 403:
        assert httpx.get(f"{server.url}/v1/models", headers=given).status_code == 403


def test_with_a_key_a_proxy_may_have_any_name(run):
    """No page of another site knows the key; the Host is then the proxy's business."""
    headers = {"Host": "gpt.example", "Origin": "https://gpt.example"}
    with serving(run) as server:
        body = {"prompt": "a", "max_tokens": 1}
        answer = server.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        headers["Content-Type"] = "text/plain"
        answer = server.http.post("/v1/completions", content=b"{}", headers=headers)
        assert answer.status_code == 415


@pytest.mark.parametrize("flags", [["--api-key", ""], ["--api-key", " "], []])
def test_an_empty_key_is_an_error(run, flags):
    words = [sys.executable, str(ROOT / "tools" / "serve.py"), str(run), *flags]
    env = os.environ | {"MEGATRON_API_KEY": KEY if flags else ""}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    name = "--api-key" if flags else "MEGATRON_API_KEY"
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert name in done.stderr and done.stderr.endswith(" [api-key-empty]\n")
