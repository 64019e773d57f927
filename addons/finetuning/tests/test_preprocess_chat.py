"""tools/preprocess_data.py --chat: what it writes of good and bad conversations."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.finetuning.conversations import open_conversations
from megatron.addons.finetuning.loss_mask import TRAINED_ZERO, is_trained, tokens_of
from megatron.addons.finetuning.templates import BUILT_IN
from megatron.addons.finetuning.tests.conversations import CONVERSATIONS, EXPECTED
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizers.build import ByteTokenizer
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_reported

PREPROCESS = load_tool("preprocess_data")
BYTES = ["--tokenizer-type", "ByteTokenizer"]
GOOD = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def run(folder: Path, records: list[object], *more: object) -> int:
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--input", folder / "in.jsonl", "--output-prefix", folder / "x", *BYTES, "--chat"]
    if "--chat-template" not in more:
        words += ["--chat-template", "zephyr"]
    return exit_code(PREPROCESS.main, *words, *more)


def texts(prefix: Path) -> list[str]:
    """Each document with its trained tokens between « and »; the end of document is </s>."""
    data = IndexedDataset(prefix)
    data.check()
    found = []
    for number in range(len(data)):
        stored = np.asarray(data[number], np.int64)
        text = b""
        inside = False
        for token, trained in zip(tokens_of(stored), is_trained(stored), strict=True):
            text += b"" if trained == inside else "«".encode() if trained else "»".encode()
            inside = bool(trained)
            text += b"</s>" if token == ByteTokenizer.eod else bytes([token])
        found.append((text + "»".encode() * inside).decode())
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_every_form_of_record_becomes_ids_with_a_mask(workers, tmp_path, capsys):
    chats = list(CONVERSATIONS.values())
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in chats[2]]
    records = [{"messages": chats[0]}, chats[1], {"conversations": sharegpt}]
    assert run(tmp_path, records, "--workers", workers) == 0
    assert texts(tmp_path / "x_chat_document") == list(EXPECTED["zephyr"])
    said = json.loads((tmp_path / "x_chat_document.json").read_text())
    data = IndexedDataset(tmp_path / "x_chat_document")
    stored = np.concatenate([np.asarray(data[n], np.int64) for n in range(len(data))])
    assert said["trained_tokens"] == int(is_trained(stored).sum()) == 7 + 8 + 20 + 2 + 2
    assert said["tokens"] == len(stored) and said["chat_template"]["name"] == "zephyr"
    assert data.dtype == np.int32
    assert f"39 of {len(stored)} tokens" in capsys.readouterr().out


def test_id_0_in_an_answer_is_trained(tmp_path):
    messages = [{"role": "user", "content": "\0"}, {"role": "assistant", "content": "\0"}]
    assert run(tmp_path, [messages]) == 0
    stored = np.asarray(IndexedDataset(tmp_path / "x_chat_document")[0])
    assert (stored == TRAINED_ZERO).sum() == 1 and (stored == 0).sum() == 1


BAD = {
    "no assistant": ([GOOD[0]], "has no assistant message"),
    "no messages": ({"messages": []}, "has no messages"),
    "an unknown role": ([{"role": "bot", "content": "x"}], "unknown role 'bot'"),
    "an empty answer": ([GOOD[0], {"role": "assistant", "content": ""}], "is empty"),
    "no key": ({"text": "x"}, 'has no key "messages" or "conversations"'),
    "a special token": (
        [{"role": "user", "content": "x<|endoftext|>"}, GOOD[1]],
        "message 1 contains the special token <|endoftext|>",
    ),
    "a marker": (
        [{"role": "user", "content": "x\n<|assistant|>\n"}, GOOD[1]],
        "message 1 contains the special token <|assistant|>",
    ),
    "a role of another template": (
        [{"role": "tool", "content": "4"}, *GOOD],
        "zephyr refuses it .TemplateError: zephyr has no role tool",
    ),
    "tools": ({"messages": GOOD, "tools": [{"name": "f"}]}, 'has "tools", which the chat template'),
    "tools that are not a list": ({"messages": GOOD, "tools": {"name": "f"}}, '"tools" is not a'),
    "a key that nobody reads": ({"messages": GOOD, "functions": [{"name": "f"}]}, '"functions"'),
    "half a pair": ([GOOD[0], {"role": "assistant", "content": "\ud83d"}], "surrogate pair"),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_record_is_one_message_or_counted_and_skipped(why, tmp_path, capsys):
    record, what = BAD[why]
    assert run(tmp_path, [GOOD, record, GOOD]) == 1
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and f"{tmp_path}/in.jsonl, line 2: " in error
    assert what.replace(" .", " (").split("(")[0] in error and "[bad-record]" in error
    assert not (tmp_path / "x_chat_document.idx").exists()
    assert run(tmp_path, [GOOD, record, GOOD], "--max-bad-records", 1) == 0
    assert len(texts(tmp_path / "x_chat_document")) == 2
    (bad,) = (tmp_path / "x.bad_records.jsonl").read_text().splitlines()
    assert json.loads(bad)["line"] == 2


def test_special_tokens_in_a_message_where_they_are_allowed(tmp_path):
    messages = [{"role": "user", "content": "x<|endoftext|>y"}, GOOD[1]]
    assert run(tmp_path, [messages], "--allow-special-tokens") == 0
    assert texts(tmp_path / "x_chat_document") == ["<|user|>\nx</s>y</s>\n<|assistant|>\n«a</s>»\n"]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--append-eod"], "[flags-exclude-each-other]"),
        (["--split-sentences"], "[flags-exclude-each-other]"),
        (["--json-keys", "a", "b"], "--json-keys a b: --chat reads one"),
        (["--chat-template", "no_such"], "--chat-template no_such: "),
        (["--chat-template", "internlm2"], "internlm2: uses bos_token, which"),
    ],
)
def test_flags_that_do_not_go_with_chat(flags, what, tmp_path, capsys):
    assert run(tmp_path, [GOOD], *flags) in (1, 2)
    assert what in capsys.readouterr().err


def test_the_template_needs_chat_and_chat_needs_messages(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x")
    words = ["--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "x", *BYTES]
    assert exit_code(PREPROCESS.main, *words, "--chat-template", "zephyr") == 2
    assert_reported(capsys.readouterr().err, "flag-needs-other-flag", "--chat-template", "--chat;")
    assert exit_code(PREPROCESS.main, *words, "--chat", "--chat-template", "zephyr") == 2
    assert_reported(capsys.readouterr().err, "flags-exclude-each-other", "a.txt", "--chat")
    assert exit_code(PREPROCESS.main, *words, "--chat") == 2


def test_a_tokenizer_without_template_and_markers_that_are_text(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(json.dumps(GOOD) + "\n")
    words = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "x", *BYTES, "--chat"]
    assert exit_code(PREPROCESS.main, *words) == 1
    assert "--chat-template is missing" in capsys.readouterr().err
    assert run(tmp_path, [GOOD], "--chat-template", "chatml") == 0
    note = capsys.readouterr().err
    assert note.startswith("note: <|im_start|>, <|im_end|> of ") and "chatml" in note
    assert texts(tmp_path / "x_chat_document") == [
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n"
    ]


WITH_TOOLS = "{{ tools | tojson if tools }}" + BUILT_IN["zephyr"]


def test_the_tools_of_a_record_are_written_and_cannot_hold_special_tokens(tmp_path, capsys):
    (tmp_path / "t.jinja").write_text(WITH_TOOLS)
    flags = ["--chat-template", tmp_path / "t.jinja"]
    record = {"messages": GOOD, "tools": [{"name": "é"}], "parallel_tool_calls": False}
    assert run(tmp_path, [GOOD, record], *flags) == 0
    turns = "<|user|>\nq</s>\n<|assistant|>\n«a</s>»\n"
    assert texts(tmp_path / "x_chat_document") == [turns, '[{"name": "é"}]' + turns]
    for tools in ([{"name": {"x<|endoftext|>": 1}}], [{"enum": ["<|user|>"]}]):
        assert run(tmp_path, [{**record, "tools": tools}], *flags, "--overwrite") == 1
        assert_reported(capsys.readouterr().err, "bad-record", "a tool ", "<|")


@pytest.mark.peers
def test_parquet(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.jinja").write_text(WITH_TOOLS)
    words = ["--input", tmp_path / "a.parquet", "--output-prefix", tmp_path / "x", *BYTES]
    words += ["--chat", "--chat-template", tmp_path / "t.jinja", "--json-keys", "talk"]
    turns = "<|user|>\nq</s>\n<|assistant|>\n«a</s>»\n"

    def written(**columns: list) -> list[str]:
        table = pyarrow.table({"talk": [GOOD, GOOD], **columns})
        parquet.write_table(table, tmp_path / "a.parquet")
        assert exit_code(PREPROCESS.main, *words, "--overwrite") == 0, capsys.readouterr().err
        return texts(tmp_path / "x_chat_document")

    assert written() == [turns] * 2
    assert written(tools=[None, '[{"name": "f"}]']) == [turns, '[{"name": "f"}]' + turns]
    for name, rows in (("tools", [None, [{"name": "f"}]]), ("system", [None, "Be kind."])):
        with pytest.raises(AssertionError, match=f'line 2: has "{name}".*bad-record'):
            written(**{name: rows})


def test_a_kind_of_text_is_not_resumed_by_another_command(tmp_path):
    """The work of an interrupted plain run is not taken for that of a chat run."""
    (tmp_path / "x.jsonl").write_text('{"text": "x"}')
    config, _ = PREPROCESS.read_command_line(
        ["--input", f"{tmp_path}/x.jsonl", "--output-prefix", f"{tmp_path}/x", *BYTES]
    )
    job = PREPROCESS.Job(config.tokenizer, ("text",))
    plain = PREPROCESS._job_identity(config, ByteTokenizer(), job)
    chat = PREPROCESS.replace(
        job, chat=open_conversations(TokenizerConfig(), ByteTokenizer(), "zephyr", None, False)
    )
    assert plain.keys() == PREPROCESS._job_identity(config, ByteTokenizer(), chat).keys()
    assert plain != PREPROCESS._job_identity(config, ByteTokenizer(), chat)
