"""The chat page of tools/serve.py in a real browser: an answer that is streamed, a second turn, a
conversation beyond the context, text that looks like HTML, a wrong key."""

from __future__ import annotations

import contextlib

import pytest

from megatron.addons.serving.tests import browser
from megatron.addons.serving.tests.server import KEY, serving, trained_run

pytestmark = [pytest.mark.peers, pytest.mark.campaign]
TEXTS = "[...document.querySelectorAll('.message.{}')].map(box => box.textContent)"
IDLE = "document.getElementById('send').textContent === 'Send'"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    for name in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(name)
    if browser.program() is None:
        pytest.skip("needs Chromium installed: no chromium")
    with serving(trained_run(tmp_path_factory.mktemp("served"))) as server:
        yield server


@pytest.fixture
def page(server, tmp_path):
    with contextlib.closing(browser.Page(tmp_path / "profile")) as page:
        page.open(server.url)
        yield page


def answer(server, *messages: str, tokens: int = 12) -> str:
    """The greedy answer after these messages of user and assistant by turns."""
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)
    ]
    found = server.post("chat/completions", messages=turns, temperature=0, max_tokens=tokens).json()
    return found["choices"][0]["message"]["content"]


def test_two_turns_of_a_chat(server, page, tmp_path):
    page.type("key", KEY)
    page.type("temperature", "0")
    page.type("tokens", "12")
    page.type("text", "Hello", enter=True)
    page.wait(f"{TEXTS.format('assistant')}.length === 1 && {IDLE}")
    first = answer(server, "Hello")
    assert first.strip() and page.value(TEXTS.format("assistant")) == [first]
    page.type("text", "And then?", enter=True)
    page.wait(f"{TEXTS.format('assistant')}.length === 2 && {IDLE}")
    second = answer(server, "Hello", first, "And then?")
    assert page.value(TEXTS.format("assistant")) == [first, second]
    assert page.value(TEXTS.format("user")) == ["Hello", "And then?"]
    assert page.value("document.getElementById('model').textContent") == "bytes"
    page.picture(tmp_path / "chat.png")
    assert (tmp_path / "chat.png").stat().st_size > 5000
    page.value("document.getElementById('clear').click()")
    assert page.value("document.querySelectorAll('.message').length") == 0


def test_a_conversation_beyond_the_context_goes_on(server, page):
    """The oldest turns are dropped, which one line says; each answer is that of the rest."""
    page.type("key", KEY)
    page.type("temperature", "0")
    page.type("tokens", "20")
    said = []
    for turn in range(4):
        said.append(f"{turn} " * 75)  # of 512 bytes, two such turns fit and three do not
        page.type("text", said[-1], enter=True)
        page.wait(f"{TEXTS.format('assistant')}.length === {turn + 1} && {IDLE}")
        said[-1] = said[-1].strip()
        said.append(page.value(TEXTS.format("assistant"))[-1])
        kept = said[-4:-1] if turn else said[:1]
        assert said[-1] == answer(server, *kept, tokens=20), turn
        assert page.value(f"{TEXTS.format('note')}.length") == (turn > 1)
    below = "document.querySelector('.note').nextSibling.textContent"
    assert page.value(below) == said[-4]
    page.type("text", "x" * 480, enter=True)  # leaves less than 20 tokens by itself
    page.wait(f"{TEXTS.format('assistant')}.length === 5 && {IDLE}")
    page.type("text", "y" * 600, enter=True)
    page.wait(f"{TEXTS.format('error')}.length === 1 && {IDLE}")
    page.type("text", "And now?", enter=True)  # what was too long has cost nothing
    page.wait(f"{TEXTS.format('assistant')}.length === 6 && {IDLE}")


def test_the_button_stops_an_answer_and_enter_does_not(page):
    page.type("key", KEY)
    page.type("tokens", "400")
    page.type("text", "Hello", enter=True)
    page.wait(f"{TEXTS.format('assistant')}.join('').length > 3")
    page.type("text", "And then?", enter=True)
    assert not page.value(IDLE) and len(page.value(TEXTS.format("user"))) == 1
    page.value("document.getElementById('send').click()")
    page.wait(IDLE)
    (kept,) = page.value(TEXTS.format("assistant"))
    assert 3 < len(kept) < 300 and page.value(TEXTS.format("error")) == []


def test_text_is_no_html(server, page):
    page.type("key", KEY)
    page.type("tokens", "2")
    hostile = "<img src=x onerror='window.attacked = 1'><script>window.attacked = 1</script>"
    page.type("text", hostile, enter=True)
    page.wait(f"{TEXTS.format('user')}.length === 1 && {IDLE}")
    assert page.value(TEXTS.format("user")) == [hostile]
    assert page.value("document.querySelectorAll('#log img, #log script').length") == 0
    assert page.value("window.attacked") is None


def test_a_wrong_key_is_said(page):
    page.type("key", "sk-wrong")
    page.type("text", "Hello", enter=True)
    page.wait(f"{TEXTS.format('error')}.length === 1 && {IDLE}")
    assert "key" in page.value(TEXTS.format("error"))[0]
    assert page.value(TEXTS.format("assistant")) == []
