"""Conversations out of records: OpenAI's messages and ShareGPT's conversations, checked."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
KEYS = ("messages", "conversations")  # where a record holds its conversation unless a key is given
TOOLS = "tools"
REASONING = ("reasoning_content", "thinking", "reasoning")
# Other keys of chat data that the model would have to see: OpenAI's older tools, LLaMA-Factory's
# system prompt, and what else transformers and TRL give to a template.
UNREAD = ("functions", "system", "documents", "chat_template_kwargs")
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
    holder = next((name for name in ([key] if key else KEYS) if name in record), None)
    if holder is None:
        names = ", ".join(f'"{name[:40]}"' for name in list(record)[:5]) or "none at all"
        expected = f'"{key}"' if key else " or ".join(f'"{name}"' for name in KEYS)
        raise ValueError(f"has no key {expected} (its keys: {names}; choose with --json-keys)")
    if not isinstance(record[holder], list):
        raise ValueError(f'"{holder}" is not a list of messages')
    return checked(record[holder])


def tools_of(record: object, variables: Collection[str] = ()) -> list[dict[str, Any]] | None:
    """The tools of a record, a list of objects or its JSON text; None without. Raises ValueError
    for other tools, and for a key that the model would have to see and that no template gets: of
    `UNREAD`, or one of the `variables` that the template reads."""
    if not isinstance(record, Mapping):
        return None
    for name in (*UNREAD, *variables):
        if record.get(name) not in (None, "", [], {}):
            raise ValueError(
                f'has "{name}", which is not given to the chat template; write it into the '
                'messages or "tools", or remove the key'
            )
    tools = record.get(TOOLS)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (json.JSONDecodeError, RecursionError):
            raise ValueError('has "tools" that are text and not JSON') from None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError('"tools" is not a list of objects')
    return tools


def checked(messages: Sequence[object]) -> list[Message]:
    """The messages with OpenAI's keys, without those that are null: one that only calls tools may
    have no content. Raises ValueError for an empty list, an unknown role, or
    content that is not text."""
    if not messages:
        raise ValueError("has no messages")
    return [_message(number, message) for number, message in enumerate(messages, 1)]


def _message(number: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is not a JSON object")
    if "role" in message:
        role = message["role"]
        result = dict(message)
        roles: Sequence[str] = ROLES
    elif "from" in message:
        role = message["from"]
        roles = tuple(SHAREGPT)
        name = SHAREGPT.get(role, role) if isinstance(role, str) else role
        result = {"role": name, "content": message.get("value")}
        result |= {name: value for name, value in message.items() if name not in ("from", "value")}
    else:
        raise ValueError(f'message {number} has neither "role" nor "from"')
    if role not in roles:
        raise ValueError(
            f"message {number} has the unknown role {str(role)[:40]!r} (known: {', '.join(roles)})"
        )
    result["content"] = _text(number, result)
    # as transformers: null is a missing key, and reasoning has all of its names
    result = {name: value for name, value in result.items() if value is not None}
    reasoning = next((result[name] for name in REASONING if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    if result.get("weight", 1) not in (0, 1):
        raise ValueError(f'"weight" of message {number} is neither 0 nor 1')
    return result


def _text(number: int, message: Message) -> str | None:
    """The content as one string. OpenAI's list of parts is joined; a message that only calls tools
    may have none."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None
    if isinstance(content, list) and all(
        isinstance(item, Mapping) and isinstance(item.get("text"), str) for item in content
    ):
        content = "".join(item["text"] for item in content)
    if not isinstance(content, str):
        raise ValueError(f"the content of message {number} is not text")
    if message["role"] == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise ValueError(f"message {number} (assistant) is empty")
    return content
