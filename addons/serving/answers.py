"""The JSON of answers as OpenAI's API has it: completions, chat completions, the chunks of their
streams, log-probabilities, usage."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.inference.engine import NewToken

from .worker import TextChunk

Detokenize = Callable[[list[int]], str]


@dataclass
class Answer:
    """One choice as far as it has come."""

    text: str = ""
    tokens: list[NewToken] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, chunk: TextChunk) -> None:
        """Take what one step brought."""
        self.text += chunk.text
        if chunk.token is not None:
            self.tokens.append(chunk.token)
        self.finish_reason = chunk.finish_reason


@dataclass(frozen=True)
class Form:
    """How the answers to one request are written; `chat` says for which endpoint."""

    chat: bool
    model: str
    detokenize: Detokenize
    logprobs: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, answers: list[Answer], prompt_tokens: int) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choices = [
            self._choice(number, answer.text, answer.tokens, answer.finish_reason, False)
            for number, answer in enumerate(answers)
        ]
        count = sum(len(answer.tokens) for answer in answers)
        return {**self._head(False), "choices": choices, "usage": usage(prompt_tokens, count)}

    def role(self, number: int) -> dict[str, Any]:
        """The first chunk of a streamed chat message."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head(True), "choices": [choice]}

    def chunk(
        self, number: int, text: str, tokens: list[NewToken], finish_reason: str | None
    ) -> dict[str, Any]:
        """A chunk of a stream: the text of one or more tokens."""
        choice = self._choice(number, text, tokens, finish_reason, True)
        return {**self._head(True), "choices": [choice]}

    def last(self, prompt_tokens: int, count: int) -> dict[str, Any]:
        """The chunk with the usage, after all others."""
        return {**self._head(True), "choices": [], "usage": usage(prompt_tokens, count)}

    def _head(self, streamed: bool) -> dict[str, Any]:
        if self.chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        else:
            kind = "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _choice(
        self, number: int, text: str, tokens: list[NewToken], reason: str | None, streamed: bool
    ) -> dict[str, Any]:
        end = {"index": number, "logprobs": self._logprobs(tokens), "finish_reason": reason}
        if not self.chat:
            return {"text": text, **end}
        if streamed:
            return {"delta": {"content": text} if text else {}, **end}
        return {"message": {"role": "assistant", "content": text, "refusal": None}, **end}

    def _logprobs(self, tokens: list[NewToken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(token) for token in tokens]}
        texts = [self.detokenize([token.id]) for token in tokens]
        offsets = [0, *itertools.accumulate(map(len, texts))][: len(texts)]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                # of tokens with the same text (parts of a character) the most likely one
                {
                    self.detokenize([alternative]): value
                    for alternative, value in reversed(token.alternatives)
                }
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _chat_logprob(self, token: NewToken) -> dict[str, Any]:
        return {
            **self._named(token.id, token.logprob),
            "top_logprobs": [self._named(*alternative) for alternative in token.alternatives],
        }

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.detokenize([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens read and generated."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
