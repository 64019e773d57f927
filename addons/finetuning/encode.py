"""Conversations to token ids and a loss mask, and to the prompt that a model answers."""

import functools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.tokenizers.base import Tokenizer

from .messages import Message
from .templates import ChatTemplate, find_template


def template_for(tokenizer: Tokenizer, name: str | None, folder: str | None) -> ChatTemplate:
    """The template that --chat-template names, or (None) the one in `folder`, the tokenizer's. Its
    variables are this tokenizer's special tokens. Raises ValueError."""
    by_id = {index: text for text, index in tokenizer.control.items()}
    ids = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.pad}
    if ids["eos_token"] is None:
        ids["eos_token"] = tokenizer.eod
    variables = {name: by_id[index] for name, index in ids.items() if index in by_id}
    return find_template(name, folder, variables)


@dataclass(frozen=True)
class ChatEncoder:
    """A tokenizer and the chat template it is used with. `allow_special_tokens`: messages may hold
    the text of special tokens, which then become those tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate
    allow_special_tokens: bool = False

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int64 [n], and whether each is trained, bool [n]: the assistant's turns, each with
        its end token. Raises ValueError saying what is wrong with the conversation."""
        self._check(messages, tools)
        rendered = self.template.marked(messages, self._control, tools)
        ids, trained = self.tokenizer.tokenize_spans(rendered.text, rendered.spans)
        if not trained.any():
            raise ValueError("has no token to train")
        return ids, trained

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The ids after which the assistant's next turn begins. Raises ValueError as `encode`."""
        self._check(messages, tools)
        self.template.check_written(messages, tools)
        text = self.template.text(messages, add_generation_prompt=True, tools=tools)
        return self.tokenizer.tokenize_spans(text, ())[0].tolist()

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant's turn, such as <|im_end|>: generation stops there."""
        probe = secrets.token_hex(16)
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": probe},
        ]
        rendered = self.template.marked(messages, self._control)
        first, end = rendered.spans[-1]
        return rendered.text[first:end].partition(probe)[2].strip()

    @property
    def end_of_turn_id(self) -> int | None:
        """The token that `end_of_turn` is; None if it is several tokens."""
        return self.tokenizer.control.get(self.end_of_turn)

    def text_markers(self) -> list[str]:
        """Markers of the template, such as <|im_end|>, that are no tokens of this tokenizer: they
        are encoded as ordinary text."""
        literals = self.template.literals
        ids = (self.tokenizer.tokenize_spans(text, ())[0] for text in literals)
        return [text for text, encoded in zip(literals, ids, strict=True) if len(encoded) > 1]

    @functools.cached_property
    def _control(self) -> list[str]:
        return [*self.tokenizer.control, *self.template.literals]

    @functools.cached_property
    def _forbidden(self) -> re.Pattern[str] | None:
        if self.allow_special_tokens or not self._control:
            return None
        return re.compile("|".join(map(re.escape, self._control)))

    def _check(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Raise ValueError if a message or a tool holds the text of a special token: who wrote it
        could end the turn and begin another one."""
        if self._forbidden is None:
            return
        named = [(f"message {number}", message) for number, message in enumerate(messages, 1)]
        for name, value in [*named, ("a tool", tools)]:
            for text in _strings(value):
                if match := self._forbidden.search(text):
                    raise ValueError(
                        f"{name} contains the special token {match[0]}; remove it, or encode it as "
                        "that token with --allow-special-tokens"
                    )


def _strings(value: object) -> Iterator[str]:
    """All strings in a JSON value, keys included; it may be nested more deeply than Python
    recurses."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
