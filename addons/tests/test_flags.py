"""Every flag of Megatron's is known to the program with all features, and tables and pages name flags
that exist."""

from __future__ import annotations

import re

import pytest

from megatron.addons.megatron_cli.flags import FOREIGN, prefixes
from megatron.config import command_line
from megatron.data.request import DataRequest
from megatron.features.registry import RunConfig
from megatron.training.feature import data_source
from tests.core.config.checks.checked_flags import checked
from tests.forkrun import ROOT
from tests.problems import assert_reported
from tests.runs import SMALL, with_flags, write_text

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


def bigcode(*words: str) -> command_line.CommandLine:
    """A command line for BigCode's Megatron-LM."""
    base = with_flags(
        SMALL, "--tokenizer-type", "TokenizerFromFile", "--tokenizer-file", "x/tokenizer.json"
    )
    base = [*base, "--train-iters", "9", "--data-path", "x", "--dry-run", *words]
    return command_line.read(base, {}, tree=RunConfig)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--fim-rate 0.25", (True, True, 0.25, None)),
        ("--fim-rate 0", (False, False, 0.5, None)),
        ("", (False, False, 0.5, None)),
        ("--fim-data --fim-rate 0.5", (True, False, 0.5, None)),
        ("--fim-rate 0.5 --fim-split-sample x", (True, True, 0.5, 0.5)),
        ("--fim-rate 0.5 --fim-split-sample x --fragment-fim-rate 0.1", (True, True, 0.5, 0.1)),
    ],
)
def test_bigcodes_rate_is_enough_to_fill_in_the_middle(words, expected):
    [fim] = [group for group in vars(bigcode(*words.split()).config).values() if is_fim(group)]
    read = (fim.fim_data, fim.fim_keep_special_tokens, fim.fim_rate, fim.fim_fragment_rate)
    assert read == expected


def is_fim(group: object) -> bool:
    return hasattr(group, "fim_data")


def test_groups_of_data_have_their_middles_filled(tmp_path):
    """A source that names the data is asked before one that changes samples."""
    text = write_text(tmp_path / "text", 100)
    words = with_flags(SMALL, "--tokenizer-type", "ByteTokenizer", "--vocab-size", "257")
    words += ["--train-iters", "9", "--train-weighted-split-paths", f"A: 1 0:0.5 {text}"]
    words += ["--valid-weighted-split-paths", f"B: 1 0.5:1 {text}"]
    tokens = {"prefix": "\x65", "middle": "\x66", "suffix": "\x67", "pad": "\x68"}
    fim = [word for name, text in tokens.items() for word in (f"--fim-{name}-token", text)]
    line, problems = command_line.planned([*words, "--fim-data", *fim], 1, RunConfig)
    assert not problems
    request = DataRequest(sizes=(16, 8, 0), sequence_length=32)
    train, [valid], _ = data_source(line.config).build(line.config.data, request, [])
    assert valid.set_name == "B"
    for dataset in (train, valid):
        assert any(ord("\x65") in dataset[number] for number in range(8))


@pytest.mark.parametrize(
    "words",
    ["--fim-data --data-path x", "--train-weighted-split-paths TRAIN:1\x200:1\x20x"],
)
def test_stages_have_samples_of_their_own(words, capsys):
    flags = [*SMALL, "--train-iters", "9", *(word.replace("\x20", " ") for word in words.split())]
    flags = [*flags, "--phase-transition-iterations", "4", "--dry-run"]
    with pytest.raises(SystemExit):
        command_line.read(flags, {}, tree=RunConfig)
    named = ("--phase-transition-iterations", words.split()[0])
    assert_reported(capsys.readouterr().err, "flags-exclude-each-other", *named)
