"""Every script and argument file of examples/ and README.md says only what the programs
understand."""

import contextlib
import io
import itertools
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import command_line
from megatron.features.registry import RunConfig
from tests.forkrun import run_ranks
from tests.runs import plot

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted(
    path for path in (ROOT / "examples").rglob("*") if path.suffix in (".sh", ".sbatch")
)
ARGS = sorted((ROOT / "examples").rglob("*.args"))
INCLUDED = {
    path.parent / other
    for path in ARGS
    for other in re.findall(r"(?m)^@(\S+)", path.read_text(encoding="utf-8"))
}
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
FIRST_WORDS = {"python", "make", "torchrun", "pip", "curl"}
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# A flag that carries one of these is not a flag of ours: the launcher's and make's words.
LAUNCHER_FLAGS = {
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--nproc-per-node",
    "--nproc_per_node",
    "--nnodes",
    "--node_rank",
    "--master_addr",
    "--master_port",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--standalone",
    "--local-addr",
    "--local_addr",
    "--kill-on-bad-exit",
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--exclude",
    "--signal",
    "--gpus-per-task",
    "--max-restarts",
    "--container-image",
    "--container-mounts",
    "--container-workdir",
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[list[str]]:
    """The words of each command line in the page's sh blocks and in indented ones that begin with
    a command; a trailing backslash continues a line, # comments."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for language, body in FENCE.findall(text) if language == "sh"]
    blocks += [
        body for body in INDENTED.findall(FENCE.sub("", text)) if body.split()[0] in FIRST_WORDS
    ]
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def help_of(program: str, *command: str) -> str:
    """What `python PROGRAM [COMMAND] --help` prints."""
    text = io.StringIO()
    sys.argv = [program, *command, "--help"]
    sys.path[0] = str((ROOT / program).parent)
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as left:
            assert not left.code, f"{program} --help: {left.code}"
    return text.getvalue()


def helps(rank: int, world: int, programs: list[str]) -> dict[str, set[str]]:
    """The flags of each program and its commands, one after the other in a process that has torch
    loaded."""
    found = {}
    for program in programs:
        text = help_of(program)
        listed = text.partition("\nCommands (")[2]
        texts = [
            text,
            *(
                help_of(program, command)
                for command in re.findall(r"^  ([a-z][a-z-]*)  ", listed, re.M)
            ),
        ]
        found[program] = {flag for one in texts for flag in re.findall(r"(?<![\w-])--[\w-]+", one)}
    return found


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """The flags of each program, read off its --help."""
    programs = ["pretrain_gpt.py", *(name(tool) for tool in sorted((ROOT / "tools").glob("*.py")))]
    return run_ranks(1, helps, programs)[0]


def check_flags(words: list[str], flags: dict[str, set[str]], where: str) -> None:
    """Every --flag after a program's name is one of that program's."""
    program = next(
        (p for word in words for p in flags if word == p or word.endswith("/" + p)), None
    )
    if program is None:
        return
    for word in itertools.takewhile(lambda word: word != "--", words):  # then another program's
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in LAUNCHER_FLAGS:
            assert flag in flags[program], f"{where}: {program} has no {flag}"


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_scripts_are_executable_shell_with_known_flags(script, flags):
    assert script.stat().st_mode & 0o111, "not executable"
    subprocess.run(["sh", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    found = 0
    for line in text.splitlines():
        if not line.lstrip().startswith("#") and any(f"{p}" in line for p in flags):
            words = line.replace('"', " ").split()
            check_flags(words, flags, name(script))
            found += 1
    assert found or "two_nodes.sh" in text, "starts none of our programs"


@pytest.mark.parametrize("path", [path for path in ARGS if path not in INCLUDED], ids=name)
def test_argument_files_make_a_plan(path, monkeypatch, capsys):
    text = path.read_text()
    ranks = re.search(r"on (\d+) ranks", text)
    data = [] if "--dummy-data" in text else ["--mock-data", "--vocab-size", "50257"]
    words = [f"@{name(path)}", *data, "--dry-run", *(["--world-size", ranks[1]] if ranks else [])]
    monkeypatch.chdir(ROOT)
    plot().main(words)
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_name_things_that_exist(page, flags):
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if "://" not in link:
            assert (page.parent / link).exists(), (
                f"{name(page)} links to {link}, which is not there"
            )
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M)
    targets = {target for rule in rules for target in rule.split()}
    for words in commands(page):
        broken = any(word[:3] == " --" for word in words)
        if words[0] in FIRST_WORDS or words[0].startswith("-"):
            broken = broken or not {"python", "curl"}.isdisjoint(words[1:])
        assert not broken, f"{name(page)}: {words} is not one command"
        if words[0] == "make":
            assert set(words[1:]) <= targets | {w for w in words if "=" in w}, words
        check_flags(words, flags, name(page))
        for word in words:
            if word.startswith(("examples/", "tools/", "@examples/")) or word == "pretrain_gpt.py":
                assert (ROOT / word.removeprefix("@")).exists(), f"{name(page)}: no file {word}"


def test_the_dry_runs_of_pages_have_no_problem():
    checked = 0
    for page in PAGES:
        for words in commands(page):
            files = [ROOT / word[1:] for word in words if word.startswith("@")]
            if "pretrain_gpt.py" not in words or "--dry-run" not in words:
                continue
            if "--world-size" not in words or not all(file.exists() for file in files):
                continue
            world_size = int(words[words.index("--world-size") + 1])
            argv = words[words.index("pretrain_gpt.py") + 1 :]
            argv = [f"@{ROOT / word[1:]}" if word.startswith("@") else word for word in argv]
            argv = [word for word in argv if word not in ("LAYOUT", "--dry-run")]
            _, problems = command_line.judge(argv, world_size, RunConfig)
            assert problems == [], f"{name(page)}: {shlex.join(words)}"
            checked += 1
    assert checked >= 4


def test_the_files_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = "megatron|tests|tools|docs|requirements|examples"
    named = re.findall(rf"`((?:{places})/[^`\s]*)`", text)
    missing = [path for path in named if not list(ROOT.glob(path.partition("::")[0]))]
    assert len(named) > 50 and not missing


def test_the_readme_says_the_two_commands():
    blocks = commands(ROOT / "README.md")
    assert ["make", "quickstart"] in blocks and ["make", "test"] in blocks
