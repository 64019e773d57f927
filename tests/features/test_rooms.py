"""Each feature is a room that can be deleted: nothing else names it, and a copy without it trains,
resumes what the feature was on in, and converts."""

from __future__ import annotations

import re
import shutil
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
# the harness that injects faults into every part
MAY_IMPORT = "tools/benchmarks/"


def programs(room: str, tree: Path) -> list[str]:
    """The files of tools/ that start a program of the room."""
    files = (tree / "tools").glob("*.py")
    return [file.name for file in files if f'program.run("{room}"' in file.read_text("utf-8")]


def without(room: str, tree: Path) -> Path:
    """The source without a room, its tests, its page, its program and its lines in the registry."""
    tree.mkdir()
    copy_source(tree, "megatron", "tools", "tests", "docs", "examples")
    copy_source(tree, "pretrain_gpt.py", ".importlinter", ".pytest.ini", ".mypy.ini")
    shutil.rmtree(tree / "megatron" / "features" / room)
    for folder in (room, "together"):  # tests that need several rooms
        shutil.rmtree(tree / "tests" / "features" / folder)
    (tree / "docs" / "features" / f"{room}.md").unlink()
    shutil.rmtree(tree / "tools" / "features" / room, ignore_errors=True)
    registry = tree / "megatron" / "features" / "registry.py"
    lines = registry.read_text().splitlines(keepends=True)
    kept = [line for line in lines if ROOMS[room].__name__ not in line]
    assert len(lines) - len(kept) == 2
    registry.write_text("".join(kept))
    return tree


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


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_that_is_deleted_is_not_missed_by_imports(room, tmp_path):
    tree = without(room, tmp_path / "tree")
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
    words = with_flags(words, "--log-format", "short")  # SMALL has that of a room
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

    tree = without(room, tmp_path / "tree")
    part = tmp_path / "part"
    words += ["--load", str(part / "save"), "--save", str(part / "save")]
    log = program(tree, "pretrain_gpt.py", *words, "--metrics-file", str(part / "metrics.jsonl"))
    (part / "log.0").write_text(log)
    assert Finished(part, 1).series(*EXACT) == wanted[2:] and "saved-flag-unknown" not in log
    kept, last = (store.load(part / "save", n).state.features for n in (2, 4))
    assert kept.get(room) == last.get(room) and (room in kept) == (room == "spikes")
    program(tree, "tools/generate.py", str(part / "save"), "1 2", "--max-new-tokens", "2")


@pytest.mark.sweep
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_that_is_deleted_is_not_missed_by_programs_and_tests(room, tmp_path):
    tree = without(room, tmp_path / "tree")
    for file in (tree / "tools").glob("*.py"):
        if file.name not in programs(room, tree):
            assert program(tree, f"tools/{file.name}", "--help").startswith("usage:")
    program(tree, "tools/write_flags_page.py")
    here = "--ignore=tests/features/test_rooms.py"
    tests = (
        "tests/features",
        here,
        "tests/core/training/test_hooks.py",
        "tests/house/test_flags.py",
    )
    text = "import pytest\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    done = python(tree, text, *tests)
    assert done.returncode == 0, done.stdout
