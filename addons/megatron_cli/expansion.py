"""What `${...}` and `$((...))` of a shell script are, given the values of variables."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Value = str | list[str]  # a string, or an array
MAX_VALUE = 1 << 18  # characters of a variable; an element of an array is one more
_BRACES = re.compile(
    r"(?P<sign>[!#]?)(?P<name>\w+|[@*#?])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.S
)
_SUMS: Mapping[type[ast.AST], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass
class Variables:
    """What a script has set, and its positional parameters; `fixed` wins over what it assigns."""

    values: dict[str, Value] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    fixed: frozenset[str] = frozenset()

    def get(self, name: str) -> Value | None:
        """A value; None for what is not set."""
        if name in ("@", "*"):
            return list(self.parameters)
        if name in ("#", "?"):
            return str(len(self.parameters)) if name == "#" else "0"
        if name.isdigit() and name != "0":
            return dict(enumerate(self.parameters, 1)).get(int(name))
        return self.values.get(name)

    def set(self, name: str, value: Value) -> None:
        """Assign, but for what is fixed. Raises ValueError for a value that only grows."""
        if len(value) + sum(map(len, value)) > MAX_VALUE:
            raise ValueError(f"the variable {name[:80]} has more than {MAX_VALUE} characters")
        if name not in self.fixed:
            self.values[name] = value


def first(value: Value | None) -> str | None:
    """An array without an index is its first element."""
    return value if isinstance(value, str) or value is None else next(iter(value), "")


def braces(text: str, variables: Variables, expand: Callable[[str], str]) -> Value | None:
    """The value of `${text}`; None for a variable that is not set. `expand` a text within it."""
    match = _BRACES.fullmatch(text)
    if match is None:
        return None
    name, index = match["name"], match["index"]
    value = variables.get(name)
    if match["sign"] == "!":
        value = variables.get(first(value) or "")
    if index not in (None, "@", "*"):
        index = expand(index)
        element = variables.get(f"{name}[{index}]")
        subscript = arithmetic(index, variables) if element is None else None
        elements = dict(enumerate(value if isinstance(value, list) else ()))
        value = element if subscript is None else elements.get(int(subscript))
    elif index is None and name not in ("@", "*"):
        value = first(value)
    if match["sign"] == "#" and not match["rest"]:
        return str(len(value or ""))
    return _operated(value, match["rest"], name, variables, expand)


def _operated(
    value: Value | None,
    operation: str,
    name: str,
    variables: Variables,
    expand: Callable[[str], str],
) -> Value | None:
    """A value after the operator of `${name...}`: a default, a cut, a replacement."""
    if default := re.fullmatch(r"(:?)([-=+?])(.*)", operation, re.S):
        is_set = value is not None and (value or not default[1])
        if default[2] == "+":
            return expand(default[3]) if is_set else ""
        if is_set or default[2] == "?":
            return value if is_set else None
        if default[2] == "=":
            variables.set(name, expand(default[3]))
        return expand(default[3])
    if value is None or not operation:
        return value
    if isinstance(value, list):
        each = (_operated(element, operation, name, variables, expand) for element in value)
        return [first(element) or "" for element in each]
    if cut := re.fullmatch(r"(##?|%%?)(.*)", operation, re.S):
        return _cut(value, cut[1], expand(cut[2]))
    if replaced := re.fullmatch(r"//?(.+?)/(.*)", operation, re.S):
        count = -1 if operation.startswith("//") else 1
        return value.replace(expand(replaced[1]), expand(replaced[2]), count)
    if operation in ("^^", ",,"):
        return value.upper() if operation == "^^" else value.lower()
    if part := re.fullmatch(r":(\d+)(?::(\d+))?", operation):
        return value[int(part[1]) :][: int(part[2]) if part[2] else None]
    return None


def _cut(value: str, mark: str, pattern: str) -> str:
    """`${value#pattern}` and the like: the shortest match at one end goes, or the longest."""
    lengths = range(len(value) + 1)
    for length in lengths if len(mark) == 1 else reversed(lengths):
        ends = (value[:length], value[length:])
        part, remainder = (
            ends if mark[0] == "#" else (value[len(value) - length :], value[: -length or None])
        )
        if fnmatch.fnmatchcase(part, pattern):
            return remainder
    return value


def arithmetic(text: str, variables: Variables) -> str | None:
    """`$((text))` of whole numbers; None where it is more than that."""

    def number(match: re.Match) -> str:
        return f"({first(variables.get(match[0])) or match[0]})"

    text = re.sub(r"[A-Za-z_]\w*", number, text)
    text = text.replace("&&", " and ").replace("||", " or ")
    try:
        return str(int(_sum(ast.parse(text.strip(), mode="eval").body)))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _sum(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_sum(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SUMS:
            return _SUMS[type(sign)](_sum(left), _sum(right))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _SUMS:
            return _SUMS[type(sign)](_sum(left), _sum(right))
        case ast.BoolOp(op=sign, values=values):
            return (all if isinstance(sign, ast.And) else any)([_sum(value) for value in values])
    raise ValueError("not a sum of whole numbers")
