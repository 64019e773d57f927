"""tools/preprocess_data.py --chat: documents are conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.arguments import arg

if TYPE_CHECKING:
    from megatron.data.tokenizers.base import Tokenizer

    from .conversations import Conversations

NAME = "chat"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Conversations."""

    chat: bool = arg(False)
    """documents are conversations: lists of messages with role and content (OpenAI), or from and
    value (ShareGPT), under the key messages or conversations; writes token ids with a loss mask for
    --packed-samples, in which only the assistant's turns are trained"""

    chat_template: str | None = arg(None, metavar="NAME")
    """with --chat: chatml, internlm2, llama3, zephyr, or a file with a Jinja template (default: the
    chat template in the directory of --tokenizer-model)"""

    @property
    def name(self) -> str:
        """In the names of the files."""
        return NAME if self.chat else ""

    def problems(self, config: Any, texts: Sequence[str]) -> list[str]:
        """What is wrong with them beside other flags and `texts`, the input files that are
        texts."""
        read = config.read
        if not self.chat:
            if self.chat_template is None:
                return []
            return ["--chat-template: only works with --chat; add it [flag-needs-other-flag]"]
        problems = [
            f"{flag}: has no meaning with --chat, whose template ends each turn itself; remove it "
            "[flags-exclude-each-other]"
            for flag, is_set in (
                ("--append-eod", config.write.append_eod),
                ("--split-sentences", read.split_sentences),
                ("--txt-lines", read.txt_lines),
            )
            if is_set
        ]
        if len(read.json_keys) > 1:
            problems.append(
                f"--json-keys {' '.join(read.json_keys)}: --chat reads one conversation from each "
                "record; give one key [json-keys-malformed]"
            )
        if texts:
            problems.append(
                f"--input {texts[0]}: a text has no messages; give JSON Lines or parquet with "
                "--chat [flags-exclude-each-other]"
            )
        return problems

    def open(self, config: Any, tokenizer: Tokenizer) -> Conversations:
        """What reads them. Raises ValueError."""
        from .conversations import open_conversations

        keys = config.read.json_keys
        return open_conversations(
            config.tokenizer,
            tokenizer,
            self.chat_template,
            None if keys == ("text",) else keys[0],
            config.write.allow_special_tokens,
        )
