"""Each bug of the catalogue is planted, and its test must fail then."""

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forkrun import ROOT, run_ranks
from tests.planted import bugs
from tests.planted.catalogue import BUGS


@pytest.fixture(scope="session")
def copied_tree(tmp_path_factory) -> Callable[[], Path]:
    """A copy of the source for all bugs of this process that need one, one bug at a time."""
    folder = tmp_path_factory.mktemp("planted")
    return functools.cache(lambda: bugs.copy_tree(folder / "tree", BUGS.values()))


def test_every_bug_applies_to_exactly_one_place():
    problems = [f"{name}: {text}" for name, bug in BUGS.items() if (text := bugs.problem(bug))]
    assert not problems, "\n".join(problems)


@pytest.mark.campaign
def test_ci_runs_what_catches_each_bug():
    """Whatever the mark of the bug's own check is: its test carries no mark sweep."""
    assert run_ranks(1, bugs.left_out, *sorted({bug.test for bug in BUGS.values()})) == [[]]


def test_the_page_of_silent_errors_names_planted_bugs_and_their_tests():
    lines = (ROOT / "docs" / "silent_errors.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.count("|") == 5][
        2:
    ]
    assert rows
    for _, _thread, _what, name, test, _ in rows:
        assert BUGS[name].test.endswith((f"[{test}]", f"::{test}"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[getattr(pytest.mark, mark) for mark in bug.mark.split()])
        for name, bug in BUGS.items()
    ],
)
def test_a_planted_bug_is_caught(name, copied_tree):
    bugs.caught(BUGS[name], copied_tree)


SOURCE = """
def f(a, b):
    if a.b > 0:
        a.g(size = [1], more = b)
    return [x for x in (a . b , b)]

class C:
    def f(self):
        return a.b, a.b
"""


@pytest.mark.parametrize(
    ("where", "old", "new", "result"),
    [
        ("f", "(a.b, b)", "()", "return [x for x in ()]"),
        ("f", "size=[1]", "size=[]", "a.g(size=[], more=b)"),
        ("f", "a.g(size=[1], more=b)", "", "if a.b > 0:\n        pass"),
        ("f", "return [x for x in (a.b, b)]", "a = 1\nreturn a", "    a = 1\n    return a"),
        ("f", "a.b", "0", None),
        ("f", "a.c", "0", None),
        ("g", "a.b", "0", None),
        ("C.f", "a.b, a.b", "None", "        return None"),
    ],
)
def test_one_place_is_found_by_its_meaning_and_replaced(where, old, new, result):
    tree = ast.parse(SOURCE)
    found = bugs.places(bugs.Bug(f"pretrain_gpt.{where}", old, new, ""), tree)
    assert (len(found) == 1) == (result is not None)
    if result:
        found[0].replace()
        assert result in ast.unparse(tree)


@pytest.mark.parametrize(
    ("where", "old", "test"),
    [
        ("megatron.no_such.f", "a", "tests/planted/test_planted_bugs.py"),
        ("pretrain_gpt.forward_step", "no_such", "tests/planted/test_planted_bugs.py"),
        ("pretrain_gpt.forward_step", "losses.sum", "tests/planted/no_such.py"),
        ("pretrain_gpt.forward_step", "losses.sum", "tests/planted/bugs.py::test_no_such[1]"),
    ],
)
def test_a_bug_that_cannot_be_planted_is_reported(where, old, test):
    assert bugs.problem(bugs.Bug(where, old, "None", test))


@pytest.mark.sweep
def test_without_a_bug_these_tests_pass(copied_tree):
    """A test that always fails in the copy would seem to catch every bug."""
    tests = sorted({bug.test for bug in BUGS.values()})
    assert run_ranks(1, bugs.run_here, *tests, seconds=1800) == [(0, 0)]
    result = bugs.run(copied_tree(), *tests, seconds=1800)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
