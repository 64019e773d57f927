"""Conversations of records to token ids with a loss mask: tools/preprocess_data.py --chat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.config.tokenizer import TokenizerConfig
from megatron.data.preprocess.trial import try_first
from megatron.data.tokenizers.base import Tokenizer

from .encode import ChatEncoder, template_for
from .loss_mask import count_trained, mark
from .messages import TOOLS, UNREAD, Message, conversation_of, tools_of
from .templates import ChatTemplate

Conversation = tuple[list[Message], list[dict[str, Any]] | None]  # its messages and tools


@dataclass(frozen=True)
class Conversations:
    """Those of records under `key` (default: the first of `messages.KEYS` that is there), written
    by the template. See `megatron.data.preprocess.encode.Conversations`."""

    template: ChatTemplate
    key: str | None
    allow_special_tokens: bool

    @property
    def identity(self) -> Sequence[str | None]:
        """The template's source, and the key."""
        return self.template.fingerprint, self.key

    @property
    def columns(self) -> tuple[Sequence[str], Sequence[str]]:
        """Of parquet."""
        return (self.key or "messages",), (TOOLS, *UNREAD, *sorted(self.template.reads))

    def document(self, record: object, is_row: bool) -> Conversation:
        """Its messages and tools. Raises ValueError."""
        tools = record.get(TOOLS) if is_row and isinstance(record, Mapping) else None
        if tools and not isinstance(tools, str):
            raise ValueError(
                'has "tools" in columns of parquet, which add null for the keys of other tools; '
                "store the list as JSON text"
            )
        return conversation_of(record, self.key), tools_of(record, self.template.reads)

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Conversation], tuple[np.ndarray, int]]:
        """Ids with the loss mask, and the UTF-8 bytes of the messages."""
        encoder = ChatEncoder(tokenizer, self.template, self.allow_special_tokens)

        def encode(conversation: Conversation) -> tuple[np.ndarray, int]:
            messages, tools = conversation
            ids, trained = encoder.encode(messages, tools)
            size = sum(len(message.get("content", "").encode()) for message in messages)
            return mark(ids, trained), size

        return encode

    def described(self, paths: Sequence[str], dtype: np.dtype) -> dict[str, Any]:
        """How many tokens are trained, and the template."""
        template = {"name": self.template.name, "sha256": self.template.fingerprint}
        trained = sum(count_trained(path, dtype) for path in paths)
        return {"trained_tokens": trained, "chat_template": template}


def open_conversations(
    kind: TokenizerConfig,
    tokenizer: Tokenizer,
    name: str | None,
    key: str | None,
    allow_special_tokens: bool,
) -> Conversations:
    """With the template that --chat-template names, whose markers are looked up in the
    vocabulary. Raises ValueError."""
    folder = kind.tokenizer_model if kind.tokenizer == "HuggingFaceTokenizer" else None

    def build() -> tuple[ChatTemplate, list[str]]:
        encoder = ChatEncoder(tokenizer, template_for(tokenizer, name, folder))
        encoder.end_of_turn  # noqa: B018 (raises if the template marks no turn)
        return encoder.template, encoder.text_markers()

    try_first(build, f"--chat-template {name}" if name else f"the chat template in {folder}")
    template, markers = build()
    if markers:
        print(
            f"note: {', '.join(markers)} of the template {template.name} are not tokens of this "
            f"{kind.tokenizer}; they are encoded as several tokens of ordinary text",
            file=sys.stderr,
        )
    return Conversations(template, key, allow_special_tokens)
