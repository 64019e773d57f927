"""Each feature is a room that can be deleted: nothing else names it, and a copy without it trains,
resumes what the feature was on in, and converts."""

from __future__ import annotations

import ast
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.arguments import flags_of_group
from megatron.checkpoint import store
from megatron.features.registry import FEATURES
from tests.copies import PROGRAM, copy_source, lint_imports, program, python
from tests.forkrun import ROOT
from tests.problems import codes_of
from tests.runs import EXACT, SMALL, Finished, train, with_flags, write_text

ROOMS = {feature.__module__.split(".")[2]: feature for feature in FEATURES}
# flags under which a feature does something
USED = {
    "boards": "--tensorboard-dir {}/board",
    "data_ledger": "--data-ledger {}/ledger",
    "eval_tasks": "--eval-tasks {}/task.yaml --eval-tasks-interval 1",
    "goodput": "--crash-loop-limit 1",
    "internlm": "--log-format internlm",
    "spikes": "--spike-action skip-update",
    "step_verification": "--verify-step-interval 1 --verify-step-action majority",
    "megatron_cli": "--log-format aurora",
    "stragglers": "--log-straggler",
    "trace": "--trace-ranks last",
}
# files in the folder of the run that these flags name
FILES = {
    "task.yaml": "task: sky\ndataset_path: json\ndataset_kwargs: {data_files: {test: FOLDER/sky.jsonl}}\n"
    "test_split: test\noutput_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
    "metric_list: [{metric: acc}]\n",
    "sky.jsonl": '{"q": "1 2", "a": " 3"}\n',
}
MODULE = "import runpy, sys\nrunpy.run_module(sys.argv.pop(1), run_name='__main__')\n"
# the harness that injects faults into every part
MAY_IMPORT = "tools/benchmarks/"


def of_a_room(text: str, own: str = "") -> list[str]:
    """What a Python file of tests has of a feature other than `own`: imports, flags, values that it
    adds to a flag of the core, and keyword arguments named as its fields."""
    others = {room: feature for room, feature in ROOMS.items() if room != own}
    of_other = re.compile(rf"(megatron|tests|tools)\.features\.({'|'.join(others)})\b")
    flags = [flag for room in others for flag in flags_of_group(others[room], room).values()]
    spellings = {spelling for flag in flags for spelling in flag.spellings}
    fields = {flag.name for flag in flags}
    added = {
        (f"--{name.replace('_', '-')}", value)
        for feature in others.values()
        for name, values in feature.adds.items()
        for value in values
    }
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    found, words = [], []
    for node in nodes:
        match node:
            case ast.Import(names):
                found += [name.name for name in names if of_other.match(name.name)]
            case ast.ImportFrom(module=str(module)) if of_other.match(module):
                found.append(module)
            case ast.keyword(arg=str(name)) if name in fields:
                found.append(name)
            case ast.Constant(value=str(value)) if node not in docstrings:
                words += value.split()
    found += [word for word in words if word in spellings]
    return found + [" ".join(pair) for pair in pairwise(words) if pair in added]


def programs(room: str, tree: Path) -> list[str]:
    """The files of tools/ that start a program of the room."""
    files = (tree / "tools").glob("*.py")
    return [file.name for file in files if f'program.run("{room}"' in file.read_text("utf-8")]


def without(tree: Path, *rooms: str) -> Path:
    """The source without these rooms, their tests, pages, programs and lines in the registry."""
    tree.mkdir()
    copy_source(tree, "megatron", "tools", "tests", "docs", "examples")
    copy_source(tree, "pretrain_gpt.py", "LICENSE", ".importlinter", ".pytest.ini", ".mypy.ini")
    shutil.rmtree(tree / "tests" / "features" / "together")  # tests that need several rooms
    registry = tree / "megatron" / "features" / "registry.py"
    for room in rooms:
        shutil.rmtree(tree / "megatron" / "features" / room)
        shutil.rmtree(tree / "tests" / "features" / room)
        (tree / "docs" / "features" / f"{room}.md").unlink()
        shutil.rmtree(tree / "tools" / "features" / room, ignore_errors=True)
        lines = registry.read_text().splitlines(keepends=True)
        kept = [line for line in lines if ROOMS[room].__name__ not in line]
        assert len(lines) - len(kept) == 2
        registry.write_text("".join(kept))
    return tree


