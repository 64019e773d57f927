"""Chat templates against transformers: the text, the ids and the mask of the assistant's tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.finetuning.encode import ChatEncoder, template_for
from megatron.addons.finetuning.loss_mask import is_trained, tokens_of
from megatron.addons.finetuning.messages import conversation_of, tools_of
from megatron.addons.finetuning.templates import BUILT_IN, ChatTemplate
from megatron.addons.finetuning.tests import tool_records
from megatron.addons.finetuning.tests.conversations import CONTROL, CONVERSATIONS, FOREIGN
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizers.build import build_tokenizer
from tests.load_tool import exit_code, load_tool

pytestmark = pytest.mark.peers
HARD = {
    "content that begins and ends with white space": [
        {"role": "user", "content": "\n\n x \n"},
        {"role": "assistant", "content": "\n\n\n x \n\n"},
        {"role": "user", "content": " "},
        {"role": "assistant", "content": "🙂👩‍👩‍👧‍👦e\u0301深度"},
    ],
    "content like the template's": [
        {"role": "system", "content": "assistant\n{{ messages }} {% generation %} <|im_end"},
        {"role": "user", "content": "im_end|>\n|assistant|"},
        {"role": "assistant", "content": "user\nassistant\n</ s> <| im_end |>"},
    ],
}
# A template as transformers' own training guide has them, with more than one block and a loop.
GUIDE = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\n' }}\n"
    "        {%- generation %}\n"
    "            {%- for word in message.content.split(' ') %}\n"
    "                {{- word + ('' if loop.last else ' ') }}\n"
    "            {%- endfor %}\n"
    "            {{- '<|im_end|>' }}\n"
    "        {%- endgeneration %}\n"
    "        {{- '\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face tokenizer trained on a little text, with the special tokens of all
    templates."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "text.jsonl").write_text(
        "".join(
            json.dumps({"text": message["content"]}) + "\n"
            for messages in [*CONVERSATIONS.values(), *HARD.values()] * 3
            for message in messages
        )
    )
    words = ["--input", path / "text.jsonl", "--vocab-size", 400, "--format", "huggingface"]
    words += ["--output-dir", path, "--special-tokens", "</s>", *(set(CONTROL) - {"</s>"})]
    assert exit_code(load_tool("train_tokenizer").main, *words) == 0
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<s>", "chat_template": BUILT_IN["internlm2"]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", [*BUILT_IN, "guide"])
def test_ids_and_mask_are_those_of_transformers(name, folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    source = BUILT_IN.get(name, GUIDE)
    if name == "guide":
        (tmp_path / "guide.jinja").write_text(GUIDE)
        name = str(tmp_path / "guide.jinja")
    encoder = ChatEncoder(ours, template_for(ours, name, None))
    for messages in [*CONVERSATIONS.values(), *HARD.values()]:
        expected = theirs.apply_chat_template(
            messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, trained = encoder.encode(messages)
        assert ids.tolist() == expected["input_ids"]
        assert trained.astype(int).tolist() == expected["assistant_masks"]
        prompt = theirs.apply_chat_template(
            messages[:-1], chat_template=source, add_generation_prompt=True, return_dict=False
        )
        assert encoder.prompt(messages[:-1]) == prompt


@pytest.mark.parametrize("name", tool_records.TEMPLATES)
def test_tools_are_written_as_by_transformers(name, folder, tmp_path):
    """Ids and masks in the file of preprocess_data.py --chat, and the prompts of a server."""
    transformers = pytest.importorskip("transformers")
    lines = [json.dumps(record) + "\n" for record in tool_records.RECORDS]
    records = [json.loads(line) for line in lines]  # in which no message is there twice
    (tmp_path / "t.jinja").write_text(tool_records.TEMPLATES[name])
    (tmp_path / "in.jsonl").write_text("".join(lines))
    words = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "x", "--chat"]
    words += ["--chat-template", tmp_path / "t.jinja", "--workers", 1]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    assert exit_code(load_tool("preprocess_data").main, *words) == 0
    data = IndexedDataset(tmp_path / "x_chat_document")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    encoder = ChatEncoder(ours, template_for(ours, str(tmp_path / "t.jinja"), None))
    assert len(data) == len(records) == 60
    for number, record in enumerate(records):
        tools = record["tools"]
        given = dict(
            chat_template=tool_records.TEMPLATES[name],
            tools=json.loads(tools) if isinstance(tools, str) else tools,
        )
        expected = theirs.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True, **given
        )
        stored = np.asarray(data[number], np.int64)
        assert tokens_of(stored).tolist() == expected["input_ids"]
        assert is_trained(stored).astype(int).tolist() == expected["assistant_masks"]
        prompt = theirs.apply_chat_template(
            record["messages"], add_generation_prompt=True, return_dict=False, **given
        )
        assert encoder.prompt(conversation_of(record), tools_of(record)) == prompt


@pytest.mark.parametrize("name", FOREIGN)
def test_the_text_of_published_templates_is_that_of_transformers(name, folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(name, FOREIGN[name][0], (("bos_token", "<s>"), ("eos_token", "</s>")))
    for messages in [*CONVERSATIONS.values(), *HARD.values()]:
        if name == "mistral":
            messages = [message for message in messages if message["role"] != "system"]
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                messages,
                chat_template=template.source,
                add_generation_prompt=prompt,
                tokenize=False,
            )
            assert template.text(messages, add_generation_prompt=prompt) == expected


def test_the_template_of_the_tokenizer_is_used_and_its_end_of_turn_is_one_token(folder):
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    encoder = ChatEncoder(ours, template_for(ours, None, str(folder)))
    assert encoder.template.source == BUILT_IN["internlm2"] and not encoder.text_markers()
    assert encoder.end_of_turn == "<|im_end|>"
    assert encoder.end_of_turn_id == ours.control["<|im_end|>"]
    assert encoder.prompt([{"role": "user", "content": "a"}])[0] == ours.control["<s>"]
