"""Every program of tools/: its help without torch, its version, and a misspelled flag. A new file
there is tested too."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.version import VERSION
from tests.load_tool import programs
from tests.problems import assert_problem, code_of

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py"))
# a program of a room that was deleted is not INSTALLED (addons/tests/test_rooms.py)
INSTALLED = programs()
ODD = ("9" * 500, "nan", "\x1b[2J", "s3://me:S3CRET@bucket/x")
# Runs a tool with --help as the interpreter would, prints [exit code, stdout, stderr] and what it loaded;
# then calls its main() with --help and --version, and with the command lines that come on stdin; prints
# [command line, exit code, stdout, stderr] of each, the tool's commands and what it loaded.
CALLS = """
import contextlib, importlib, importlib.util, io, json, os, runpy, sys

def call(main, *words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(*words)
        except SystemExit as end:
            code = end.code
    return [code, out.getvalue(), err.getvalue()]

path = sys.argv[1]
sys.path[0] = os.path.dirname(path)
sys.argv = [path, "--help"]
print(json.dumps([call(runpy.run_path, path, None, "__main__"), sorted(sys.modules)]), flush=True)
spec = importlib.util.spec_from_file_location("tool", path)
tool = sys.modules["tool"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)
if not hasattr(tool, "main"):  # a room's
    from tools.shared import room_program
    places = []
    room_program.run = places.append
    runpy.run_path(path, run_name="__main__")
    tool = importlib.import_module(places[0])
commands = list(getattr(tool, "COMMANDS", ()))

calls = [[*command, flag] for command in [[], *([name] for name in commands)] for flag in ("--help", "--version")]
while calls:
    print(json.dumps([[[argv, *call(tool.main, argv)] for argv in calls], commands, sorted(sys.modules)]), flush=True)
    calls = json.loads(sys.stdin.readline() or "[]")
"""


@contextlib.contextmanager
def called(name: str, folder: Path) -> Iterator[Callable[..., tuple]]:
    """A function that gives, first, ([exit code, stdout, stderr], modules that were loaded) of the
    program with --help in that folder; then ([argv, exit code, stdout, stderr] of command lines,
    commands, modules), at first of --help and --version."""
    words = [sys.executable, "-c", CALLS, str(ROOT / "tools" / f"{name}.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=folder, stdin=pipe, stdout=pipe, text=True) as process:

        def ask(*more: list[str]) -> tuple:
            process.stdin.write(f"{json.dumps(more)}\n" if more else "")
            process.stdin.flush()
            return tuple(json.loads(process.stdout.readline()))

        yield ask


@pytest.mark.parametrize("name", INSTALLED)
def test_each_command_has_help_and_judges_what_follows_it(name, tmp_path):
    """From any directory, without torch. It suggests the flag that was meant; refuses bytes that are no
    UTF-8 and numbers without bounds, and repeats neither signs of a terminal nor credentials."""
    before = (ROOT / "docs" / "flags.md").stat().st_mtime_ns
    with called(name, tmp_path) as ask:
        (code, out, err), modules = ask()
        assert code == 0 and out.startswith(f"usage: {name}.py"), err[-500:]
        assert "megatron.arguments" in modules
        assert not {"torch", "transformers", "matplotlib", "tokenizers"} & set(modules)
        assert not list(tmp_path.iterdir())
        assert (ROOT / "docs" / "flags.md").stat().st_mtime_ns == before
        found, commands, modules = ask()
        assert "torch" not in modules
        judge(found, commands, ask)


def judge(found: list, commands: list[str], ask: Callable[..., tuple]) -> None:
    """What a tool answers to bad words after each of its commands."""
    typos: list[tuple[list[str], str]] = []
    not_utf8: list[list[str]] = []
    odd: list[list[str]] = []
    for argv, code, out, err in found:
        assert code == 0 and err == "", (argv, err)
        if argv[-1] == "--version":
            assert VERSION in out and out.count("\n") == 1
            continue
        command = argv[:-1]
        flags = re.findall(r"^  (--[\w-]+)", out, re.MULTILINE)
        for entry in re.split(r"^(?=  -)", out, flags=re.MULTILINE)[1:]:
            says = re.match(
                r"  -\S+.*?(?: {2,}|\n +)(?!\((?:default|required))\w", entry, re.DOTALL
            )
            assert says, f"{entry}: no docstring below its field"
        assert "--version" in flags or command == [] and commands
        meant = flags[-1] if not commands or command else "--version"
        typos.append(([*command, meant[:-2] + meant[-1]], meant))
        own = set(flags) - {"--help", "--version", "--explain"}
        not_utf8 += [[*command, flag, os.fsdecode(b"a\xff")] for flag in sorted(own)]
        numbers = re.findall(r"^  (--[\w-]+)(?:, --[\w-]+)* [NX]\b", out, re.MULTILINE)
        odd += [[*command, flag, value] for flag in numbers for value in ODD]
        odd.append([*command, "--no-\x1b[2J"])
    asked, _, modules = ask(*(argv for argv, _ in typos), *not_utf8, *odd)
    assert "torch" not in modules
    answers = iter(asked)
    for typed, meant in typos:
        argv, code, out, err = next(answers)
        assert argv == typed and code == 2 and out == ""
        lines = err.splitlines()
        assert all(line.startswith("error: ") for line in lines), err
        kind = "command-unknown" if commands and not typed[:-1] else "flag-unknown"
        assert_problem(lines[0], kind, f"{meant}?")
    for typed in not_utf8:
        argv, code, out, err = next(answers)
        assert argv == typed and code == 2 and out == ""
        [line] = [line for line in err.splitlines() if "a\\udcff" in line]
        assert code_of(line) in ("value-not-utf8", "value-not-expected"), err
    for argv, code, out, err in answers:
        assert code == 2 and out == "", argv
        assert all(line.startswith("error: ") for line in err.splitlines()), err
        assert "\x1b" not in err and "S3CRET" not in err and len(err) < 3000
        assert ("--no-" if argv[-1].startswith("--no-") else argv[-2]) in err, (argv, err)


@pytest.mark.parametrize("words", [["pretrain_gpt.py"], ["tools/plot.py"]])
def test_what_a_program_prints_acts_on_no_terminal(words):
    bad = "--bad-\x1b]0;x\x07\x9b2J\r\nerror: other"
    done = subprocess.run([sys.executable, *words, bad, "1"], cwd=ROOT, capture_output=True)
    assert done.returncode == 2 and b"--bad-" in done.stderr
    said = done.stderr.decode()
    assert not [sign for sign in said if sign != "\n" and not sign.isprintable()]
    assert not re.search("^error: other", said, re.MULTILINE)


COMMAND = ["-c", "from megatron.console import tools; tools()"]
DRAW = ["tools/draw_schedule.py", "--pipeline-model-parallel-size=2", "--num-microbatches=4"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param([f"tools/{name}.py", "--help"], id=name) for name in INSTALLED[:2]),
        pytest.param(["pretrain_gpt.py", "--help"], id="pretrain_gpt"),
        pytest.param([*COMMAND, "--version"], id="megatron-tools"),
        pytest.param([*COMMAND, "generate", "--help"], id="megatron-tools generate"),
        *([pytest.param(DRAW, id="results")] if "draw_schedule" in INSTALLED else []),
    ],
)
def test_output_on_a_full_disk_is_one_line_and_exit_code_1(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_training_prints_its_version_too():
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "RANK": "0"},
    )
    assert done.returncode == 0 and VERSION in done.stdout and done.stderr == ""


def test_the_command_of_an_installation_runs_each_tool_by_its_name(tmp_path):
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from megatron.console import tools; tools()", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    listed = call("--help")
    assert (
        listed.returncode == 0 and re.findall(r"^  (\w+)  ", listed.stdout, re.MULTILINE) == TOOLS
    )
    assert call("--version").stdout.split()[-1] == VERSION
    assert (
        call("train-tokenizer", "--help").stdout == call("train_tokenizer", "--help").stdout != ""
    )
    assert call("train_tokenizer", "--output-prefx", "1").returncode == 2
    for words, hint in (
        (["genrate", "x"], "did you mean generate?"),
        (["--hlp"], "did you mean --help?"),
        ([], "generate"),
    ):
        done = call(*words)
        assert done.returncode == 2 and done.stdout == "" and hint in done.stderr
