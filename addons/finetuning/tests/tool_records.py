"""Records with tools in OpenAI's form, and chat templates that write them in the ways that published
ones do."""

import itertools
import json
from typing import Any


def _tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, **more, "parameters": parameters}}


WEATHER = _tool("weather", {"city": {"type": "string"}}, description="The <b>weather</b> & 'wind'")
SEARCH = _tool(
    "search",
    {
        "query": {"type": "string", "description": 'Was "man" sucht: é 深度 🙂'},
        "filter": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["a", None], "default": None},
                "most": {"minimum": 1.5},
            },
        },
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    description="Search\nin two lines",
    strict=True,
)
NOW = _tool("now", {})
TOOLS = {
    "one": [WEATHER],
    "nested": [SEARCH],
    "without parameters": [NOW],
    "three": [NOW, SEARCH, WEATHER],
    "as JSON text": json.dumps([SEARCH, WEATHER]),
}


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": f"{name:x<9}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _says(content: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": [*calls]} if calls else {})


ASK = {"role": "user", "content": "What is it like in Köln?"}
SYSTEM = {"role": "system", "content": "Be kind."}
CALL = _says(None, _call("weather", {"city": "Köln <&>", "deep": [1, {"a": None}]}))
RESULT = {"role": "tool", "tool_call_id": "weatherxx", "content": '{"sun": true}'}
CHATS = {
    "no call": [ASK, _says("Like always.")],
    "a system prompt": [SYSTEM, ASK, _says("Like always.")],
    "ends with a call": [ASK, CALL],
    "a call and its result": [ASK, CALL, RESULT, _says("Sunny.")],
    "text and a call": [SYSTEM, ASK, _says("I look.", _call("now", {})), RESULT, _says("Noon.")],
    "two calls": [
        ASK,
        _says("", _call("now", {}), _call("weather", {"city": "Bonn"})),
        RESULT,
        {**RESULT, "tool_call_id": "2"},
        _says("Both."),
    ],
    "arguments as text": [
        ASK,
        _says(None, _call("weather", '{"city": "Bonn"}')),
        RESULT,
        _says("x"),
    ],
    "two turns": [ASK, _says("a"), ASK, CALL, RESULT, _says("b")],
    "a call in each turn": [ASK, CALL, RESULT, _says("a"), ASK, CALL, RESULT, _says("b")],
    "the assistant begins": [_says("Yes?"), ASK, CALL, RESULT, _says("a")],
    "the user ends": [SYSTEM, ASK, CALL, RESULT, _says("b"), ASK],
    "reasoning": [ASK, _says("a") | {"thinking": "Hm."}, SYSTEM, ASK, _says("  b \n")],
}
RECORDS = [
    {"messages": messages, "tools": tools, "parallel_tool_calls": False, "id": number}
    for number, (tools, messages) in enumerate(itertools.product(TOOLS.values(), CHATS.values()))
]
_CALLS = (
    "{% for call in message.tool_calls %}\n<call>{{ {'name': call.function.name, "
    "'arguments': call.function.arguments} | tojson }}</call>{% endfor %}"
)
_TURNS = (
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}"
    "{% if message.tool_calls %}" + _CALLS + "{% endif %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}"
)
TEMPLATES = {
    "in the system prompt": (
        "{% if tools %}<|im_start|>system\n"
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}<tools>"
        "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
        "{% for message in messages %}{% if not (loop.first and tools and "
        "message.role == 'system') %}" + _TURNS + "{% endif %}{% endfor %}"
    ),
    "in the first question": (
        "{%- set ns = namespace(told=tools is none) -%}{{ bos_token }}"
        "{%- for message in messages %}"
        "{%- if message.role == 'user' and not ns.told %}{% set ns.told = true %}"
        "<|im_start|>user\nTools:{% for t in tools %}\n{{ t.function | tojson(indent=4) }}"
        "{% endfor %}\n\n{{ message.content | trim }}<|im_end|>\n"
        "{%- else %}" + _TURNS + "{% endif %}{% endfor %}"
    ),
    "before the last question": (
        "{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}"
        "{%- for message in messages %}{% if tools and message is sameas asked[-1] %}"
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{%- if message.content is not defined %}<|im_start|>call\n"
        "{% generation %}{{ message.tool_calls[0].id }}" + _CALLS + "<|im_end|>{% endgeneration %}"
        "{%- else %}" + _TURNS + "{% endif %}{% endfor %}"
    ),
    "as types": (
        "{%- macro kind(p) %}{% if p.type == 'object' or p.properties %}{ {% for name, inner in "
        "(p.properties or {}) | items %}{{ name }}: {{ kind(inner) }}, {% endfor %} }"
        "{% elif p.type == 'array' %}{{ kind(p['items']) }}[]"
        "{% elif p.enum %}{{ p.enum | map('tojson') | join(' | ') }}"
        "{% else %}{{ p.type or 'any' }}{% endif %}{% endmacro -%}"
        "{% if tools %}namespace functions {{ '{' }}{% for tool in tools %}\n"
        "// {{ tool.function.description | default('') }}\ntype {{ tool.function.name }} = "
        "(_: {{ kind(tool.function.parameters) }}) => any;{% endfor %} }<|im_end|>{% endif %}"
        "{% for message in messages %}" + _TURNS + "{% endfor %}"
    ),
}
