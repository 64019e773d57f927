"""tools/serve.py as a process: OpenAI's own client and plain HTTP against it, errors, clients that
go away, a full queue, many clients, SIGTERM."""

from __future__ import annotations

import json
import math
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.inference.engine import Engine, Request
from megatron.inference.load_model import open_trained_model
from megatron.inference.sampling import Sampling
from tests.forkrun import ROOT
from tests.load_tool import exit_code
from tests.problems import assert_problem

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
from megatron.addons.serving.program import main, run_name  # noqa: E402
from megatron.addons.serving.tests.server import KEY, serving, trained_run  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.campaign]
GREEDY = Sampling(temperature=0.0)
LONG = 400


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(run):
    with serving(run, "--batch-size", "4", "--max-tokens-limit", str(LONG)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def trained(run):
    return open_trained_model(str(run), device="cpu")


@pytest.fixture(scope="module")
def engine(trained) -> Engine:
    return Engine(trained.model, 1)


def tokens_of(engine: Engine, prompt: str, new: int, sampling: Sampling = GREEDY) -> list[int]:
    request = Request(list(prompt.encode()), new, sampling, (256,))
    return [token.id for _, _, token in engine.run([request]) if token]


@pytest.fixture(scope="module")
def offline(engine, trained):
    """The text of a prompt as the engine gives it, here."""

    def text(prompt: str, new: int, sampling: Sampling = GREEDY) -> str:
        return trained.tokenizer.detokenize(tokens_of(engine, prompt, new, sampling))

    return text


@pytest.fixture(scope="module")
def endless(engine):
    """The body of a request whose answer has `LONG` tokens: a sampled one may end at any token."""
    prompt = next(p for p in string.ascii_lowercase if len(tokens_of(engine, p, LONG)) == LONG)
    return {"prompt": prompt, "max_tokens": LONG, "temperature": 0}


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.05)


def test_models_health_and_page(server, client):
    (model,) = client.models.list().data
    assert model.id == "bytes"
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    page = httpx.get(server.url)
    assert "text/html" in page.headers["content-type"] and "v1/chat/completions" in page.text
    assert server.metrics()["rows"] == 4


@pytest.mark.parametrize(
    "path", ["gpt", "gpt/iter_0000100", "gpt/checkpoints", "gpt/ckpt/iter_0000100"]
)
def test_the_name_is_that_of_the_run(path):
    assert run_name(f"runs/{path}") == "gpt"


def test_without_max_tokens_an_answer_gets_what_the_context_has_left(server, endless):
    chat = [{"role": "user", "content": "a" * 490}]
    for path, body, left in (
        ("completions", {"prompt": endless["prompt"] * 508}, 4),
        ("completions", {"prompt": "a" * 100}, 16),
        ("chat/completions", {"messages": chat}, 512 - 490 - len("User: \nAssistant:")),
    ):
        answer = server.post(path, **body, temperature=0).json()
        assert 0 < answer["usage"]["completion_tokens"] <= left
        reason = answer["choices"][0]["finish_reason"]
        assert reason == "stop" or answer["usage"]["completion_tokens"] == left


def test_completions_are_those_of_the_engine(client, offline):
    for prompt in ("hello", "a", "to be or not to be " * 9):
        found = client.completions.create(
            model="bytes", prompt=prompt, max_tokens=20, temperature=0
        )
        assert found.choices[0].text == offline(prompt, 20)
        assert found.usage.prompt_tokens == len(prompt)
    sampled = client.completions.create(model="bytes", prompt="x", max_tokens=9, seed=5)
    assert sampled.choices[0].text == offline("x", 9, Sampling(seed=5))


def test_several_prompts_and_answers(client, offline):
    found = client.completions.create(
        model="bytes", prompt=["one", "two"], n=3, max_tokens=6, seed=7, echo=True
    )
    assert [choice.index for choice in found.choices] == list(range(6))
    texts = [p + offline(p, 6, Sampling(seed=7 + i)) for p in ("one", "two") for i in range(3)]
    assert [choice.text for choice in found.choices] == texts
    by_ids = client.completions.create(
        model="bytes", prompt=[[111, 110, 101], [116]], max_tokens=4, temperature=0
    )
    assert by_ids.choices[0].text == offline("one", 4)


