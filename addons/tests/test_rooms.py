"""Each add-on can be deleted with its folder, and all at once: the core names none, and a copy
without them trains, resumes what they were on in, and says what is missing."""

from __future__ import annotations

import ast
import functools
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.arguments import flags_of_group
from megatron.checkpoint import reading
from megatron.features.registry import FEATURES
from tests.copies import PROGRAM, copy_source, lint_imports, program, python
from tests.forkrun import ROOT
from tests.load_tool import room_program
from tests.problems import codes_of
from tests.runs import EXACT, SMALL, Finished, train, with_flags, write_text

# flags under which each does something in a run; some have programs alone
USED = {
    "averaging": "--ema-decay 0.9",
    "convert": "--save-hf-interval 2",
    "datasets": "",
    "distillation": "--export-kd-teacher-load {}/teacher/save --export-kd-cfg {}/kd.yaml",
    "engine": "",
    "fim": "--fim-data --fim-prefix-token \1 --fim-middle-token \2 --fim-suffix-token \3 --fim-pad-token \4",
    "finetuning": "--packed-samples",
    "internlm": "--log-format internlm",
    "lab": "--trace-ranks last",
    "loss_weights": "--data-loss-weights 2",
    "megatron_api": "",
    "megatron_cli": "--log-format aurora",
    "object_storage": "",
    "ops": "--data-ledger {}/ledger --run-events --crash-loop-limit 1 --log-straggler --gpu-sniff-test-interval 2 --verify-step-interval 1 "
    "--verify-step-action majority --eval-tasks {}/task.yaml --eval-tasks-interval 1",
    "planner": "",
    "ray": "",
    "serving": "",
    "spikes": "",
    "stages": "--phase-transition-iterations 2",
    "weighted_splits": "--train-weighted-split-paths TRAIN:1:0:1:x",
}
ADDONS = {
    name: [each for each in FEATURES if each.__module__.startswith(f"megatron.addons.{name}.")]
    for name in USED
}
# a program of the core with flags under which an add-on without flags or programs does something
PROGRAMS = {
    "megatron_api": "tools/check_script.py pretrain_gpt.py",
    "object_storage": f"pretrain_gpt.py {' '.join(SMALL)} --mock-data --load s3://bucket/run",
    "ray": "tools/preprocess_data.py --cluster ray",
}
NAMES = {"engine": "Engine"}  # of megatron.training, which an add-on brings
# files in the folder of the run that these flags name
FILES = {
    "kd.yaml": "skip_lm_loss: false\nkd_loss_scale: 1.0e-30\n",  # too little to change a bit
    "task.yaml": "task: sky\ndataset_path: json\ndataset_kwargs: {data_files: {test: FOLDER/sky.jsonl}}\n"
    "test_split: test\noutput_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
    "metric_list: [{metric: acc}]\n",
    "sky.jsonl": '{"q": "1 2", "a": " 3"}\n',
}
MODULE = "import runpy, sys\nrunpy.run_module(sys.argv.pop(1), run_name='__main__')\n"
PARALLEL = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]


