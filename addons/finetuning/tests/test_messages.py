"""Conversations out of records of three forms, and every bad record with what is said of it."""

import json

import pytest

from megatron.addons.finetuning.messages import UNREAD, conversation_of, tools_of

GOOD = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_three_forms_give_one_conversation():
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    parts = [GOOD[0], {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    for record in (
        GOOD,
        {"messages": GOOD, "id": 3},
        {"conversations": sharegpt},
        {"messages": sharegpt},
        {"messages": parts},
    ):
        assert conversation_of(record) == GOOD
    assert conversation_of({"talk": GOOD, "messages": []}, "talk") == GOOD


def test_other_keys_of_a_message_are_kept_and_a_tool_call_needs_no_content():
    call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    answer = {"role": "tool", "content": "4", "tool_call_id": "1"}
    assert conversation_of([GOOD[0], {**call, "content": None}, answer]) == [GOOD[0], call, answer]
    assert conversation_of([{**GOOD[0], "weight": None}, GOOD[1]]) == GOOD
    for name in ("reasoning_content", "thinking", "reasoning"):
        (thought,) = conversation_of([{**GOOD[1], name: "x"}])
        assert thought == {**GOOD[1], name: "x", "thinking": "x", "reasoning_content": "x"}


def test_tools_are_a_list_or_its_json_text():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for value in (tools, json.dumps(tools)):
        assert tools_of({"messages": GOOD, "tools": value}) == tools
    for record in (GOOD, {}, {"tools": None}, {"tools": ""}):
        assert tools_of(record) is None
    assert tools_of({"tools": []}) == []
    for wrong in ("f", "[", "7", 7, {}, ["f"], "[" * 100_000):
        with pytest.raises(ValueError, match='"tools"'):
            tools_of({"messages": GOOD, "tools": wrong})


@pytest.mark.parametrize("name", [*UNREAD, "date", "parallel_tool_calls"])
def test_a_key_that_the_model_would_have_to_see_is_refused(name):
    variables = {"date", "parallel_tool_calls"}  # that the template reads
    with pytest.raises(ValueError, match=f'has "{name}"'):
        tools_of({"messages": GOOD, name: False}, variables)
    for empty in (None, "", [], {}):
        assert tools_of({"messages": GOOD, name: empty}, variables) is None
    if name not in UNREAD:
        assert tools_of({"messages": GOOD, name: False, "id": 3}) is None


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (3, "JSON"),
        ([], "messages$"),
        ({"messages": []}, "messages$"),
        ({"messages": "q"}, '"messages" is'),
        ({"text": "q"}, 'its keys: "text"'),
        ([GOOD[0], "a"], "message 2 .*JSON"),
        ([{"content": "q"}], 'message 1 .*"role" nor "from"'),
        ([{"role": "bot", "content": "q"}], "message 1 .*'bot'"),
        ([{"role": "gpt", "content": "q"}], "message 1 .*'gpt'"),
        ([{"role": ["user"], "content": "q"}], "message 1 .*user"),
        ([{"from": "bing", "value": "q"}], "message 1 .*'bing'"),
        ([{"from": {}, "value": "q"}], "message 1 .*'{}'"),
        ([GOOD[0], {"role": "assistant"}], "content .*message 2"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content .*message 1"),
        ([GOOD[0], {"role": "assistant", "content": " \n"}], "message 2 .assistant."),
        ([GOOD[0], {**GOOD[1], "weight": 0.5}], '"weight" .*message 2'),
        ([GOOD[0], {**GOOD[1], "weight": []}], '"weight" .*message 2'),
    ],
)
def test_a_bad_record_is_described(record, what):
    with pytest.raises(ValueError, match=what):
        conversation_of(record)