def test_log_probabilities_of_completions(client):
    found = client.completions.create(
        model="bytes", prompt="abc", max_tokens=5, temperature=0, logprobs=3
    ).choices[0]
    values = found.logprobs
    assert len(values.tokens) == len(values.token_logprobs) == len(values.text_offset) == 5
    for token, value, top in zip(
        values.tokens, values.token_logprobs, values.top_logprobs, strict=True
    ):
        assert value == pytest.approx(max(top.values())) and len(top) <= 3 and value < 0
        assert token in top


def test_a_stop_string_ends_the_answer(client):
    whole = client.completions.create(model="bytes", prompt="abc", max_tokens=30, seed=3)
    text = whole.choices[0].text
    stop = text[10:12]
    found = client.completions.create(
        model="bytes", prompt="abc", max_tokens=30, seed=3, stop=["\x00\x00\x00", stop]
    ).choices[0]
    assert found.text == text[: text.index(stop)] and found.finish_reason == "stop"


MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def test_chat_streamed_and_whole(client, server):
    options = dict(model="bytes", messages=MESSAGES, max_tokens=30, seed=11, n=2)
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].logprobs.content) <= 30
    first = whole.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 2 and first.logprob <= 0 and first.bytes
    texts: dict[int, str] = {}
    reasons = {}
    usage = None
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
    assert usage == whole.usage


def test_a_stream_comes_token_by_token(server, endless, offline):
    received = ""
    moments = []
    with server.http.stream("POST", "/v1/completions", json={**endless, "stream": True}) as answer:
        assert "text/event-stream" in answer.headers["content-type"]
        for part in answer.iter_text():
            received += part
            moments.append(time.monotonic())
    *lines, done = [line for line in received.splitlines() if line]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert done == "data: [DONE]" and "".join(texts) == offline(endless["prompt"], LONG)
    assert len(texts) > 20 and moments[-1] - moments[0] > 0.02


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": 5}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, 999]}, "prompt"),
        ("completions", {"prompt": [1, -1]}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 401}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": "9"}, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
        ("completions", {"prompt": "a", "n": 100000}, "n"),
        ("completions", {"prompt": "a", "stop": ["x"] * 1000}, None),
        ("completions", {"prompt": "a", "frequency_penalty": 1}, None),
        ("completions", {"prompt": "a" * 600, "max_tokens": 1}, None),
        ("completions", {"prompt": "a", "suffix": "b"}, None),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "hi"}, "messages"),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        ("chat/completions", {"messages": [7]}, "messages"),
    ],
)
def test_a_wrong_field_is_named(server, path, body, param):
    answer = server.post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"] and error["param"] == param


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b'{"prompt": "' + b"a" * 2_000_000 + b'"}', 413),
        (json.dumps({"prompt": "\ud800"}).encode(), None),
        (b'{"prompt": "{{ 7 * 7 }}", "max_tokens": 1}', 200),
    ],
    ids=range(10),
)
def test_hostile_bodies(server, content, status):
    answer = server.http.post("/v1/completions", content=content)
    assert answer.status_code == status or (status is None and answer.status_code in (200, 400))
    assert status == 200 or "error" in answer.json() or status is None
    assert server.http.get("/health").status_code == 200


def test_errors_of_openais_client(server, client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bytes", prompt="a" * 500, max_tokens=100)
    assert caught.value.code == "context_length_exceeded"
    for key in ("sk-wrong", f"{KEY}x"):
        answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 401
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x").models.list()
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert server.http.get("/v1/nothing").json()["error"]["message"]
    assert server.http.get("/v1/completions").status_code == 405


def test_a_client_that_goes_away_frees_its_place(server, endless):
    body = {**endless, "n": 4}

    def cancelled() -> float:
        return server.metrics()["requests_cancelled_total"]

    before = cancelled()
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    wait_for(lambda: cancelled() > before)
    wait_for(lambda: server.metrics()["requests_running"] == 0)
    before = cancelled()
    with pytest.raises(httpx.ReadTimeout):  # not streamed
        server.http.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.05))
    wait_for(lambda: cancelled() > before)
    wait_for(lambda: server.metrics()["requests_running"] == 0)