def of_an_add_on(text: str, *own: str) -> list[str]:
    """What a Python file of tests has of an add-on other than these: imports, flags, values that it
    adds to a flag of the core, and keyword arguments named as its fields."""
    others = {name: features for name, features in ADDONS.items() if name not in own}
    of_other = re.compile(rf"megatron\.addons\.({'|'.join(others) or '(?!)'})\b")
    features = [feature for each in others.values() for feature in each]
    flags = [flag for each in features for flag in flags_of_group(each, "").values()]
    spellings = {spelling for flag in flags for spelling in flag.spellings}
    fields = {flag.name for flag in flags}
    added = {
        (f"--{name.replace('_', '-')}", value)
        for feature in features
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


@functools.cache
def text_of(file: Path) -> tuple[str, frozenset[str]]:
    """A file's text, and the words in it."""
    text = file.read_text("utf-8")
    return text, frozenset(re.findall(r"\w+", text))


def programs(addon: str, tree: Path) -> list[str]:
    """The files of tools/ that start a program of the add-on."""
    files = (tree / "tools").glob("*.py")
    return [file.name for file in files if f"addons.{addon}." in room_program(file)]


def without(tree: Path, *addons: str) -> Path:
    """The source without these add-ons, and without the tests that need several."""
    tree.mkdir()
    copy_source(tree, "megatron", "addons", "bench", "tools", "tests", "docs", "examples")
    files = [path.name for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    copy_source(tree, ".ci", *files)
    for name in (*addons, "tests"):
        shutil.rmtree(tree / "addons" / name)
    return tree


def check_types(tree: Path) -> None:
    """mypy, in the copy, with what `make lint` has found of files that are the same."""
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", tree / ".mypy_cache")
    names = ["addons"] * any((tree / "addons").iterdir())
    done = python(tree, MODULE, "mypy", "megatron", "tools", "pretrain_gpt.py", *names)
    assert done.returncode == 0, done.stdout


def check(tree: Path, *tests: str) -> None:
    """These tests, in the copy."""
    program(tree, "tools/write_flags_page.py")
    done = python(tree, MODULE, "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout[-5000:]


def test_every_add_on_is_here():
    folders = {path.parent.name for path in ROOT.glob("addons/*/*.py")} - {"tests"}
    assert folders | {path.parts[-3] for path in ROOT.glob("addons/*/*/feature.py")} == set(USED)


@pytest.mark.parametrize("addon", ADDONS)
def test_no_file_of_the_core_names_an_add_on(addon):
    """Neither its modules, nor its classes; none reads a flag of it. Files of tools/ may start it."""
    features = ADDONS[addon]
    own = [name for each in features for name in flags_of_group(each, "")]
    fields = "|".join(own) or "(?!)"
    classes = "|".join(feature.__name__ for feature in features) or "(?!)"
    own += [addon, *classes.split("|")]
    named = re.compile(rf"addons\.{addon}\b|\b({classes})\b")
    reads = re.compile(
        rf"\b(config|logging|training|parallel)\.(\w+\.)?({fields})\b|\[[\"']({fields})[\"']"
    )
    started = {ROOT / "tools" / name for name in programs(addon, ROOT)}
    found = []
    for top in ("megatron/**/*.py", "tools/**/*.py", "pretrain_gpt.py"):
        for file in set(ROOT.glob(top)) - started:
            text, words = text_of(file)
            if words.isdisjoint(own):
                continue
            if named.search(text) or (not top.startswith("tools") and reads.search(text)):
                found.append(file.relative_to(ROOT).as_posix())
    assert found == []


def test_tests_of_the_core_and_of_tools_need_no_add_on():
    files = [*ROOT.glob("tests/*.py"), *ROOT.glob("tests/core/**/*.py")]
    for folder in ("features", "tools", "peers", "campaigns/e2e", "campaigns/hostile"):
        files += ROOT.glob(f"tests/{folder}/**/*.py")
    found = {path.relative_to(ROOT).as_posix(): of_an_add_on(path.read_text()) for path in files}
    found["cases.txt"] = of_an_add_on(
        repr((ROOT / "tests/core/config/checks/cases.txt").read_text())
    )
    assert len(found) > 200 and {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("addon", ADDONS)
def test_tests_of_an_add_on_need_no_other(addon):
    """But the converter, and rows of packed samples."""
    files = [path for path in (ROOT / "addons" / addon / "tests").rglob("*") if path.is_file()]
    texts = {
        path.name: path.read_text() if path.suffix == ".py" else repr(path.read_text("utf-8"))
        for path in files
        if path.suffix in (".py", ".txt")
    }
    found = {
        name: of_an_add_on(text, addon, "convert", "finetuning") for name, text in texts.items()
    }
    assert found and {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from megatron.addons.ops import stragglers", ["megatron.addons.ops"]),
        ("def f():\n    import megatron.addons.lab.trace", ["megatron.addons.lab.trace"]),
        ("from megatron.features.registry import RunConfig", []),
        ("words = f'{x} --data-ledger {y}'", ["--data-ledger"]),
        ("words = [*SMALL, '--log-format', 'aurora']", ["--log-format aurora"]),
        ("words = [*SMALL, '--log-format', 'short']", []),
        ("make_run(eval_tasks_interval=1)", ["eval_tasks_interval"]),
        ("'--trace'", []),  # a docstring
    ],
)
def test_the_search_of_tests_finds(text, names):
    assert of_an_add_on(text) == names
    assert of_an_add_on(text, *ADDONS) == []


@pytest.mark.parametrize(
    "addon",
    [
        pytest.param(name, marks=[pytest.mark.campaign] * (name not in ("internlm", "ray")))
        for name in ADDONS
    ],
)
def test_an_add_on_that_is_deleted_is_not_missed_by_imports(addon, tmp_path):
    """Its flags and its programs are one error each."""
    tree = without(tmp_path / "tree", addon)
    assert "0 broken" in lint_imports(tree)
    if USED[addon]:
        done = python(tree, PROGRAM, "pretrain_gpt.py", *USED[addon].split())
        assert done.returncode == 2
        refusals = {"flag-unknown", "value-not-a-choice", "megatron-flag-not-supported"}
        assert refusals & set(codes_of(done.stderr.splitlines()))
    for name in programs(addon, tree):
        done = python(tree, PROGRAM, f"tools/{name}", "--help")
        assert done.returncode == 2 and codes_of([done.stderr.strip()]) == ["feature-not-installed"]
    if words := PROGRAMS.get(addon, "").split():
        done = python(tree, PROGRAM, *words)
        assert done.returncode == 2
        assert "feature-not-installed" in codes_of(done.stderr.splitlines())
    if name := NAMES.get(addon, ""):
        code = f"from megatron import training; print(training.has({name!r}))"
        assert [python(each, code).stdout.split()[-1] for each in (ROOT, tree)] == ["True", "False"]
    assert USED[addon] or programs(addon, tree) or words or name


def words_of(folder: Path) -> list[str]:
    """The command line of a small run of four iterations, which ends after each two."""
    text = write_text(folder / "text", 100)
    words = with_flags(SMALL, "--tokenizer-type", "ByteTokenizer", "--vocab-size", "257")
    words = [*with_flags(words, "--eval-iters", "0"), "--data-path", text, "--split", "100,0,0"]
    return [*words, "--train-iters", "4", "--exit-interval", "2", "--save-interval", "2"]


def check_resume(tree: Path, folder: Path, used: str) -> None:
    """The tree resumes from a checkpoint that these flags were on for, as a run of the whole."""
    words = words_of(folder)
    save = folder / "whole" / "save"
    whole = [*words, "--load", str(save), "--save", str(save), *used.format(*[folder] * 2).split()]
    for name, content in FILES.items():
        (folder / name).write_text(content.replace("FOLDER", str(folder)))
    if "/teacher/" in used:
        train(folder / "teacher", [*words, "--save", str(folder / "teacher" / "save")])
    train(folder / "whole", whole)
    shutil.copytree(save, folder / "part" / "save")
    wanted = train(folder / "whole", whole).series(*EXACT)

    part = folder / "part"
    words += ["--load", str(part / "save"), "--save", str(part / "save")]
    log = program(tree, "pretrain_gpt.py", *words, "--metrics-file", str(part / "metrics.jsonl"))
    (part / "log.0").write_text(log)
    done = Finished(part, 1)
    assert done.series(*EXACT) == wanted[2:] and done.resumes == [2]
    assert "saved-flag-unknown" not in log
    kept, last = (reading.load(part / "save", n).state.features for n in (2, 4))
    assert kept.keys() == last.keys() >= {"spikes"}  # that feature is the core's
    if used:
        program(tree, "tools/generate.py", str(part / "save"), "1 2", "--max-new-tokens", "2")


@pytest.mark.campaign
@pytest.mark.parametrize(
    "addon", [pytest.param(name, marks=[pytest.mark.peers] * (name == "ops")) for name in ADDONS]
)
def test_an_add_on_that_is_deleted_is_not_missed_by_runs(addon, tmp_path):
    if addon == "ops":
        pytest.importorskip("lm_eval")
    # their order of samples is one that a copy without them refuses, by its own code
    other = ("fim", "finetuning", "stages", "weighted_splits")
    used = "" if addon in other else USED[addon]
    check_resume(without(tmp_path / "tree", addon), tmp_path, used)


@pytest.mark.campaign
def test_the_core_needs_no_add_on(tmp_path):
    """Types, its tests are found, a step's parity and a plan's sizes, the quickstart, a resume of
    what add-ons were on in."""
    tree = without(tmp_path / "tree", *ADDONS)
    check_types(tree)
    check(tree, "--collect-only", "tests")
    quick = ["tests/core/parity/test_layouts.py", "tests/core/config/plan/test_costs.py"]
    check(tree, *quick, "-k", "not experts", *PARALLEL)
    check(tree, "-m", "sweep", "tests/campaigns/examples/test_quickstart.py", "-k", "it_learns")
    check_resume(tree, tmp_path, f"{USED['internlm']} {USED['lab']} --log-straggler")


@pytest.mark.sweep
@pytest.mark.parametrize("addon", ADDONS)
def test_an_add_on_that_is_deleted_is_not_missed_by_programs(addon, tmp_path):
    tree = without(tmp_path / "tree", addon)
    for file in (tree / "tools").glob("*.py"):
        if file.name not in programs(addon, tree):
            assert program(tree, f"tools/{file.name}", "--help").startswith("usage:")


@pytest.mark.sweep
def test_all_tests_of_the_core_need_no_add_on(tmp_path):
    check(
        without(tmp_path / "tree", *ADDONS),
        "tests/core",
        "tests/features",
        "tests/tools",
        *PARALLEL,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("addon", ADDONS)
def test_an_add_on_needs_no_other(addon, tmp_path):
    """But packed samples and the converter, which asks Megatron's tables and the flags of QK-clip
    which arguments change nothing: without them it asks for --ignore-config-key. A launch script is
    checked with the Python script that it starts, which reads any of Megatron's arguments, and the
    dump has the flags of profiles."""
    others = {
        "convert": {"megatron_cli", "ops"},
        "internlm": {"megatron_cli", "ops"},
        "megatron_api": {"fim", "megatron_cli", "ops"},
        "megatron_cli": {"megatron_api", "ops"},
    }
    kept = {addon, "convert", "finetuning"} | others.get(addon, set())
    check(without(tmp_path / "tree", *(ADDONS.keys() - kept)), f"addons/{addon}", *PARALLEL)


def test_a_command_line_reads_no_more_of_an_add_on_than_its_flags():
    """And none of them without one."""
    code = (
        "import os, runpy, sys, torch\n"
        "for flags in ([], ['--log-straggler']):\n"
        "    if os.fork() == 0:\n"
        "        sys.argv += flags\n"
        "        runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "        modules = [m for n, m in sys.modules.items() if n.startswith('megatron.addons.')]\n"
        "        print('modules', *(m.__name__ for m in modules if m.__file__), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    words = [*SMALL, "--mock-data", "--train-iters", "9", "--dry-run"]
    lines = python(ROOT, code, *words).stdout.splitlines()
    found = [line.split()[1:] for line in lines if line.startswith("modules")]
    read = [{name.rpartition(".")[2] for name in names} for names in found]
    assert read == [set(), {"feature"}]
