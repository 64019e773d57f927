"""Lines of JSON: orjson, where it is installed, gives what the standard library does, errors
included."""

import pytest

from megatron.data.preprocess import jsonl

LINES = [
    b'{"text": "plain"}',
    '{"text": "h\u00e9 \U0001f600 \\u00e9 \\ud83d\\ude00"}'.encode(),
    b'{"text": ["a", "b"]}',
    b'{"text": []}',
    b'{"text": null}',
    b'{"text": 3}',
    b'{"other": "x"}',
    b'{"text": "a", "text": "b"}',
    b'{"text": "x", "loss": NaN}',
    b'{"text": "x", "n": 1e999}',
    b'{"text": "x", "n": 123456789012345678901234567890}',
    b'{"text": "lone \\ud800"}',
    b'{"text": "tab\there"}',
    b'{"text": "cut',
    b'{"text": "x"} more',
    b"",
    b"[1, 2]",
    b"text",
    b'{"text": "\xff"}',
    b'\xef\xbb\xbf{"text": "x"}',
    b'{"tokens": [1, 2, 3]}',
    b'{"tokens": []}',
    b'{"tokens": [1, 2.5]}',
    b'{"tokens": [[1], [2, 3]]}',
    b'{"tokens": "1 2"}',
    b'{"tokens": [9223372036854775808]}',
    b'{"tokens": [-1]}',
    b'{"tokens": [true]}',
]


def outcome(read, line: bytes) -> object:
    """What a line is read as, or what is said of it."""
    try:
        return read(line)
    except ValueError as error:
        return f"error: {error}"


def answers() -> list[tuple]:
    """Texts and ids of every line."""
    texts = [outcome(lambda line: jsonl.texts_of(line, ["text"]), line) for line in LINES]
    ids = [outcome(lambda line: jsonl.ids_of(line).tolist(), line) for line in LINES]
    return list(zip(LINES, texts, ids, strict=True))


@pytest.mark.peers
def test_both_parsers_give_the_same(monkeypatch):
    pytest.importorskip("orjson")
    fast = answers()
    monkeypatch.setattr(jsonl, "orjson", None)
    assert fast == answers()
    kinds = [str(texts).startswith("error") for _, texts, _ in fast]
    assert any(kinds) and not all(kinds)


@pytest.mark.peers
@pytest.mark.parametrize("value", [{"a": [1, None, "h\u00e9"]}, [], "x", 1.5])
def test_what_one_writes_the_other_reads(value, monkeypatch):
    pytest.importorskip("orjson")
    fast = jsonl.json_text(value)
    monkeypatch.setattr(jsonl, "orjson", None)
    assert jsonl.json_value(fast) == value == jsonl.json_value(jsonl.json_text(value))


@pytest.mark.parametrize("many", [b"[],", b'"ab",', b"1,", b'{"a":1},'])
def test_a_line_of_too_many_values_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, many: bytes
) -> None:
    monkeypatch.setattr(jsonl, "MOST_VALUES", 1000)
    few = b'{"text": "' + rb"[a, {\\\"," * 2000 + b'", "x": [' + many * 100 + b"0]}"
    assert jsonl.texts_of(few, ["text"])[0][0].count(",") == 4000
    with pytest.raises(ValueError, match="more than 1000 values"):
        jsonl.texts_of(b'{"text": "a", "x": [' + many * 1000 + b"0]}", ["text"])
