"""Every code of a message is documented, every documented code exists, and the texts are those of
the golden file."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests import rewrite_messages
from tests.core.config.checks import cases
from tests.problems import CODE

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("megatron", "tools", "pretrain_gpt.py")
READ_BEFORE_TORCH = ("megatron/config/", "megatron/arguments.py", "megatron/launcher.py")
# Codes that no command line of tests/core/config/checks/cases.txt provokes, and why.
NO_COMMAND_LINE = {
    "extra-flag-taken": "comes from a script",
    "batch-ramp-malformed": "the parser refuses such values before",
    "path-not-writable": "the superuser may write everywhere",
    "saved-flag-unknown": "needs a checkpoint of another release",
    "rendezvous-address-missing": "comes when several ranks meet",
    "value-without-flag": "must be the first word",
}


@functools.cache
def codes_in_source() -> dict[str, set[str]]:
    """{code: files} of the strings in which a message ends with a code."""
    found: dict[str, set[str]] = {}
    for place in PLACES:
        start = ROOT / place
        for file in sorted(start.rglob("*.py")) if start.is_dir() else [start]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if match := CODE.search(f" {node.value}"):
                        found.setdefault(match[1], set()).add(file.relative_to(ROOT).as_posix())
    return found


def documented() -> list[str]:
    """The codes of docs/troubleshooting.md, and of the section "Messages" of features."""
    pages = [page.read_text("utf-8") for page in (ROOT / "docs" / "features").glob("*.md")]
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    text += "".join(page.partition("\n## Messages\n")[2] for page in pages)
    return re.findall(r"^\| `([a-z0-9-]+)` \| .+ \| .+ \|$", text, re.MULTILINE)


def test_every_code_is_documented_once():
    assert sorted(documented()) == sorted(codes_in_source())


def test_a_missing_entry_would_be_noticed():
    assert len(codes_in_source()) > 100 and "lr-warmup-too-long" in codes_in_source()


@pytest.mark.parametrize("file", cases.files(), ids=lambda file: file.parent.name)
def test_the_texts_are_those_of_the_golden_file(file):
    """After a change of a message: python -m tests.rewrite_messages, and review the diff."""
    golden = rewrite_messages.golden(file).read_text(encoding="utf-8")
    assert rewrite_messages.messages(file) == golden


def test_every_code_of_a_command_line_has_a_text():
    texts = [rewrite_messages.golden(file).read_text() for file in cases.files()]
    shown = set(re.findall(r" \[([a-z0-9-]+)\]$", "\n".join(texts), re.MULTILINE))
    config = {
        code
        for code, files in codes_in_source().items()
        if any(file.startswith(READ_BEFORE_TORCH) for file in files)
    }
    assert config - shown == set(NO_COMMAND_LINE)
