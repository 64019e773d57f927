"""Reads the command line of pretrain_gpt.py out of a shell script, without executing anything.

Assignments, arrays and variables are resolved as text, from top to bottom; of branches (if, case,
loops) every line is read, so that the last assignment counts. What a script computes when it runs
(`$(...)`, variables of the environment) stays as it is written and is reported.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_VALUE = 1 << 20  # characters of a variable
PROGRAM = re.compile(r"pretrain_\w+\.py$")
_ASSIGNMENT = re.compile(r"(?:export |declare (?:-\w+ )*|local |readonly )?(\w+)(\+?)=(.*)", re.S)
_VARIABLE = re.compile(
    r"\$(?:\(\((?P<sum>[^()]*)\)\)|(?P<bare>\w+|@|\*)|\{(?P<name>\w+|@)(?:\[(?P<index>[@*])\])?"
    r"(?:(?P<mark>:?[-+=?])(?P<other>[^{}]*))?\})"
)
# a word without quotes, or a part of one with them
_PART = re.compile(
    r"""\$\([^()]*\)|\$\{[^{}]*\}|`[^`]*`|'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\]""", re.S
)
_BLANKS = re.compile(r"(?:\$\([^()]*\)|\S)+")  # words of a value that a shell splits
_ENDS = {"|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>", "<", "|&", ">&2"}
_SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Script:
    """The command line in a script. `words` follow pretrain_gpt.py, `launcher` stand before it."""

    words: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    found: bool = False
    values: dict[str, list[str]] = field(default_factory=dict)

    @property
    def unresolved(self) -> list[str]:
        """Names of the variables that the words still have."""
        return sorted(set(re.findall(r"\$\{?(\w+)", " ".join(self.words))))


def statements(text: str) -> Iterator[str]:
    """The statements of a script, comments removed and continued lines joined."""
    text = text.replace("\\\r\n", "\\\n").replace("\r\n", "\n")
    found: list[str] = []
    at = depth = 0
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at):
            found.append(" ")
            at += 2
        elif char == "#" and (not found or found[-1][-1].isspace()):
            at = (text + "\n").index("\n", at)
        elif char in "\n;" and not depth:
            yield "".join(found).strip()
            found = []
            at += 1
        else:
            part = _PART.match(text, at)
            word = part[0] if part else char
            depth = max(0, depth + (word == "(") - (word == ")"))
            found.append(word.replace("\\\n", " ") if word[0] in "'\"" else word)
            at += len(word)
    yield "".join(found).strip()


def read_shell(text: str, given: dict[str, str]) -> Script:
    """The command line in a script. `given`: variables of the environment, as a user says they
    are; they win over the assignments of the script."""
    script = Script(values={name: [value] for name, value in given.items()})
    for statement in statements(text):
        assignment = _ASSIGNMENT.fullmatch(statement)
        if assignment and (assignment[3][:1] == "(" or len(split(assignment[3])) <= 1):
            _assign(script, given, *assignment.groups())
            continue
        words = [word for raw in split(statement) for word in expand(raw, script)]
        words = [part for word in words for part in _command(word)]
        at = next((n for n, word in enumerate(words) if PROGRAM.search(word)), None)
        if at is not None:
            script.found = True
            script.launcher = words[:at]
            end = next((n for n in range(at, len(words)) if words[n] in _ENDS), len(words))
            script.words = words[at + 1 : end]
            break
    return script


def _command(word: str) -> list[str]:
    """A word that is a command line itself, as `bash -c "..."` takes one."""
    if " " in word and PROGRAM.search(word.split(".py")[0] + ".py"):
        return split(word)
    return [word]


def split(text: str) -> list[str]:
    """The words of a statement, quotes kept."""
    words = [""]
    at = 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            words.append("")
        else:
            words[-1] += part[0]
        at = part.end() if part else at + 1
    return [word for word in words if word]


def _assign(script: Script, given: dict[str, str], name: str, plus: str, raw: str) -> None:
    if name in given:
        return
    if raw.startswith("(") and raw.endswith(")"):
        value = [word for each in split(raw[1:-1]) for word in expand(each, script)]
    else:
        value = [" ".join(word for each in split(raw) for word in expand(each, script, False))]
    if plus:
        before = script.values.get(name, [])
        value = before + value if raw.startswith("(") else ["".join([*before, *value])]
    if sum(map(len, value)) > MAX_VALUE:
        raise ValueError(f"the variable {name[:80]} has more than {MAX_VALUE} characters")
    script.values[name] = value


def expand(raw: str, script: Script, splits: bool = True) -> list[str]:
    """The words that a word with quotes and variables becomes."""
    words = [""]
    for quoted in re.findall(r"""'[^']*'|"(?:\\.|[^"\\])*"|[^'"]+""", raw, re.S):
        if quoted[0] == "'":
            words[-1] += quoted[1:-1]
            continue
        whole = quoted[0] == '"'
        text = quoted[1:-1].replace('\\"', '"') if whole else quoted
        at = 0
        for variable in _VARIABLE.finditer(text):
            words[-1] += text[at : variable.start()]
            at = variable.end()
            values = _value(variable, script)
            if variable["index"] != "@" and variable["bare"] != "@":
                values = [" ".join(values)]
            if splits and not whole:
                values = [word for value in values for word in _BLANKS.findall(value)]
            elif splits and variable["index"]:
                values = values or [""]
            words[-1] += values[0] if values else ""
            words += values[1:]
        words[-1] += text[at:]
    return [word for word in words if word or '""' in raw or "''" in raw]


def _value(variable: re.Match, script: Script) -> list[str]:
    if variable["sum"] is not None:
        return [_arithmetic(variable, script)]
    name = variable["bare"] or variable["name"]
    if name in ("@", "*"):
        return []
    value = script.values.get(name)
    mark = (variable["mark"] or "").lstrip(":")
    if mark == "+":
        return [_text(variable["other"], script)] if value else []
    if value is None and mark in ("-", "="):
        return [_text(variable["other"], script)]
    if value is None:
        return [variable[0]]
    return value


def _text(raw: str, script: Script) -> str:
    return " ".join(word for each in split(raw) for word in expand(each, script, False))


def _arithmetic(variable: re.Match, script: Script) -> str:
    """`$((A * B))` of whole numbers; as written where that is not all it is."""
    text = re.sub(
        r"[A-Za-z_]\w*",
        lambda m: " ".join(script.values.get(m[0], [m[0]])),
        variable["sum"].replace("$", ""),
    )
    try:
        return str(_sum(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return variable[0]


def _sum(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return _SUMS[type(node.op)](_sum(node.left), _sum(node.right))
    raise ValueError("not a sum of whole numbers")


def read_recipe(text: str) -> Script:
    """The command line of a recipe of Megatron's CI: the flags below `MODEL_ARGS:` in YAML."""
    script = Script()
    inside = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if re.match(r"\s*MODEL_ARGS:\s*$", line):
            inside = indent
            script.found = True
        elif inside is not None and line.strip() and not line.lstrip().startswith("#"):
            if indent <= inside:
                inside = None
                continue
            found = re.match(r"\s*['\"]?(--[\w-]+)['\"]?:\s*(.*?)\s*(?:\s#.*)?$", line)
            if found:
                script.words += _flag_of(found[1], found[2])
    return script


def _flag_of(flag: str, value: str) -> list[str]:
    if value in ("true", "True", ""):
        return [flag]
    if value in ("false", "False", "null"):
        return []
    if value.startswith("[") and value.endswith("]"):
        return [flag, *value[1:-1].replace(",", " ").split()]
    quoted = re.fullmatch(r"'(.*)'|\"(.*)\"", value)
    return [flag, (quoted[1] or quoted[2] or "") if quoted else value]


def ranks(script: Script) -> int | None:
    """The number of ranks given to the launcher; None where it cannot be read."""
    words = [part for word in script.launcher for part in word.split("=", 1)]
    found = dict(
        zip((word.lstrip("-").replace("_", "-") for word in words), words[1:], strict=False)
    )
    try:
        if "nproc-per-node" in found:
            return int(found["nproc-per-node"]) * int(found.get("nnodes", "1").split(":")[-1])
        return int(found["ntasks"]) if "ntasks" in found else None
    except ValueError:
        return None


def shown(words: list[str]) -> str:
    """Words as a shell takes them, variables left readable."""
    return " ".join(
        word if re.fullmatch(r"[\w${}./:,=@%+-]+", word) else shlex.quote(word) for word in words
    )