def check(tree: Path, *tests: str) -> None:
    """Types and the quick tests of these folders, in the copy."""
    program(tree, "tools/write_flags_page.py")
    done = python(tree, MODULE, "mypy")
    assert done.returncode == 0, done.stdout
    done = python(tree, MODULE, "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert done.returncode in (0, 5), done.stdout  # 5: none of a room is quick


@pytest.mark.parametrize("room", ROOMS)
def test_no_other_file_names_a_feature(room):
    """Neither its module, nor its class; in the core, none reads a flag of it."""
    named = rf"features\.{room}\b|\b{ROOMS[room].__name__}\b"
    fields = "|".join(flags_of_group(ROOMS[room], room)) or "(?!)"
    reads = rf"""{named}|\b(config|logging|training|parallel)\.(\w+\.)?({fields})\b|\[["']({fields})["']"""
    found = []
    for top in ("megatron/**/*.py", "tools/**/*.py", "pretrain_gpt.py"):
        for file in ROOT.glob(top):
            path = file.relative_to(ROOT).as_posix()
            if f"features/{room}/" in path or path.startswith(MAY_IMPORT):
                continue
            if re.search(named if top.startswith("tools") else reads, file.read_text("utf-8")):
                found.append(path)
    assert found == ["megatron/features/registry.py"]


def test_tests_of_the_core_and_of_tools_need_no_feature():
    files = [*ROOT.glob("tests/*.py"), *ROOT.glob("tests/core/**/*.py")]
    for folder in ("tools", "peers", "campaigns/e2e", "campaigns/hostile"):
        files += ROOT.glob(f"tests/{folder}/**/*.py")
    found = {path.relative_to(ROOT).as_posix(): of_a_room(path.read_text()) for path in files}
    found["cases.txt"] = of_a_room(repr((ROOT / "tests/core/config/checks/cases.txt").read_text()))
    assert len(found) > 200 and {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_tests_of_a_feature_need_no_other(room):
    files = [path for path in (ROOT / "tests/features" / room).rglob("*") if path.is_file()]
    texts = {
        path.name: path.read_text() if path.suffix == ".py" else repr(path.read_text("utf-8"))
        for path in files
        if path.suffix in (".py", ".txt")
    }
    found = {name: of_a_room(text, room) for name, text in texts.items()}
    assert found and {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from megatron.features.boards import points", ["megatron.features.boards"]),
        ("def f():\n    import tools.features.spikes.docs", ["tools.features.spikes.docs"]),
        ("from megatron.features.registry import RunConfig", []),
        ("words = f'{x} --data-ledger {y}'", ["--data-ledger"]),
        ("words = [*SMALL, '--log-format', 'aurora']", ["--log-format aurora"]),
        ("words = [*SMALL, '--log-format', 'short']", []),
        ("make_run(spike_action='rewind')", ["spike_action"]),
        ("'--trace'", []),  # a docstring
    ],
)
def test_the_search_of_tests_finds(text, names):
    assert of_a_room(text) == names
    assert of_a_room(text, "boards") == [name for name in names if "boards" not in name]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_that_is_deleted_is_not_missed_by_imports(room, tmp_path):
    tree = without(tmp_path / "tree", room)
    assert "0 broken" in lint_imports(tree)
    done = python(tree, PROGRAM, "pretrain_gpt.py", *USED[room].split())
    assert done.returncode == 2
    assert {"flag-unknown", "value-not-a-choice"} & set(codes_of(done.stderr.splitlines()))
    for name in programs(room, tree):
        done = python(tree, PROGRAM, f"tools/{name}", "--help")
        assert done.returncode == 2 and "[feature-not-installed]" in done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize(
    "room",
    [pytest.param(one, marks=[pytest.mark.peers] * (one == "eval_tasks")) for one in ROOMS],
)
def test_a_room_that_is_deleted_is_not_missed_by_runs(room, tmp_path):
    """It resumes from a checkpoint that the feature was on for."""
    if room == "eval_tasks":
        pytest.importorskip("lm_eval")
    text = write_text(tmp_path / "text", 100)
    words = with_flags(SMALL, "--tokenizer-type", "ByteTokenizer", "--vocab-size", "257")
    words = [*with_flags(words, "--eval-iters", "0"), "--data-path", text, "--split", "100,0,0"]
    words += ["--train-iters", "4", "--exit-interval", "2", "--save-interval", "2"]
    save = tmp_path / "whole" / "save"
    whole = [*words, "--load", str(save), "--save", str(save)]
    whole += USED[room].format(tmp_path).split()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content.replace("FOLDER", str(tmp_path)))
    train(tmp_path / "whole", whole)
    shutil.copytree(save, tmp_path / "part" / "save")
    wanted = train(tmp_path / "whole", whole).series(*EXACT)

    tree = without(tmp_path / "tree", room)
    part = tmp_path / "part"
    words += ["--load", str(part / "save"), "--save", str(part / "save")]
    log = program(tree, "pretrain_gpt.py", *words, "--metrics-file", str(part / "metrics.jsonl"))
    (part / "log.0").write_text(log)
    done = Finished(part, 1)
    assert done.series(*EXACT) == wanted[2:] and done.resumes == [2]
    assert "saved-flag-unknown" not in log
    kept, last = (store.load(part / "save", n).state.features for n in (2, 4))
    assert kept.get(room) == last.get(room) and (room in kept) == (room == "spikes")
    program(tree, "tools/generate.py", str(part / "save"), "1 2", "--max-new-tokens", "2")


@pytest.mark.sweep
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_that_is_deleted_is_not_missed_by_programs(room, tmp_path):
    tree = without(tmp_path / "tree", room)
    for file in (tree / "tools").glob("*.py"):
        if file.name not in programs(room, tree):
            assert program(tree, f"tools/{file.name}", "--help").startswith("usage:")
    check(tree, "tests/features/test_rooms.py", "-k", "names_a_feature or need_no")


@pytest.mark.sweep
def test_core_and_tools_need_no_room(tmp_path):
    """Which of the hundreds of Megatron's arguments change nothing is known to megatron_cli alone:
    without it a converter asks for --ignore-config-key."""
    tree = without(tmp_path / "tree", *ROOMS)
    parallel = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    check(tree, "tests/core", "tests/tools", "--ignore=tests/tools/convert", *parallel)


@pytest.mark.sweep
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_needs_no_other(room, tmp_path):
    tree = without(tmp_path / "tree", *(other for other in ROOMS if other != room))
    more = ["tests/tools/convert"] * (room == "megatron_cli")
    check(tree, f"tests/features/{room}", *more)
