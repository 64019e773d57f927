"""Bugs planted into a copy of the source, and whether a test catches them."""

import ast
import builtins
import contextlib
import copy
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

import pytest

from tests.forkrun import PLANTED, ROOT, run_ranks

OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not sweep")


class Bug(NamedTuple):
    """In the function `where`, `old` is replaced by `new`; `test` must fail then.

    `where` is a dotted name (module, class, function). `old` and `new` are Python source: both an
    expression, both a keyword argument (`name=value`), or statements (`new` may be empty). They
    are compared as syntax trees, so layout, quotes, comments and line numbers do not matter.
    `mark` is the pytest mark of the check, or empty for every `make test`.
    """

    where: str
    old: str
    new: str
    test: str
    mark: str = "sweep"


class Place(NamedTuple):
    """Where a bug applies: `parent.field`, from position `index` on if it is a list."""

    parent: ast.AST
    field: str
    index: int
    old: list[ast.AST]
    new: list[ast.AST]

    def replace(self) -> None:
        """Put the new nodes in place of the old ones."""
        nodes = getattr(self.parent, self.field)
        if not isinstance(nodes, list):
            setattr(self.parent, self.field, self.new[0])
            return
        nodes[self.index : self.index + len(self.old)] = self.new
        if not nodes:
            nodes.append(ast.Pass())


def _expression(source: str) -> list[ast.AST]:
    return [ast.parse(source, mode="eval").body]


def _keyword(source: str) -> list[ast.AST]:
    call = ast.parse(f"_({source})", mode="eval").body
    return [] if call.args else call.keywords


def _statements(source: str) -> list[ast.AST]:
    return list(ast.parse(source).body)


def _readings(old: str, new: str) -> Iterator[tuple[list[ast.AST], list[ast.AST]]]:
    """The two as nodes: expressions if both are, otherwise keyword argument and statements."""
    for parse in (_expression, _keyword, _statements):
        try:
            pair = parse(old), parse(new)
        except SyntaxError:
            continue
        if pair[0] and (pair[1] or parse is _statements):
            yield pair
            if parse is _expression:
                return


def _same(nodes: list, others: list[ast.AST]) -> bool:
    """Are these values of a field the same nodes?"""
    if [type(node) for node in nodes] != [type(other) for other in others]:
        return False
    return [ast.dump(node) for node in nodes] == [ast.dump(other) for other in others]


def _definitions(tree: ast.AST, names: list[str]) -> list[ast.AST]:
    """The functions of this name within a file; a property and its setter are two."""
    found = [tree]
    for name in names:
        kinds = (ast.ClassDef, ast.FunctionDef)
        nodes = [node for parent in found for node in ast.walk(parent) if isinstance(node, kinds)]
        found = [node for node in nodes if node.name == name]
    return found


