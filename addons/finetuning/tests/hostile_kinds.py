"""Damaged and hostile conversations and chat templates, for tests/campaigns/hostile."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.addons.finetuning.templates import BUILT_IN, find_template
from megatron.addons.finetuning.tests.conversations import CONVERSATIONS
from tests.campaigns.hostile.campaign import Kind
from tests.campaigns.hostile.kinds import preprocess


def read_chat_data(folder: Path) -> bytes:
    flags = ("--tokenizer-type", "ByteTokenizer", "--chat", "--chat-template", "zephyr")
    return b"".join(preprocess(folder, *flags))


def make_chat_data(folder: Path) -> None:
    lines = [json.dumps({"messages": one}) for one in CONVERSATIONS.values()]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def make_template(folder: Path) -> None:
    (folder / "t.jinja").write_text(BUILT_IN["llama3"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": BUILT_IN["chatml"]}))


def read_template(folder: Path) -> list[str]:
    messages = next(iter(CONVERSATIONS.values()))
    known = {"bos_token": "<s>", "eos_token": "</s>"}
    return [
        find_template(name, str(folder), known).text(messages)
        for name in (str(folder / "t.jinja"), None)
    ]


KINDS = [
    Kind(
        "chat records",
        make_chat_data,
        read_chat_data,
        ("in.jsonl",),
        needs=("jinja2",),
        stream=True,
    ),
    Kind(
        "chat template",
        make_template,
        read_template,
        ("t.jinja", "tokenizer_config.json"),
        needs=("jinja2",),
    ),
]
