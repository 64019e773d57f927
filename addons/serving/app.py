"""The HTTP side of tools/serve.py: OpenAI's endpoints, health, metrics and the chat page, by
FastAPI."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.exceptions import HTTPException as StarletteError
from starlette.requests import ClientDisconnect

from megatron.inference.engine import NewToken
from megatron.inference.engine import Request as EngineRequest
from megatron.inference.sampling import Sampling

from .access import Access, check_content_type
from .answers import Answer, Form
from .schemas import (
    MOST_ANSWERS,
    ApiError,
    ChatBody,
    CompletionBody,
    parse,
    read_json,
)
from .worker import Job, QueueFull, TextChunk, Worker

if TYPE_CHECKING:
    from ..finetuning.chat_prompts import Chat

PAGE = Path(__file__).with_name("chat.html")
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions


@dataclass(frozen=True)
class Limits:
    """What a request may ask for: bytes of its body, new tokens of an answer."""

    body_bytes: int
    new_tokens: int


@dataclass(frozen=True)
class Served:
    """What is served: the model's thread, its chat, the name it goes by; to whom."""

    worker: Worker
    chat: Chat
    name: str
    limits: Limits
    access: Access


def build_app(served: Served) -> FastAPI:
    """The application."""
    app = FastAPI(
        title="megatron serve",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(served.access.check_page)],
    )
    _answer_errors(app)
    _add_state(app, served)
    _add_completions(app, served)
    return app


