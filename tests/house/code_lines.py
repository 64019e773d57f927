"""Counts the code that one training process imports: `python tests/house/code_lines.py [ROOT]`.

The files are the static import closure of pretrain_gpt.py within the repository: every module that
it imports, and those that these import, wherever the import statement stands, except below `if
TYPE_CHECKING`, which is not executed. Modules that megatron/optional.py imports by name are counted
separately.

code        physical lines without blank lines, comments and docstrings statements  nodes of the
syntax tree that are statements, docstrings apart; independent of the layout"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ENTRY = "pretrain_gpt.py"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class File:
    """The counts of one file. `functions` are (code lines, arguments, name)."""

    path: str
    raw: int
    code: int
    statements: int
    functions: tuple[tuple[int, int, str], ...]

    @property
    def folder(self) -> str:
        """The directory, relative to the root."""
        return self.path.rpartition("/")[0] or "."


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that may be modules: `from a import b` gives a and a.b."""
    unused = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def closure(root: Path, entries: Iterable[str], seen: Iterable[str] = ()) -> list[str]:
    """Paths below `root` of the files that `entries` are and import, without those of `seen`."""
    found = set(seen)
    todo = [entry for entry in entries if entry not in found]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in imported_names(ast.parse((root / path).read_text(encoding="utf-8"))):
            module = name.replace(".", "/") + ".py"
            if module not in found and (root / module).is_file():
                todo.append(module)
    return sorted(found.difference(seen))


def optional_modules(root: Path) -> list[str]:
    """The files of the modules in the tables of megatron/optional.py."""
    path = root / "megatron" / "optional.py"
    if not path.is_file():
        return []
    texts = {
        node.value.replace(".", "/") + ".py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return sorted(
        text for text in texts if text.startswith("megatron/") and (root / text).is_file()
    )


def _docstring_lines(tree: ast.AST) -> set[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }


def count(path: str, text: str) -> File:
    """The counts of a source text."""
    tree = ast.parse(text)
    docstrings = _docstring_lines(tree)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    } - docstrings
    statements = sum(
        isinstance(node, ast.stmt) and node.lineno not in docstrings for node in ast.walk(tree)
    )
    functions = tuple(
        (
            len(code.intersection(range(node.lineno, node.end_lineno + 1))),
            len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs),
            f"{path}:{node.lineno} {node.name}",
        )
        for node in ast.walk(tree)
        if isinstance(node, FUNCTION)
    )
    return File(path, len(text.splitlines()), len(code), statements, functions)


def count_files(root: Path, paths: Iterable[str]) -> list[File]:
    """The counts of several files."""
    return [count(path, (root / path).read_text(encoding="utf-8")) for path in paths]


def table(files: list[File]) -> list[str]:
    """One line per folder, and the total."""
    groups: dict[str, list[File]] = {}
    for file in files:
        groups.setdefault(file.folder, []).append(file)
    lines = [f"{'folder':36}{'files':>6}{'code':>8}{'statements':>12}{'raw':>8}"]
    for name, group in [*sorted(groups.items()), ("total", files)]:
        sums = (sum(getattr(file, key) for file in group) for key in ("code", "statements", "raw"))
        code, statements, raw = sums
        lines.append(f"{name:36}{len(group):6}{code:8,}{statements:12,}{raw:8,}")
    return lines


def largest(root: Path, files: list[File]) -> list[str]:
    """The longest function, file and argument list, and the fullest folder of the repository."""
    functions = [function for file in files for function in file.functions]
    code, _, longest = max(functions)
    arguments, widest = max((function[1], function[2]) for function in functions)
    file = max(files, key=lambda file: file.code)
    folders = {
        path.parent.relative_to(root).as_posix(): len(list(path.parent.glob("*.py")))
        for place in ("megatron", "tools")
        for path in (root / place).rglob("*.py")
    }
    fullest = max(folders, key=folders.__getitem__, default="-")
    return [
        f"longest function       {code} code lines: {longest}",
        f"longest file           {file.code} code lines: {file.path}",
        f"longest argument list  {arguments}: {widest}",
        f"fullest folder         {folders.get(fullest, 0)} files: {fullest}",
    ]


def main() -> None:
    """Print the report for the tree of the first argument, by default this repository."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    every = closure(root, [ENTRY])
    files = count_files(root, every)
    print(f"imported by one process of {ENTRY}, by folder")
    print("\n".join(table(files)))
    print("\n".join(largest(root, files)))
    by_choice = count_files(root, closure(root, optional_modules(root), every))
    if by_choice:
        print("\nimported by some runs only (megatron/optional.py and what its modules import)")
        print("\n".join(table(by_choice)))


if __name__ == "__main__":
    main()
