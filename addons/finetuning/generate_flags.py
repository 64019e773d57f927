"""tools/generate.py --chat: a chat in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.arguments import arg

if TYPE_CHECKING:
    from megatron.inference.load_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Flags:
    """A chat."""

    chat: bool = arg(False)
    """chat in the terminal: answer line after line of stdin"""

    chat_template: str | None = arg(None, metavar="NAME|FILE")
    """with --chat: chatml, internlm2, llama3, zephyr or a Jinja file (default: the tokenizer's, or
    plain roles if it has none)"""


def problems(options: Any) -> list[str]:
    """What else says what to do."""
    names = {"PROMPT": "prompts", "--prompt-file": "prompt_file", "--json": "json"}
    return [
        f"{name} and --chat: give one of them [flags-exclude-each-other]"
        for name, field in names.items()
        if options.chat and getattr(options, field)
    ]


def run(
    options: Any,
    trained: TrainedModel,
    show: Callable[..., None],
    note: Callable[[str], None],
) -> bool:
    """Answer line after line of stdin (rank 0's) until it ends, if --chat asks for it."""
    if not options.chat:
        return False
    from megatron.inference.engine import Engine, Request
    from megatron.inference.generate import stream
    from megatron.parallel.collectives import gather_objects

    from .chat_prompts import chat_of

    engine = Engine(trained.model, 1, drafts=options.num_speculative_tokens)
    note(engine.size)
    encoder = chat_of(trained, options.chat_template)
    messages: list[dict[str, str]] = []
    tp = trained.model.ctx.tp
    while True:
        line = _ask() if tp.rank == 0 else None
        line = gather_objects(line, tp)[0]
        if line is None:
            if engine.drafted:
                note(engine.acceptance)
            return True
        messages.append({"role": "user", "content": line})
        prompt = encoder.prompt(messages)
        request = Request(prompt, options.max_new_tokens, options.sampling, encoder.stop_ids)
        stop = (*options.stop, *encoder.stop)
        answer = ""
        for _, chunk, _ in stream(engine, [request], trained.tokenizer.detokenize, stop):
            chunk = chunk if answer else chunk.lstrip()
            answer += chunk
            show(chunk, end="", flush=True)
        show(flush=True)
        messages.append({"role": "assistant", "content": answer.strip()})


def _ask() -> str | None:
    """The next line of the user that is not empty, None at the end of stdin."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return None
        if line.strip():
            return line.strip()
