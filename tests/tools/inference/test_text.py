"""Text from tokens piece by piece: whole characters, spaces as in the whole text, stop strings."""

import pytest

from megatron.inference.text import TextStream


def from_bytes(ids) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def with_spaces(ids) -> str:
    """A tokenizer that writes a space before every token but the first, as SentencePiece does."""
    return " ".join(map(str, ids))


def pieces(stream: TextStream, tokens) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


def test_a_character_waits_until_all_its_bytes_are_there():
    text = "aé日🙂!"
    found = pieces(TextStream([ord("a")], from_bytes), text.encode()[1:])
    assert "".join(found) == text[1:] and all("\ufffd" not in piece for piece in found)
    torn = pieces(TextStream([], from_bytes), text.encode()[:-2])
    assert "".join(torn) == "aé日\ufffd"


def test_bytes_that_never_become_a_character_are_written_in_the_end():
    found = pieces(TextStream([], from_bytes), [0xFF] * 40 + [ord("a")])
    assert "".join(found) == "\ufffd" * 40 + "a" and sum(map(bool, found)) > 2


@pytest.mark.parametrize("prompt", [[], [1], list(range(20))])
def test_the_pieces_are_the_whole_text(prompt):
    new = list(range(100, 130))
    text = with_spaces([*prompt, *new])[len(with_spaces(prompt)) :]
    assert "".join(pieces(TextStream(prompt, with_spaces), new)) == text


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["cd"], "ab"),
        (["de", "bc"], "a"),
        (["a"], ""),
        (["fx", "efg"], "abcd"),
        (["h"], "abcdefg"),
        (["gx"], "abcdefg"),
        ([""], "abcdefg"),
    ],
)
def test_a_stop_string_ends_the_text_and_none_of_it_is_shown(stop, shown):
    stream = TextStream([], from_bytes, stop)
    assert "".join(pieces(stream, b"abcdefg")) == shown
    assert stream.stopped == (shown != "abcdefg")


def test_the_cost_of_a_token_does_not_grow():
    lengths = []
    stream = TextStream([], lambda ids: lengths.append(len(ids)) or from_bytes(ids))
    for _ in range(300):
        stream.push(ord("x"))
    assert max(lengths) < 12
