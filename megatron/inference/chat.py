"""From messages to the prompt that a model answers, and where its answer ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.data.tokenizers.base import Tokenizer

Message = Mapping[str, str]


@dataclass(frozen=True)
class PlainChat:
    """`User: ...` and `Assistant: ...`, one message after another, for models without a chat
    template. An answer ends where the model begins the user's next message."""

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ("\nUser:",)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return () if self.tokenizer.eod is None else (self.tokenizer.eod,)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids after which the next answer begins."""
        turns = [f"{each['role'].capitalize()}: {each['content']}\n" for each in messages]
        return [int(token) for token in self.tokenizer.tokenize("".join(turns) + "Assistant:")]
