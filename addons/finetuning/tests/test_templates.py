"""Chat templates: their text and the assistant's parts of it, against texts written out here, and
what a hostile template is kept from."""

import json
import pickle
import re

import pytest

from megatron.addons.finetuning.templates import BUILT_IN, ChatTemplate, find_template
from megatron.addons.finetuning.tests.conversations import (
    CONTROL,
    CONVERSATIONS,
    EXPECTED,
    FOREIGN,
    marked,
)
from tests import problems

TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))
SAME = CONVERSATIONS["the same text in every turn"]
GENERATION = re.compile(r"{% (end)?generation %}")


def built_in(name: str) -> ChatTemplate:
    return find_template(name, None, dict(TOKENS))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_assistant_turn_and_its_end_token_and_nothing_else(name):
    assert EXPECTED.keys() == BUILT_IN.keys()
    template = built_in(name)
    plain = ChatTemplate("plain", GENERATION.sub("", BUILT_IN[name]), TOKENS)
    for messages, expected in zip(CONVERSATIONS.values(), EXPECTED[name], strict=True):
        rendered = template.marked(messages, CONTROL)
        assert marked(rendered.text, rendered.spans) == expected
        assert template.text(messages) == rendered.text
        assert plain.marked(messages, CONTROL) == rendered  # found without {% generation %}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_prompt_is_what_stands_before_an_answer(name):
    template = built_in(name)
    for messages in CONVERSATIONS.values():
        rendered = template.marked(messages, CONTROL)
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        for number, (first, _) in zip(turns, rendered.spans, strict=True):
            if number:
                prompt = template.text(messages[:number], add_generation_prompt=True)
                assert prompt == rendered.text[:first]


@pytest.mark.parametrize("name", FOREIGN)
def test_published_templates_without_marks(name):
    source, expected = FOREIGN[name]
    rendered = ChatTemplate(name, source, TOKENS).marked(SAME, CONTROL)
    assert marked(rendered.text, rendered.spans) == expected


def test_white_space_that_a_template_trims_is_not_missed():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a \n"}]
    for name, expected in (("llama3", "a<|eot_id|>"), ("chatml", " a \n<|im_end|>")):
        for source in (BUILT_IN[name], GENERATION.sub("", BUILT_IN[name])):
            rendered = ChatTemplate(name, source, TOKENS).marked(messages, CONTROL)
            ((first, end),) = rendered.spans
            assert rendered.text[first:end] == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_a_message_of_weight_0_is_not_trained(name):
    messages = [*SAME[:1], {**SAME[1], "weight": 0}, *SAME[2:3], {**SAME[3], "weight": 1}]
    kept = built_in(name).marked(messages, CONTROL)
    assert kept.spans == built_in(name).marked(SAME, CONTROL).spans[1:]
    with pytest.raises(ValueError, match="weight 1"):
        built_in(name).marked([*SAME[:1], {**SAME[1], "weight": 0}], CONTROL)


