"""What of InternLM's the campaign of tests/campaigns/hostile damages."""

from __future__ import annotations

from pathlib import Path

from megatron.addons.internlm import config, token_data
from megatron.addons.internlm.feature import TokenFiles
from megatron.addons.internlm.tests.configs import demo
from megatron.addons.internlm.tests.lines import write_lines
from tests.campaigns.hostile.campaign import Kind, run_tool

VOCAB = 100


def make_packed(folder: Path) -> None:
    write_lines(folder / "in/x.bin", [[1, 2, -3], [4], [5, -6, 7, 8]])


def read_packed(folder: Path) -> str:
    low, high = TokenFiles().open(str(folder / "in/x.bin")).id_range(None)
    if max(high, -low) >= VOCAB:
        raise ValueError("ids of another vocabulary")
    run_tool(token_data.main, "to-megatron", folder / "in", folder / "out")
    return (folder / "out/x.bin").read_bytes().hex()


def read_internlm(folder: Path) -> str:
    return run_tool(config.main, folder / "config.py", "--world-size", 64)


KINDS = [
    Kind("InternLM .bin and .meta", make_packed, read_packed, ("in/x.bin", "in/x.bin.meta")),
    Kind(
        "InternLM config",
        lambda folder: (folder / "config.py").write_text(demo("7b")),
        read_internlm,
        ("config.py",),
    ),
]
