"""Every code of a message is explained, every explained code exists, and the texts are those of
cases.txt."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import explain
from tests import rewrite_messages
from tests.core.config.checks import cases
from tests.problems import CODE, assert_problem, codes_of
from tools.shared.program import said

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("megatron", "addons", "bench", "tools", "pretrain_gpt.py")
READ_BEFORE_TORCH = (
    "megatron/config/",
    "megatron/arguments.py",
    "megatron/extra_arguments.py",
    "megatron/launcher.py",
)
# Codes that no command line of tests/core/config/checks/cases.txt provokes, and why.
NO_COMMAND_LINE = {
    "extra-flag-taken": "comes from a script",
    "own-model": "comes from a script",
    "batch-ramp-malformed": "the parser refuses such values before",
    "path-not-writable": "the superuser may write everywhere",
    "saved-flag-unknown": "needs a checkpoint of another release",
    "checkpoint-damaged": "the load says it",
    "checkpoint-tracker-malformed": "the load says it",
    "checkpoint-tracker-missing": "the load says it",
    "file-operation-failed": "the load or the save says it",
    "value-without-flag": "must be the first word",
    "value-not-utf8": "the table of the cases is UTF-8",
    "too-many-words": "needs a hundred problems",
}


@functools.cache
def codes_in_source() -> dict[str, set[str]]:
    """{code: files} of the strings in which a message ends with a code."""
    found: dict[str, set[str]] = {}
    for place in PLACES:
        start = ROOT / place
        files = sorted(start.rglob("*.py")) if start.is_dir() else [start]
        for file in (file for file in files if "tests" not in file.relative_to(ROOT).parts):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if match := CODE.search(f" {node.value}"):
                        found.setdefault(match[1], set()).add(file.relative_to(ROOT).as_posix())
    return found


def without_code(file: Path) -> list[str]:
    """The texts of a program's errors that end in words and no code."""
    errors: list[ast.expr] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if ast.unparse(node.exc.func) in ("ValueError", "FileNotFoundError", "ConversionError"):
                errors += node.exc.args[:1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "problems.append":
            errors += node.args
    ends = [error.values[-1] if isinstance(error, ast.JoinedStr) else error for error in errors]
    return [
        str(end.value)
        for end in ends
        if isinstance(end, ast.Constant) and not CODE.search(f" {end.value}")
    ]


def explained() -> list[str]:
    """The codes of megatron/codes.txt and of those of features and add-ons."""
    rooms = (*ROOT.glob("megatron/features/*/codes.txt"), *ROOT.glob("addons/**/codes.txt"))
    files = [ROOT / "megatron/codes.txt", *rooms]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return re.findall(r"^([a-z0-9-]+) \| ", text, re.MULTILINE)


def test_every_code_is_explained_once():
    assert sorted(explained()) == sorted(codes_in_source())
    assert sorted(explain.codes()) == sorted(explained())


@pytest.mark.parametrize(
    "program",
    [["pretrain_gpt.py"], ["tools/generate.py"], ["tools/spikes.py"], ["-m", "megatron.console"]],
    ids=lambda program: program[-1],
)
def test_every_program_explains_a_code(program):
    """Also one of a feature, with the brackets that it has in a message."""
    if program[0] == "-m":
        program = ["-c", "from megatron import console; console.tools()"]
    for code, exit_code in (("lr-warmup-too-long", 0), ("[crash-loop]", 0), ("lr-warmup-long", 2)):
        command = [sys.executable, *program, "--explain", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == exit_code, done.stderr
        if exit_code:
            assert_problem(done.stderr.strip(), "code-unknown", "lr-warmup-too-long")
        else:
            known = explain.codes()[code.strip("[]")]
            said = " ".join(done.stdout.split())
            assert known.remedy.replace("`", "") in said and known.meaning.split("`")[0] in said


def test_every_error_of_a_tool_has_a_code():
    """Those of converters have one of their exception's class."""
    files = [*ROOT.glob("tools/*.py"), *ROOT.glob("tools/shared/*.py")]
    assert len(files) > 25
    assert {f.name: texts for f in files if (texts := without_code(f))} == {}


def test_an_error_without_a_code_gets_that_of_its_class(tmp_path):
    class Refused(ValueError):
        code = "[not-converted]"

    texts = "a.weight: no place", "--vocab-size 3: must be more [value-out-of-range]"
    assert codes_of(said(Refused("\n".join(texts)))) == ["not-converted", "value-out-of-range"]
    with pytest.raises(OSError) as missing:
        open(tmp_path / "none")
    with pytest.raises(OSError) as folder:
        os.rmdir(Path(__file__).parent)
    [line] = said(missing.value)
    assert_problem(line, "file-not-readable", tmp_path / "none")
    [line] = said(folder.value)
    assert_problem(line, "file-operation-failed", Path(__file__).parent)


def test_a_missing_entry_would_be_noticed():
    assert len(codes_in_source()) > 100 and "lr-warmup-too-long" in codes_in_source()


@pytest.mark.parametrize("file", cases.files(), ids=lambda file: "-".join(file.parts[-4:-1]))
def test_the_texts_are_those_of_the_file(file):
    """After a change of a message: python -m tests.rewrite_messages, and review the diff."""
    assert rewrite_messages.messages(file) == file.read_text(encoding="utf-8")


def test_every_code_of_a_command_line_has_a_text():
    texts = [file.read_text(encoding="utf-8") for file in cases.files()]
    shown = set(re.findall(r" \[([a-z0-9-]+)\]$", "\n".join(texts), re.MULTILINE))
    config = {
        code
        for code, files in codes_in_source().items()
        if any(file.startswith(READ_BEFORE_TORCH) for file in files)
    }
    assert config - shown == set(NO_COMMAND_LINE)