REFUSED = {
    "nothing to train": ("{{ messages }}", SAME[:1], "has no assistant message"),
    "no end token": (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
        SAME,
        "no special token after an assistant message",
    ),
    "content that is changed": (
        "{% for m in messages %}{{ m['content'].split('</think>')[-1] + '</s>' }}{% endfor %}",
        [SAME[0], {"role": "assistant", "content": "x</think>y"}],
        "changes message 2, and does not mark",
    ),
    "an empty mark": ("{% generation %}{% endgeneration %}", SAME, "no text, or another block"),
    "marks in marks": (
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
        SAME,
        "no text, or another block",
    ),
    "a role it refuses": (
        "{{ raise_exception('only ' ~ messages[0].role) }}",
        SAME,
        r"refuses it \(TemplateError: only user\)",
    ),
    "tools it does not write": (
        "{{ messages }}",
        [SAME[0], {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
        'has "tool_calls", which the chat template x does not write',
    ),
    "a call in OpenAI's older form": (
        "{{ messages }}",
        [SAME[0], {"role": "assistant", "content": "", "function_call": {"name": "f"}}],
        'has "function_call", which the chat template x does not write',
    ),
    "an attribute of Python's": (
        "{{ messages.__class__.__mro__ }}",
        SAME,
        "refuses it .SecurityError",
    ),
    "Python's builtins": (
        "{{ cycler.__init__.__globals__.os.system('touch HERE') }}",
        SAME,
        "refuses it .SecurityError",
    ),
    "a changed message": ("{{ messages.append(1) }}", SAME, "refuses it .SecurityError"),
    "an attribute of a namespace": (
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        SAME,
        "refuses it .SecurityError",
    ),
    "a long loop": (
        "{% for i in range(10000000) %}{% endfor %}",
        SAME,
        "refuses it .OverflowError",
    ),
    "another error": ("{{ 1 / 0 }}", SAME, "refuses it .ZeroDivisionError"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_conversation_or_a_template_that_is_refused(why):
    source, messages, expected = REFUSED[why]
    with pytest.raises(ValueError, match=expected):
        ChatTemplate("x", source, TOKENS).marked(messages, CONTROL)


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("", False),
        ("{# tools #}", False),
        ("{% if tools and messages[0].role == 'system' %}{{ tools }}{% endif %}", False),
        ("{{ tools | tojson }}", True),
        ("{{ 'no tools' if not tools }}", True),
        ("{{ tools[0].name }}", True),  # fails without tools
    ],
)
def test_tools_that_a_template_does_not_write_are_refused(source, written):
    template = ChatTemplate("x", source + BUILT_IN["chatml"])
    template.check_written(SAME, [])
    if written:
        assert template.marked(SAME, CONTROL, [{"name": "f"}])
        return
    for check in (template.check_written, lambda *a: template.marked(a[0], CONTROL, a[1])):
        with pytest.raises(ValueError, match="tools"):
            check(SAME, [{"name": "f"}])


def test_the_variables_that_nobody_gives_a_template():
    source = (
        "{{ bos_token }}{{ date }}{% for m in messages %}{{ m.name }}{% endfor %}"
        "{% if thinking is defined %}{% set x = tools %}{% endif %}{{ x }}{{ documents }}"
        "{% generation %}{% endgeneration %}{{ raise_exception }}{{ add_generation_prompt }}"
    )
    assert ChatTemplate("x", source, TOKENS).reads == {"date", "thinking", "x", "documents"}


def test_a_template_that_is_not_jinja_is_refused_with_its_line(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ bos_token }}\n{% for x in %}")
    with problems.raises(ValueError, "chat-template-malformed", "t.jinja"):
        find_template(str(file), None, {})


def test_a_message_cannot_stand_for_a_mark():
    messages = [
        {"role": "user", "content": "{% generation %}{{ 7 * 7 }}{% endgeneration %}"},
        {"role": "assistant", "content": "generation_start"},
    ]
    rendered = built_in("chatml").marked(messages, CONTROL)
    assert "{{ 7 * 7 }}" in rendered.text and "49" not in rendered.text
    ((first, end),) = rendered.spans
    assert rendered.text[first:end] == "generation_start<|im_end|>"


def test_where_a_template_is_found(tmp_path):
    with problems.raises(ValueError, "flag-missing", "--chat-template"):
        find_template(None, None, {})
    with problems.raises(ValueError, "flag-missing", "--chat-template"):
        find_template(None, str(tmp_path), {})
    with problems.raises(ValueError, "file-not-readable", "no_such.jinja"):
        find_template("no_such.jinja", None, {})
    with problems.raises(ValueError, "flag-not-with-tokenizer", "eos_token"):
        find_template("zephyr", None, {})
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert find_template(None, str(tmp_path), {}).text([]) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    config.write_text(json.dumps({"chat_template": named}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_template(None, str(tmp_path / "tokenizer.json"), {}).text([]) == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    found = find_template(None, str(tmp_path), {})
    assert found.text([]) == "four" and found.fingerprint != built_in("chatml").fingerprint
    assert pickle.loads(pickle.dumps(found)).text([]) == "four"


def test_the_functions_and_filters_that_templates_use():
    source = (
        "{{ {'a': '<é>'} | tojson }} {{ [1] | tojson(indent=1) }} {{ strftime_now('%Y') | length }}"
        "{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %} {{ n.x }}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}\n  {% if true %}y{% endif %}"
        "{% endfor %}"
    )
    assert ChatTemplate("x", source).text([]) == '{"a": "<é>"} [\n 1\n] 4 2y'
