"""The converter's unpickling without a process of its own. Knows no format."""

from __future__ import annotations

from megatron.addons.convert import torch_files, unpickle_worker


def use_it(monkeypatch) -> None:
    """Until the end of the test, for every command."""
    monkeypatch.setattr(torch_files, "_answer", unpickle_worker.answer)
