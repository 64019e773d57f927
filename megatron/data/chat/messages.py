"""Conversations out of records: OpenAI's messages and ShareGPT's conversations, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
KEYS = ("messages", "conversations")  # where a record holds its conversation unless a key is given
ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's names of the roles, which stand under "from".
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def conversation_of(record: object, key: str | None = None) -> list[Message]:
    """The messages of a record: a list of messages, or an object that has it under `key` (default:
    the first of `KEYS` that is there). Each has a role of `ROLES` and a content. Raises ValueError
    saying what is wrong."""
    if isinstance(record, list):
        return checked(record)
    if not isinstance(record, Mapping):
        raise ValueError("is not a JSON object with a conversation, nor a list of messages")
    found = next((name for name in ([key] if key else KEYS) if name in record), None)
    if found is None:
        names = ", ".join(f'"{name[:40]}"' for name in list(record)[:5]) or "none at all"
        wanted = f'"{key}"' if key else " or ".join(f'"{name}"' for name in KEYS)
        raise ValueError(f"has no key {wanted} (its keys: {names}; choose with --json-keys)")
    if not isinstance(record[found], list):
        raise ValueError(f'"{found}" is not a list of messages')
    return checked(record[found])


def checked(messages: Sequence[object]) -> list[Message]:
    """The messages with OpenAI's keys. Raises ValueError for an empty list, an unknown role, or
    content that is not text."""
    if not messages:
        raise ValueError("has no messages")
    return [_message(number, message) for number, message in enumerate(messages, 1)]


def _message(number: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is not a JSON object")
    if "role" in message:
        role = message["role"]
        found = {**message, "content": message.get("content")}
        known: Sequence[str] = ROLES
    elif "from" in message:
        role = message["from"]
        known = tuple(SHAREGPT)
        name = SHAREGPT.get(role, role) if isinstance(role, str) else role
        found = {"role": name, "content": message.get("value")}
        found |= {name: value for name, value in message.items() if name not in ("from", "value")}
    else:
        raise ValueError(f'message {number} has neither "role" nor "from"')
    if role not in known:
        raise ValueError(
            f"message {number} has the unknown role {str(role)[:40]!r} (known: {', '.join(known)})"
        )
    found["content"] = _text(number, found)
    if found.get("weight", 1) not in (0, 1):
        raise ValueError(f'"weight" of message {number} is neither 0 nor 1')
    return found


def _text(number: int, message: Message) -> str:
    """The content as one string. OpenAI's list of parts is joined; a message that only calls tools
    has none."""
    content = message["content"]
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"the content of message {number} is not text")
    if message["role"] == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise ValueError(f"message {number} (assistant) is empty")
    return content
