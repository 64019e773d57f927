"""The converter as its command line calls it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.addons.convert.tests.in_process import use_it
from tests.load_tool import load_tool


@pytest.fixture(autouse=True)
def _unpickled_in_process(monkeypatch) -> None:
    """`monkeypatch.undo()` in a test of the other process, which takes 30 ms for each file."""
    use_it(monkeypatch)


@pytest.fixture
def convert(capfd) -> Callable[..., str]:
    """Call tools/convert_checkpoint.py with these words, and return what it prints. It must
    succeed; with `fails` it must fail, and stderr is returned (`fails="out"`: stdout)."""
    tool = load_tool("convert_checkpoint")

    def call(*words: object, fails: bool | str = False) -> str:
        capfd.readouterr()
        code = tool.main([str(word) for word in words])
        out, errors = capfd.readouterr()
        assert code == bool(fails), f"exit code {code}\n{out}{errors}"
        return errors if fails is True else out

    return call
