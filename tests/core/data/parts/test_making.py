"""A part that is not made leaves nothing behind."""

import os
from pathlib import Path

import pytest

from megatron.data.parts import making
from megatron.data.parts.part_set import PartSet


@pytest.mark.parametrize("at", range(5))
def test_an_interrupt_while_a_failed_part_is_removed(tmp_path, monkeypatch, at):
    """Ray cancels the other tasks by an interrupt, at any moment, once the first has failed."""
    parts = PartSet(str(tmp_path / "x_text_document"), 1, ("0" * 32,), {"format": 2})
    parts.write_plan()
    before = set(Path(parts.folder).iterdir())
    calls = []

    def write(folder: str) -> None:
        for number in range(3):
            Path(folder, f"{number}.bin").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    def interrupted(function):
        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) == at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, interrupted(getattr(os, name)))
    with pytest.raises(KeyboardInterrupt if at else OSError):
        making.make([parts], 0, write)
    assert set(Path(parts.folder).iterdir()) == before and len(calls) >= at
