"""Values of an InternLM python config, worked out without running it: literals, arithmetic, names,
dict(), join, os.environ.

What else a file holds (imports but `import os`, calls, lambdas, comprehensions, attributes,
loops) is refused by its line.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.small_files import read_bytes

MAX_BYTES = 1 << 20
MAX_TEXT = 1 << 16  # characters of a text, elements of a list
MAX_NUMBER = 1 << 128
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "round": round,
    "min": min,
    "max": max,
}
_SCALARS = (int, float, str, bool, type(None))


MAX_VALUES = 100_000  # of one name, those that are repeated counted each time


def _expanded_size(value: Any, sizes: dict[int, int]) -> int:
    """How many values an expression writes out: lists that refer to one another share theirs, and a
    few lines of them can stand for more than any memory holds."""
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in sizes:
        elements = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_expanded_size(element, sizes) for element in elements)
    return sizes[id(value)]


class ConfigError(ValueError):
    """The file cannot be read as a config; the text says line, what is there and what is
    allowed."""


def read_config(
    path: Path, environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, Any], dict[str, int]]:
    """(values by name, line of each name's last assignment) of a config file. Raises ConfigError;
    executes nothing."""
    try:
        data = read_bytes(path, MAX_BYTES)
        tree = ast.parse(data, str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{path}{f', line {line}' if line else ''}: not Python: {getattr(error, 'msg', error)}"
        ) from error
    reader = _Reader(path, environment)
    for statement in tree.body:
        try:
            reader.take(statement)
        except RecursionError:
            raise ConfigError(f"{path}, line {statement.lineno}: too deeply nested") from None
    return reader.values, reader.lines


class _Reader:
    def __init__(self, path: Path, environment: Mapping[str, str]):
        self.path = path
        self.environment = environment
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.has_os = False

    def refuse(self, node: ast.AST, construct: str) -> ConfigError:
        """The error for a node."""
        return ConfigError(
            f"{self.path}, line {getattr(node, 'lineno', '?')}: {construct}; a config is read, not "
            "run: it "
            'may hold literals, arithmetic, names given above, dict(...), "...".join([...]), '
            "os.environ"
        )

    def take(self, node: ast.stmt) -> None:
        """One statement."""
        if isinstance(node, ast.Import) and [(name.name, name.asname) for name in node.names] == [
            ("os", None)
        ]:
            self.has_os = True
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            pass  # a text alone is a comment
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if node.value is None or len(names) < len(targets):
                raise self.refuse(node, f"cannot assign to {ast.unparse(targets[0])[:60]}")
            value = self.value(node.value)
            if _expanded_size(value, {}) > MAX_VALUES:
                raise self.refuse(node, f"has more than {MAX_VALUES} values")
            for name in names:
                self.values[name], self.lines[name] = value, node.lineno
        else:
            raise self.refuse(node, f"{ast.unparse(node).splitlines()[0][:60]!r} is not allowed")

    def value(self, node: ast.expr) -> Any:
        """The value of an expression."""
        kinds: dict[type[ast.expr], Callable[[Any], Any]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.List: self._sequence,
            ast.Tuple: self._sequence,
            ast.Dict: self._dict,
            ast.Subscript: self._subscript,
            ast.Call: self._call,
            ast.JoinedStr: self._joined,
        }
        work = kinds.get(type(node))
        if work is None:
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is not allowed")
        try:
            result = work(node)
        except ConfigError:
            raise
        except (ArithmeticError, TypeError, ValueError, LookupError) as error:
            reason = f"no {error}" if isinstance(error, LookupError) else error
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r}: {reason}") from error
        if (
            isinstance(result, str | list | tuple)
            and len(result) > MAX_TEXT
            or (isinstance(result, int) and abs(result) > MAX_NUMBER)
            or isinstance(result, complex)
        ):
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is too large")
        return result

    def _constant(self, node: ast.Constant) -> Any:
        if not isinstance(node.value, _SCALARS):
            raise self.refuse(node, f"{ast.unparse(node)[:60]} is not allowed")
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id not in self.values:
            raise self.refuse(node, f"the name {node.id} has no value above this line")
        return self.values[node.id]

    def _binary(self, node: ast.BinOp) -> Any:
        work = _BINARY.get(type(node.op))
        left = self.value(node.left)
        right = self.value(node.right)
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        texts = (
            isinstance(node.op, ast.Add)
            and type(left) is type(right)
            and isinstance(left, str | list | tuple)
        )
        if work is None or not (numbers or texts):
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is not allowed")
        if isinstance(node.op, ast.Pow) and (abs(right) > 128 or abs(left) > 1 << 32):
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is too large")
        return work(left, right)

    def _unary(self, node: ast.UnaryOp) -> Any:
        if type(node.op) not in _UNARY:
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is not allowed")
        return _UNARY[type(node.op)](self.value(node.operand))

    def _sequence(self, node: ast.List | ast.Tuple) -> Any:
        values = [self.value(element) for element in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        keys = [key for key in node.keys if key is not None]
        if len(keys) < len(node.keys):
            raise self.refuse(node, "** within {} is not allowed")
        return {
            self.value(key): self.value(element)
            for key, element in zip(keys, node.values, strict=True)
        }

    def _subscript(self, node: ast.Subscript) -> Any:
        if ast.unparse(node.value) == "os.environ":
            return self._environment(node, self.value(node.slice))
        held = self.value(node.value)
        if not isinstance(held, dict | list | tuple):
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is not allowed")
        return held[self.value(node.slice)]

    def _environment(self, node: ast.expr, name: Any, *default: Any) -> Any:
        if not self.has_os or not isinstance(name, str):
            raise self.refuse(
                node, f"{ast.unparse(node)[:60]!r} needs `import os` above and a name"
            )
        if name not in self.environment and not default:
            raise self.refuse(node, f"the environment variable {name} is not set")
        return self.environment.get(name, *default)

    def _call(self, node: ast.Call) -> Any:
        called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
        if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
            argument.arg is None for argument in node.keywords
        ):
            raise self.refuse(node, f"* and ** in {ast.unparse(node)[:60]!r} are not allowed")
        function = node.func
        joiner = (
            function.value
            if isinstance(function, ast.Attribute)
            and function.attr == "join"
            and isinstance(function.value, ast.Constant)
            and isinstance(function.value.value, str)
            else None
        )
        if called not in _CALLS and called not in ("os.environ.get", "os.getenv") and not joiner:
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is not allowed")
        values = [self.value(argument) for argument in node.args]
        named = {argument.arg: self.value(argument.value) for argument in node.keywords}
        if called == "dict" and not values:
            return named
        if named or called == "dict":
            raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is not allowed")
        if called in ("os.environ.get", "os.getenv"):
            return self._environment(node, *(values if len(values) > 1 else [*values, None]))
        if joiner:
            [parts] = values
            return self.value(joiner).join(parts)
        return _CALLS[called](*values)

    def _joined(self, node: ast.JoinedStr) -> str:
        texts = []
        for node_value in node.values:
            if isinstance(node_value, ast.FormattedValue):
                if node_value.conversion != -1 or node_value.format_spec is not None:
                    raise self.refuse(node, "formats within f-strings are not allowed")
                node_value = node_value.value
            value = self.value(node_value)
            if not isinstance(value, _SCALARS):
                raise self.refuse(node, f"{ast.unparse(node)[:60]!r} is not allowed")
            texts.append(str(value))
        return "".join(texts)
