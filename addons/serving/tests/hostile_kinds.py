"""Damaged and hostile bodies of HTTP requests, for tests/campaigns/hostile. Judges nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.addons.finetuning.tests.conversations import CONVERSATIONS
from tests.campaigns.hostile.campaign import Kind, Refused


def make_bodies(folder: Path) -> None:
    more = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["x", "y"], "seed": 3}
    completion = {"model": None, "prompt": ["a", "b"], "logprobs": 2, **more}
    chat = {"messages": next(iter(CONVERSATIONS.values())), "top_k": 5, "n": 2, **more}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    (folder / "completion").write_text(json.dumps(completion))
    (folder / "chat").write_text(json.dumps({**chat, "tools": tools, "stream": True}))


def read_bodies(folder: Path) -> Any:
    from megatron.addons.finetuning.chat_prompts import Chat
    from megatron.addons.finetuning.encode import ChatEncoder
    from megatron.addons.finetuning.templates import BUILT_IN, ChatTemplate
    from megatron.addons.serving import schemas
    from megatron.data.tokenizers.build import build_tokenizer

    tokenizer = build_tokenizer("ByteTokenizer")
    template = ChatTemplate("x", "{{ tools | tojson }}" + BUILT_IN["chatml"])
    encoder = ChatEncoder(tokenizer, template)
    try:
        completion, chat = (
            schemas.parse(kind, schemas.read_json((folder / name).read_bytes()))
            for kind, name in ((schemas.CompletionBody, "completion"), (schemas.ChatBody, "chat"))
        )
        prompts = completion.prompts, completion.stop_strings, completion.alternatives
        ids = [
            Chat(tokenizer, encoder, (), ()).prompt(chat.messages, chat.tools),
            Chat(tokenizer, None, (), ()).prompt(chat.messages),
        ]
    except schemas.ApiError as error:
        raise Refused(
            json.dumps(error.body, ensure_ascii=False).encode()
        ) from None  # as it is sent
    return prompts, ids, chat.alternatives, chat.stop_strings


KINDS = [
    Kind(
        "HTTP body",
        make_bodies,
        read_bodies,
        ("completion", "chat"),
        needs=("pydantic", "jinja2"),
        message=True,
        cost=2,
    ),
]