def source_of(where: str) -> tuple[Path, list[str]]:
    """The file of a dotted name, relative to the tree's root, and the names within that file."""
    names = where.split(".")
    for count in range(len(names) - 1, 0, -1):
        path = Path(*names[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / file).is_file():
                return file, names[count:]
    raise ValueError(f"{where}: no such module")


def places(bug: Bug, tree: ast.AST) -> list[Place]:
    """Every place of a parsed file that the bug would change."""
    found = []
    readings = list(_readings(bug.old, bug.new))
    for definition in _definitions(tree, source_of(bug.where)[1]):
        for parent in ast.walk(definition):
            for field, value in ast.iter_fields(parent):
                nodes = value if isinstance(value, list) else [value]
                for old, new in readings:
                    for index in range(len(nodes) - len(old) + 1):
                        if _same(nodes[index : index + len(old)], old):
                            found.append(Place(parent, field, index, old, new))
    return found


@functools.cache
def _parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def _unknown_names(place: Place, tree: ast.AST) -> set[str]:
    """Names that the planted text reads, and that neither it nor the file makes."""
    planted = [node for root in place.new for node in ast.walk(root)]
    read = {n.id for n in planted if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    made: set[str] = set()
    for node in [*ast.walk(tree), *planted]:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                made.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.alias(name=name, asname=alias):
                made.add(alias or name.partition(".")[0])
    return read - made - set(dir(builtins))


def problem(bug: Bug) -> str:
    """Why the bug cannot be planted, or nothing."""
    try:
        file, _ = source_of(bug.where)
    except ValueError as error:
        return str(error)
    tree = _parsed(ROOT / file)
    applies_to = places(bug, tree)
    if len(applies_to) != 1:
        return f"{bug.where} has {len(applies_to)} places, not one, that are: {bug.old}"
    if unknown := _unknown_names(applies_to[0], tree):
        return f"{bug.where} has no {', '.join(sorted(unknown))}: any test would catch a NameError"
    test_file, _, name = bug.test.partition("::")
    function = f"def {name.partition('[')[0]}("
    if not (ROOT / test_file).is_file() or name and function not in (ROOT / test_file).read_text():
        return f"no such test: {bug.test}"
    return ""


def copy_tree(folder: Path, bugs: Iterable[Bug]) -> Path:
    """A copy of what the tests of planted bugs need, without compiled C++ and with the bytecode.

    Each file that a bug will change is written from its syntax tree, so that a bug changes nothing
    but what it is about.
    """
    ignore = shutil.ignore_patterns("*.so")
    for part in ("megatron", "addons", "bench", "tests", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignore)
    for part in ("pretrain_gpt.py", "conftest.py", "pyproject.toml", ".pytest.ini"):
        shutil.copy2(ROOT / part, folder / part)
    for file in {source_of(bug.where)[0] for bug in bugs}:
        (folder / file).write_text(ast.unparse(_parsed(ROOT / file)) + "\n")
    return folder


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _functions(holder: ModuleType | type, module: str) -> Iterator[FunctionType]:
    """Those of a module and of its classes, behind decorators too."""
    for value in vars(holder).values():
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions(value, module)
        for name in ("__func__", "func", "fget", "fset"):
            yield from filter(None, [getattr(value, name, None)])
        while value is not None:
            yield value
            value = getattr(value, "__wrapped__", None)


def plant(bug: Bug) -> None:
    """Give the functions of this process the code that they have with the bug. Nothing changes
    where they are not those of an imported module, or nobody can find them in it."""
    file, _ = source_of(bug.where)
    tree = copy.deepcopy(_parsed(ROOT / file))
    [place] = places(bug, tree)
    place.replace()
    whole = compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True)
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(whole)}
    parts = file.with_suffix("").parts
    module = importlib.import_module(".".join(["megatron"] * (parts[0] == "addons") + [*parts]))
    for function in _functions(module, module.__name__):
        own = getattr(function, "__code__", None)
        code = own and codes.get((own.co_qualname, own.co_firstlineno))
        if code and code != own and own.co_filename == str(ROOT / file):
            with contextlib.suppress(ValueError):  # it has other cells
                function.__code__ = code


class Failures:
    """A plugin of pytest that counts tests that failed, but no errors around them."""

    number = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.number += report.failed and report.when == "call"


def run_here(rank: int, world: int, *tests: str) -> tuple[int, int]:
    """(exit code, failures) of tests in this rank; the ranks that they start are forked from the
    server that this one comes from."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    process.current_process()._config["daemon"] = False
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running
    failures = Failures()
    return int(pytest.main([*OPTIONS, *tests], plugins=[failures])), failures.number


class Selected:
    """A plugin of pytest that notes the tests that it would run, and the files that skip."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.found += [report.nodeid] * report.skipped

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found += [item.nodeid for item in session.items]


def left_out(rank: int, world: int, *tests: str) -> list[str]:
    """Those of which CI runs nothing, because of the mark sweep or of their names."""
    selected = Selected()
    pytest.main(["--collect-only", *OPTIONS[2:], *tests], plugins=[selected])
    return [
        test
        for test in tests
        if test.partition("::")[0] not in selected.found
        and not any(f"{each}[".startswith((f"{test}[", f"{test}::")) for each in selected.found)
    ]


def run(copy: Path, *tests: str, seconds: int = 300) -> subprocess.CompletedProcess:
    """Tests in a copy of the tree, until the first failure."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=seconds)


def caught(bug: Bug, copied: Callable[[], Path]) -> None:
    """Assert that the bug's test fails with the bug: in a forked process, which takes a tenth of the
    time, or else, as where programs are started, in a copy of the source, which is restored.

    Skips where the bug's test itself is skipped for a package that is not installed.
    """
    planted = {PLANTED: json.dumps(bug)}
    if run_ranks(1, run_here, bug.test, environ=planted, seconds=300) == [(1, 1)]:
        return
    copy = copied()
    path = copy / source_of(bug.where)[0]
    text = path.read_text()
    status = path.stat()
    tree = ast.parse(text)
    [place] = places(bug, tree)
    place.replace()
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    try:
        result = run(copy, bug.test)
    finally:
        path.write_text(text)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    output = result.stdout[-2000:] + result.stderr[-2000:]
    missing = re.search(r"^SKIPPED .*: (could not import .*)", result.stdout, re.MULTILINE)
    if missing and result.returncode != 1:
        pytest.skip(missing[1])
    assert result.returncode == 1 and " failed" in result.stdout, output
