"""From messages to the prompt that a model answers, and where its answer ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.tokenizers.base import Tokenizer
from megatron.inference.load_model import TrainedModel

from .encode import ChatEncoder, template_for
from .messages import checked
from .templates import template_in_folder

PLAIN_END = "\nUser:"


@dataclass(frozen=True)
class Chat:
    """A tokenizer with a chat template or, without `encoder`, `User: ...` and `Assistant: ...` one
    message after another, where an answer ends as the model begins the user's next message.

    `stop_ids` and `stop`: tokens and strings that end an answer.
    """

    tokenizer: Tokenizer
    encoder: ChatEncoder | None
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]

    def prompt(
        self, messages: Sequence[object], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The ids after which the next answer begins. Raises ValueError saying what is wrong with
        the conversation."""
        chat = checked(messages)
        if self.encoder is not None:
            return self.encoder.prompt(chat, tools)
        if tools or any(each.get("tool_calls") for each in chat):
            raise ValueError("tools need a chat template, and the model has none")
        turns = [f"{each['role'].capitalize()}: {each['content']}\n" for each in chat]
        return [int(token) for token in self.tokenizer.tokenize("".join(turns) + "Assistant:")]


def chat_of(trained: TrainedModel, template: str | None = None) -> Chat:
    """The chat of a model with the template of this name or file, by default with that of its
    tokenizer; plain roles if it has none. Raises ValueError."""
    tokenizer = trained.tokenizer
    flags = trained.config.data
    folder = flags.tokenizer_model if flags.tokenizer_type == "HuggingFaceTokenizer" else None
    eod = () if tokenizer.eod is None else (tokenizer.eod,)
    if template is None and (folder is None or template_in_folder(Path(folder)) is None):
        return Chat(tokenizer, None, eod, (PLAIN_END,))
    encoder = ChatEncoder(tokenizer, template_for(tokenizer, template, folder))
    end = encoder.end_of_turn_id
    if end is None:
        return Chat(tokenizer, encoder, eod, (encoder.end_of_turn,))
    return Chat(tokenizer, encoder, tuple({*eod, end}), ())
