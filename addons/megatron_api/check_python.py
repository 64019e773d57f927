"""What keeps a pretraining script in Python from starting here, read from its text: imports, calls
of Megatron's names, arguments that it reads. Nothing of it is executed."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron import training
from megatron.arguments import flags_of
from megatron.config.command_line import foreign_flags
from megatron.features.registry import RunConfig
from megatron.small_files import read_text
from megatron.training import script_args

from .import_finder import MAX_BYTES
from .module_names import MODULES
from .script_imports import ABSENT, UNUSABLE, imports_of

_BRANCHES = (ast.If, ast.While, ast.For, ast.IfExp, ast.Try, ast.comprehension, ast.ExceptHandler)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What `script_args.begin` adds to the flags.
_OF_RUN = {"rank", "world_size", "data_parallel_size", "padded_vocab_size", "iteration"}
_MODELS_OF_TORCH = ("GPTModel",)  # looking at it would load torch


class Verdict(NamedTuple):
    """`names` of Megatron that a script imports, and its `problems`, one line each."""

    names: list[str]
    problems: list[str]


def check(text: str, path: Path) -> Verdict:
    """The verdict on the script of this text; of the files beside it that it imports, too. Raises
    SyntaxError."""
    names: list[str] = []
    problems: list[str] = []
    trees: dict[Path, ast.Module] = {}
    left = [(path, text)]
    while left:
        file, source = left.pop()
        trees[file] = ast.parse(source)
        for each in imports_of(source, file):
            beside = path.parent / f"{each.module}.py"
            if beside.is_file() and beside not in trees:
                left.append((beside, read_text(beside, limit=MAX_BYTES)))
            elif each.module.partition(".")[0] == "megatron" or each.remedy:
                names.append(str(each))
            if each.remedy and each.certain and f"{each}: {each.remedy}" not in str(problems):
                problems.append(f"{_place(file, path, each.line)}{each}: {each.remedy}")
            elif each.name == "*" and each.certain:
                problems.append(f"{_place(file, path, each.line)}import *: name what is imported")
    own = {name for tree in trees.values() for name in _own_arguments(tree)}
    for file, tree in trees.items():
        for line, problem in _File(tree, own, file == path).problems():
            problems.append(f"{_place(file, path, line)}{problem}")
    return Verdict(list(dict.fromkeys(names)), list(dict.fromkeys(problems)))


def _place(file: Path, script: Path, line: int) -> str:
    return f"line {line}: " if file == script else f"{file.name}, line {line}: "


def _known_arguments() -> set[str]:
    foreign = {flag.name for flag in foreign_flags(RunConfig).flags}
    return foreign | flags_of(RunConfig).keys() | _OF_RUN | script_args.RENAMED


def _own_arguments(tree: ast.AST) -> Iterator[str]:
    """Those that a file adds to the parser, or writes."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=words, keywords=named):
                for word in words:
                    if isinstance(word, ast.Constant):
                        yield str(word.value).lstrip("-").replace("-", "_")
                for each in named:
                    if each.arg == "dest" and isinstance(each.value, ast.Constant):
                        yield str(each.value.value)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


class _File:
    """The names of a file, and what is executed of it: the module's own statements, and functions
    that these name. A branch may be left out."""

    def __init__(self, tree: ast.Module, own_arguments: set[str], is_script: bool):
        self._tree = tree
        self._is_script = is_script
        self._arguments = _known_arguments() | own_arguments
        self._imported: dict[str, str] = {}  # of Megatron: by the name in this file
        self._bound = {*dir(builtins), "__file__", "__name__", "__doc__"}
        self._functions: dict[str, ast.AST] = {}
        for node in ast.walk(tree):
            self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                for alias in names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._bound.add(name)
                    if isinstance(node, ast.ImportFrom) and (node.module or "") in MODULES:
                        self._imported[name] = alias.name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._bound.add(name)
                self._functions[name] = node
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)) | ast.arg(arg=name):
                self._bound.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Global(names=[name]):
                self._bound.add(name)

    def problems(self) -> Iterator[tuple[int, str]]:
        """(line, what ends the script there)."""
        executed = list(self._executed())
        for node in executed:
            if isinstance(node, ast.ImportFrom) and node.level and self._is_script:
                yield node.lineno, "relative import: the script is of no package"
            if isinstance(node, ast.Name) and node.id not in self._bound:
                yield node.lineno, f"{node.id}: no such name"
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield from self._attribute(node)
            if isinstance(node, ast.Call):
                yield from self._call(node)
        nodes = ast.walk(self._tree)
        names = {self._imported.get(node.id) for node in nodes if isinstance(node, ast.Name)}
        if self._is_script and "pretrain" not in names:
            yield 1, "pretrain is not called: the script trains nothing"

    def _executed(self) -> Iterator[ast.AST]:
        seen: set[str] = set()
        left: list[ast.AST] = list(self._tree.body)
        while left:
            node = left.pop(0)
            if isinstance(node, _FUNCTIONS) and node.name not in seen:
                left += node.decorator_list
                continue
            yield from _certain(node)
            for name in (each.id for each in ast.walk(node) if isinstance(each, ast.Name)):
                if name in self._functions and name not in seen:
                    seen.add(name)
                    left += self._functions[name].body  # type: ignore[attr-defined]

    def _attribute(self, node: ast.Attribute) -> Iterator[tuple[int, str]]:
        owner = node.value
        is_call = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name)
        called = self._imported.get(owner.func.id) if is_call else None  # type: ignore[attr-defined]
        name = owner.id if isinstance(owner, ast.Name) else ""
        if (name == "args" or called == "get_args") and node.attr not in self._arguments:
            yield node.lineno, f"get_args().{node.attr}: there is no such argument"
        public = self._imported.get(name)
        if public == "ModelType" and node.attr != "encoder_or_decoder":
            yield node.lineno, f"ModelType.{node.attr}: {ABSENT['BertModel']}"
        if public in ("mpu", "parallel_state", "tensor_parallel") and not training.has(node.attr):
            yield node.lineno, f"{public}.{node.attr}: not in this suite"

    def _call(self, node: ast.Call) -> Iterator[tuple[int, str]]:
        name = self._imported.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if name in UNUSABLE:
            yield node.lineno, f"{name}: cannot be used here; use {UNUSABLE[name]}"
        if name is None or name in UNUSABLE or name in _MODELS_OF_TORCH or not training.has(name):
            return
        keywords = [each.arg for each in node.keywords]
        if any(isinstance(each, ast.Starred) for each in node.args) or None in keywords:
            return
        function = getattr(importlib.import_module("megatron.training"), name)
        with contextlib.suppress(ValueError):  # a class that takes anything
            signature = inspect.signature(function)
            try:
                signature.bind(*node.args, **dict.fromkeys(map(str, keywords)))
            except TypeError as error:
                yield node.lineno, f"{name}: {error}"


def _certain(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and what is executed with it, whatever its conditions are."""
    yield node
    is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    if isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
        return
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, _BRANCHES) and not is_main:
        children = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else []
    if isinstance(node, ast.BoolOp):
        children = [node.values[0]]
    for child in children:
        yield from _certain(child)