def test_beyond_the_queue_requests_are_refused_and_the_others_answered(run, offline):
    with serving(run, "--batch-size", "2", "--queue-size", "2") as server:
        right = offline("abc", 200)

        def ask(_) -> int:
            answer = server.post("completions", prompt="abc", max_tokens=200, temperature=0)
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == right
            else:
                assert answer.json()["error"]["code"] == "busy" and answer.headers["retry-after"]
            return answer.status_code

        with ThreadPoolExecutor(12) as pool:
            codes = Counter(pool.map(ask, range(24)))
        assert set(codes) == {200, 429} and codes[200] >= 4
        assert server.metrics()["requests_rejected_total"] == codes[429]
        assert server.post("completions", prompt="a", n=5).status_code == 413
        assert server.post("completions", prompt="a", n=4, max_tokens=2).status_code == 200


def test_sigterm_finishes_what_is_on_its_way(run, offline):
    with serving(run) as server:
        body = {"prompt": "abc", "max_tokens": 450, "temperature": 0, "stream": True}
        text = ""
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            text += json.loads(next(lines)[6:])["choices"][0]["text"]
            codes = []
            stopper = threading.Thread(target=lambda: codes.append(server.stop()))
            stopper.start()
            for line in lines:
                if line != "data: [DONE]":
                    text += json.loads(line[6:])["choices"][0]["text"]
        stopper.join()
        assert line == "data: [DONE]" and text == offline("abc", 450)
        assert codes == [0] and "Traceback" not in server.said


def memory_of(process: int) -> int:
    """Resident bytes."""
    pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * 4096


def test_it_listens_and_can_be_stopped_before_it_says_where(run, monkeypatch):
    """What the line on stderr says is true when it is printed, of a signal too."""
    import uvicorn

    seen = []

    def started(server, sockets):
        address = sockets[0].getsockname()
        socket.create_connection(address, timeout=5).close()
        signal.raise_signal(signal.SIGTERM)
        seen.append(server.should_exit)

    monkeypatch.setattr(uvicorn.Server, "run", started)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main([str(run), "--port", "0", "--device", "cpu"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [True]


def test_64_clients_at_once_get_right_answers(run, offline):
    """Every answer is that of the prompt alone; nothing is lost, memory stays."""
    prompts = [f"{i} times {i % 7}" for i in range(16)]
    right = {prompt: offline(prompt, 24) for prompt in prompts}
    with serving(run, "--batch-size", "32", "--queue-size", "64") as server:

        def ask(number: int) -> float:
            prompt = prompts[number % len(prompts)]
            start = time.monotonic()
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
            with httpx.Client(base_url=server.url, headers=server.http.headers) as http:
                answer = http.post("/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == right[prompt]
            return time.monotonic() - start

        alone = sum(ask(number) for number in range(8)) / 8
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(ask, range(64)))
            before = memory_of(server.process.pid)
            start = time.monotonic()
            list(pool.map(ask, range(128)))
            each = (time.monotonic() - start) / 128
        assert memory_of(server.process.pid) - before < 30 << 20
        assert each < alone and not math.isnan(each)
        metrics = server.metrics()
        assert metrics["requests_finished_total"] == 8 + 64 + 128
        assert metrics["requests_running"] == metrics["requests_waiting"] == 0


def test_without_fastapi_there_is_one_error(run):
    code = "import runpy, sys; sys.modules['fastapi'] = sys.modules['torch'] = None; "
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-c", code, str(ROOT / "tools" / "serve.py"), str(run)]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1
    assert lines[0].startswith("error: fastapi ") and "pip install" in lines[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--queue-size", "-1"], "--queue-size -1"),
    ],
)
def test_wrong_flags(run, capfd, flags, said):
    assert exit_code(main, run, *flags) == 2 and said in capfd.readouterr().err


def test_more_positions_than_the_model_has_are_refused(run, capfd):
    assert exit_code(main, run, "--max-model-len", 513, "--port", 0) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert_problem(line, "value-out-of-range", "--max-model-len 513", 512)


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(run, server, capfd):
    port = server.url.rpartition(":")[2]
    assert exit_code(main, run, "--port", port) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert f"--port {port}" in line
