"""Serve a trained model by OpenAI's HTTP API: tools/serve.py CHECKPOINT. Needs the extra `serve`
(pip install '.[serve]').

CHECKPOINT is the directory of --save (its newest checkpoint is served) or an iter_XXXXXXX inside
it, written by any number of ranks. Endpoints: /v1/models, /v1/completions, /v1/chat/completions,
/health, /metrics (Prometheus), and a chat page at /. Requests that arrive together are decoded
together. SIGTERM finishes the requests that are on their way, then exits with 0.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron import launcher, threads
from megatron.arguments import arg
from tools.shared.program import run_program
from tools.shared.trained_model import ModelOptions, SpeculativeOption

LIBRARIES = ("fastapi", "uvicorn")


@dataclass(frozen=True, kw_only=True)
class Options(SpeculativeOption, ModelOptions):
    """The command line."""

    host: str = arg("127.0.0.1")
    """address to listen on; 0.0.0.0: every interface"""

    port: int = arg(8000, minimum=0, maximum=65535)
    """port to listen on; 0: any free port"""

    api_key: str | None = arg(None, metavar="KEY")
    """clients must send this key (default: the environment variable MEGATRON_API_KEY)"""

    served_model_name: str | None = arg(None, metavar="NAME")
    """the model's name in the API (default: that of the run: gpt for
    runs/gpt/checkpoints/iter_0000100)"""

    chat_template: str | None = arg(None, metavar="NAME|FILE")
    """chatml, internlm2, llama3, zephyr or a Jinja file (default: the tokenizer's, or plain roles
    if it has none)"""

    batch_size: int = arg(8, minimum=1)
    """number of answers decoded together"""

    queue_size: int = arg(64, minimum=0)
    """answers that may wait for a place; more are refused with 429"""

    max_model_len: int | None = arg(None, minimum=1)
    """longest prompt and answer in tokens (default: the model's positions)"""

    max_tokens_limit: int = arg(4096, minimum=1)
    """largest max_tokens that a request may ask for"""

    max_body_bytes: int = arg(1 << 20, minimum=1)
    """largest body of a request in bytes"""

    drain_seconds: int = arg(30, minimum=0)
    """after SIGTERM, seconds in which requests on their way may finish"""

    @property
    def key(self) -> str | None:
        """What clients must send."""
        return os.environ.get("MEGATRON_API_KEY") if self.api_key is None else self.api_key

    def problems(self) -> list[str]:
        """Everything that can be found wrong before torch is loaded."""
        problems = super().problems()
        missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
        if missing:
            problems.append(
                f"{' and '.join(missing)} not installed: pip install '.[serve]', or pip install "
                f"{' '.join(LIBRARIES)} "
                "[package-missing]"
            )
        if (key := self.key) is not None and not key.strip():
            name = "MEGATRON_API_KEY" if self.api_key is None else "--api-key"
            problems.append(
                f"{name} {key!r}: the key is empty; set it, or leave it out to serve without a key "
                "[api-key-empty]"
            )
        if launcher.world_size() > 1:
            problems.append(
                f"{launcher.world_size()} processes: the server is one process; start it without "
                "torchrun (a model too large for it: tools/convert_checkpoint.py hf-export, vLLM) "
                "[one-process-only]"
            )
        return problems


def run_name(checkpoint: str) -> str:
    """The name of a run: that of its directory, above an iter_XXXXXXX and a folder that only says
    that it holds checkpoints."""
    path = Path(os.path.realpath(checkpoint))
    if path.name.startswith("iter_"):
        path = path.parent
    if path.name in ("checkpoint", "checkpoints", "ckpt", "ckpts"):
        path = path.parent
    return path.name


def _listen(host: str, port: int, queue: int) -> socket.socket:
    """A socket that accepts connections. Raises ValueError where that is not possible."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(queue)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host {host} --port {port}: cannot listen there ({error}); choose another of these "
            "[port-not-usable]"
        ) from None
    return listener


def run(options: Options) -> None:
    """Load the model and serve until a signal. Raises ValueError where that cannot be done."""
    threads.set_waiting()
    import uvicorn

    from megatron.inference.engine import Engine

    from ..finetuning.chat_prompts import chat_of
    from .access import Access, is_loopback
    from .app import Limits, Served, build_app
    from .connections import (
        QUEUE,
        Connection,
        Connections,
        Server,
        most_connections,
    )
    from .worker import Worker

    listener = _listen(options.host, options.port, QUEUE)
    drafts = options.num_speculative_tokens
    trained = options.open(drafts=drafts)
    chat = chat_of(trained, options.chat_template)
    positions = trained.model.max_positions
    if (options.max_model_len or 0) > positions:
        raise ValueError(
            f"--max-model-len {options.max_model_len}: the model has {positions} positions; use at "
            "most that [value-out-of-range]"
        )
    engine = Engine(trained.model, options.batch_size, options.max_model_len, drafts)
    worker = Worker(engine, trained.tokenizer, options.queue_size)
    address, port = listener.getsockname()[:2]
    name = options.served_model_name or run_name(options.checkpoint)
    served = Served(
        worker,
        chat,
        name,
        Limits(options.max_body_bytes, options.max_tokens_limit),
        Access(options.key, options.host, is_loopback(address)),
    )
    connections = Connections(most_connections(worker.capacity))
    config = uvicorn.Config(
        build_app(served),
        loop="asyncio",
        http=functools.partial(Connection, connections),
        ws="none",
        backlog=max(1, connections.most // 8),
        log_level="warning",
        timeout_graceful_shutdown=options.drain_seconds,
    )
    server = Server(config)
    # uvicorn finishes the requests under way, then repeats the signal for this handler; a signal
    # before it has started ends it as well
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    template = chat.encoder.template.name if chat.encoder else "none (plain roles)"
    print(
        f"serving {name} at http://{address}:{port} ({engine.size}, chat template {template})",
        file=sys.stderr,
        flush=True,
    )
    # what is loaded stays: collecting garbage amid the JSON of a large request need not look at it
    gc.freeze()
    server.run(sockets=[listener])
    worker.close()


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 ended by SIGTERM, 1 it could not be done, 2 a wrong command line, 130
    Ctrl-C."""
    return run_program(
        Options, run, argv, prog="serve.py", description=__doc__ or "", check=Options.problems
    )