def _answer_errors(app: FastAPI) -> None:
    """Errors in the form of the API."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(error.body, error.status, headers)

    @app.exception_handler(StarletteError)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(ApiError(error.status_code, text).body, error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it


def _add_state(app: FastAPI, served: Served) -> None:
    """The page, and what is served in which state."""
    started = time.time()

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html")

    @app.get("/health")
    async def health() -> JSONResponse:
        failed = served.worker.failed
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    @app.get("/metrics")
    async def metrics(request: Request) -> PlainTextResponse:
        served.access.check_key(request)
        return PlainTextResponse(_metrics(served.worker), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        served.access.check_key(request)
        model = {
            "id": served.name,
            "object": "model",
            "created": int(started),
            "owned_by": "megatron",
            "max_model_len": served.worker.engine.length,
            "max_tokens_limit": served.limits.new_tokens,
        }
        return {"object": "list", "data": [model]}


def _add_completions(app: FastAPI, served: Served) -> None:
    """The two endpoints that generate."""

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        data = await _body(request, served)
        _check_count(served, data.get("n"), data.get("prompt"))
        body = parse(CompletionBody, data)
        prompts = await asyncio.to_thread(_completion_prompts, body, served)
        return await _answer(request, served, body, prompts)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        data = await _body(request, served)
        _check_count(served, data.get("n"))
        body = parse(ChatBody, data)
        try:
            prompt = await asyncio.to_thread(served.chat.prompt, body.messages, body.tools)
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None
        return await _answer(request, served, body, [prompt])


async def _body(request: Request, served: Served) -> dict[str, Any]:
    """The JSON of a request with the right key and model, read up to the limit."""
    served.access.check_key(request)
    check_content_type(request)
    data = bytearray()
    async for received in request.stream():
        data += received
        if len(data) > served.limits.body_bytes:
            limit = served.limits.body_bytes
            raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    body = read_json(bytes(data))
    model = body.get("model")
    if model is not None and model != served.name:
        text = f"the model {str(model)[:100]!r} does not exist; this server has {served.name!r}"
        raise ApiError(404, text, param="model", code="model_not_found")
    return body


def _check_count(served: Served, n: object, prompt: object = None) -> None:
    """Raises ApiError where a body asks for more answers than the server ever takes at once, before
    anything is made of the prompts: 1 MB holds 250,000. Other values than integers are left to
    `parse`."""
    prompts = 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = len(prompt)
    each = n if isinstance(n, int) and 1 <= n <= MOST_ANSWERS else 1
    most = served.worker.capacity
    if prompts * each > most:
        raise ApiError(
            413,
            f"{prompts} prompts x n = {each}: at most {most} answers at once on this server "
            "(--batch-size and --queue-size)",
            param="prompt" if prompts > 1 else "n",
            code="too_many_answers",
        )


def _completion_prompts(body: CompletionBody, served: Served) -> list[list[int]]:
    """The token ids of each prompt. Raises ApiError."""
    tokenizer = served.chat.tokenizer
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            try:
                prompt = [int(token) for token in tokenizer.tokenize(prompt)]
            except ValueError as error:
                raise ApiError(400, f"prompt: {error}", param="prompt") from None
        if any(not 0 <= token < tokenizer.vocab_size for token in prompt):
            text = f"prompt: token ids must be from 0 to {tokenizer.vocab_size - 1}"
            raise ApiError(400, text, param="prompt")
        if not prompt and tokenizer.eod is not None:
            prompt = [tokenizer.eod]
        if not prompt:
            raise ApiError(400, "prompt: must not be empty", param="prompt")
        prompts.append(prompt)
    if not prompts:
        raise ApiError(400, "prompt: must not be empty", param="prompt")
    return prompts


async def _answer(
    request: Request,
    served: Served,
    body: CompletionBody | ChatBody,
    prompts: list[list[int]],
) -> Any:
    """Queue an answer to each prompt, n times, and give them as JSON or as a stream."""
    requests = _requests(served, body, prompts)
    chat = isinstance(body, ChatBody)
    stop = [*body.stop_strings, *(served.chat.stop if chat else ())]
    chunks: asyncio.Queue[tuple[int, TextChunk]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emitter(number: int) -> Any:
        def emit(chunk: TextChunk) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(chunks.put_nowait, (number, chunk))

        return emit

    jobs = [Job(each, stop, emitter(number)) for number, each in enumerate(requests)]
    try:
        served.worker.submit(jobs)
    except QueueFull:
        raise ApiError(
            429, "too many requests are waiting; try again later", "rate_limit_error", None, "busy"
        ) from None
    except RuntimeError as error:
        raise ApiError(503, str(error), "server_error") from None
    detokenize = served.chat.tokenizer.detokenize
    form = Form(chat, served.name, detokenize, body.alternatives is not None)
    count = sum(map(len, prompts))
    echo = []
    if not chat and body.echo:
        echo = [detokenize(each.prompt) for each in requests]
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        lines = _stream(served.worker, jobs, chunks, form, echo, count if usage else None)
        return StreamingResponse(lines, media_type="text/event-stream")
    answers = [Answer(text) for text in echo] or [Answer() for _ in jobs]
    await _collect(request, served.worker, jobs, chunks, answers)
    # in a thread, as log-probabilities make it long
    return await asyncio.to_thread(lambda: JSONResponse(form.complete(answers, count)))


def _requests(
    served: Served, body: CompletionBody | ChatBody, prompts: list[list[int]]
) -> list[EngineRequest]:
    """One request for each answer; each of the n answers to a prompt has its own seed. A body that
    says no number of new tokens gets at most what the context has left. Raises ApiError."""
    length = served.worker.engine.length
    longest = max(map(len, prompts))
    limit = served.limits.new_tokens
    default = limit if isinstance(body, ChatBody) else COMPLETION_TOKENS
    new_tokens = body.new_tokens or max(1, min(default, limit, length - longest))
    if new_tokens > limit:
        raise ApiError(400, f"max_tokens: at most {limit} on this server", param="max_tokens")
    if longest + new_tokens > length:
        raise ApiError(
            400,
            f"the context is {length} tokens; the prompt has {longest}, and max_tokens is "
            f"{new_tokens}: shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )
    seed = secrets.randbits(62) if body.seed is None else body.seed % 2**63
    sampling = Sampling(
        1.0 if body.temperature is None else body.temperature,
        body.top_p or 1.0,
        seed,
        max(body.top_k or 0, 0),
        body.repetition_penalty or 1.0,
    )
    return [
        EngineRequest(
            prompt,
            new_tokens,
            replace(sampling, seed=(seed + number) % 2**63),
            served.chat.stop_ids,
            body.alternatives,
        )
        for prompt in prompts
        for number in range(body.n or 1)
    ]


async def _collect(
    request: Request,
    worker: Worker,
    jobs: list[Job],
    chunks: asyncio.Queue[tuple[int, TextChunk]],
    answers: list[Answer],
) -> None:
    """Wait until every answer is finished, or its client has gone. Raises ApiError."""
    gone = asyncio.create_task(_disconnected(request))
    try:
        unfinished = len(jobs)
        while unfinished:
            following = asyncio.create_task(chunks.get())
            await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                following.cancel()
                raise ApiError(499, "the client has closed the connection")
            number, chunk = following.result()
            _check_chunk(chunk)
            answers[number].add(chunk)
            unfinished -= chunk.finish_reason is not None
    finally:
        gone.cancel()
        worker.cancel(jobs)


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_chunk(chunk: TextChunk) -> None:
    if chunk.finish_reason == "error":
        raise ApiError(500, "the model failed; see the server's log", "server_error")


async def _stream(
    worker: Worker,
    jobs: list[Job],
    chunks: asyncio.Queue[tuple[int, TextChunk]],
    form: Form,
    echo: list[str],
    prompt_tokens: int | None,
) -> AsyncIterator[str]:
    """Server-sent events; when the client goes away the generator is closed, which frees the
    rows."""
    try:
        for number in range(len(jobs)):
            if form.chat:
                yield _event(form.role(number))
            elif echo:
                yield _event(form.chunk(number, echo[number], [], None))
        held: list[list[NewToken]] = [[] for _ in jobs]
        count = 0
        unfinished = len(jobs)
        while unfinished:
            number, chunk = await chunks.get()
            _check_chunk(chunk)
            if chunk.token is not None:
                held[number].append(chunk.token)
                count += 1
            unfinished -= chunk.finish_reason is not None
            if chunk.text or chunk.finish_reason:
                yield _event(form.chunk(number, chunk.text, held[number], chunk.finish_reason))
                held[number] = []
        if prompt_tokens is not None:
            yield _event(form.last(prompt_tokens, count))
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body)
    finally:
        worker.cancel(jobs)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _metrics(worker: Worker) -> str:
    """Prometheus's text format."""
    counters = worker.counters
    lines = []
    for name, kind, value, text in (
        ("requests_running", "gauge", worker.running, "answers being decoded"),
        ("requests_waiting", "gauge", worker.waiting, "answers in the queue"),
        ("rows", "gauge", worker.engine.rows, "answers that can be decoded together"),
        ("prompt_tokens_total", "counter", counters.prompt_tokens, "tokens of prompts"),
        ("generated_tokens_total", "counter", counters.generated_tokens, "tokens generated"),
        ("requests_finished_total", "counter", counters.finished, "answers finished"),
        ("requests_cancelled_total", "counter", counters.cancelled, "answers given up by clients"),
        ("requests_rejected_total", "counter", counters.rejected, "requests refused with 429"),
        ("steps_total", "counter", counters.steps, "decoding steps"),
    ):
        full = f"megatron_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
    engine = worker.engine
    for name, counts, text in (
        ("drafted", engine.drafted, "drafts of the heads that were compared"),
        ("accepted", engine.accepted, "drafts that were accepted"),
    ):
        full = f"megatron_tokens_{name}_total"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} counter"] if counts else []
        lines += [f'{full}{{depth="{k}"}} {count}' for k, count in enumerate(counts, 1)]
    return "\n".join(lines) + "\n"
