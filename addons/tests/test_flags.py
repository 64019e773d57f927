"""Every flag of Megatron's is known to the program with all features, and tables and pages name flags
that exist."""

from __future__ import annotations

import re

from megatron.addons.megatron_cli.flags import FOREIGN, prefixes
from megatron.config import command_line
from megatron.features.registry import RunConfig
from tests.core.config.checks.checked_flags import checked
from tests.forkrun import ROOT

PARSER = command_line.parser(RunConfig)


def test_megatrons_spellings_are_known():
    lines = (ROOT / "tests/golden/megatron_flags.txt").read_text().splitlines()
    spellings = {line.split("\t")[2] for line in lines if line[0] != "#"} - {"-"}
    assert len(spellings) > 300 and spellings - PARSER.every_spelling.keys() == set()


def test_remedies_name_flags_that_exist():
    texts = [flag.text for flag in FOREIGN.values()] + [text for *_, text in prefixes()]
    for text in texts:
        for word in (
            text.replace("(", " ").replace(",", " ").replace(";", " ").replace(":", " ").split()
        ):
            if word.startswith("--") and word != "--nproc-per-node":
                assert word in PARSER.every_spelling, f"{text!r} recommends {word}"


def test_the_page_of_internlm_names_flags_that_exist():
    page = (ROOT / "addons/internlm/internlm.md").read_text()
    table = page.partition("## Keys")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(--[a-z0-9-]+)", table))
    assert named and named - PARSER.every_spelling.keys() == set()


def test_what_needs_no_word():
    for flags in (
        "--log-memory-to-tensorboard --tensorboard-dir x --device cuda",
        "--timing-log-option all --log-format megatron",
    ):
        assert checked(flags) == ([], [])
