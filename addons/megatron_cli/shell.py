"""Follows a launch script as a shell would, without executing anything: assignments, branches whose
condition is known, loops, functions. What starts a training is kept as a `Launch`; what only a
running shell knows (`$(...)`, variables that nobody sets) stays as it is written."""

from __future__ import annotations

import fnmatch
import os.path
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from megatron.small_files import read_text

from .expansion import Value, Variables, arithmetic, braces, first

MAX_BYTES = 1 << 17  # of a file that the script starts
MAX_STEPS = 20_000  # commands that are followed
MAX_WORDS = 10_000  # of a command line
READ_BYTES = 1 << 14
MAX_CHILDREN = 4000  # of a node of the syntax tree
MAX_DEPTH = 40  # of scripts and functions in each other
PROGRAM = re.compile(r"(?:^|/)pretrain_\w+\.py$")
_STARTERS = {
    *("torchrun", "deepspeed", "accelerate", "srun", "mpirun", "mpiexec", "aprun", "jsrun"),
    *(
        "uv",
        "poetry",
        "conda",
        "exec",
        "env",
        "nohup",
        "time",
        "timeout",
        "numactl",
        "taskset",
        "nsys",
        "ncu",
        "sbatch",
    ),
    *("singularity", "apptainer", "docker", "podman", "enroot", "bash", "sh", "command"),
}
_SHELLS = ("bash", "sh")
# `$(...)` with parentheses in it and in these, blanks, or a part without both
_TOKENS = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\s+|[^\s$]+|\$")
_UNSET = re.compile(r"\$\{\w+[^}]*\}|\$\w+")
_ORDER = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


@dataclass(frozen=True)
class Launch:
    """A command that starts pretrain_gpt.py, or a script of one's own: the words before it, its
    path, and the words after it."""

    launcher: tuple[str, ...]
    words: tuple[str, ...]
    program: str


class _Exit(Exception):
    """exit and return."""


class _LeaveLoop(Exception):
    """break and continue, by its argument."""


class _Words:
    """Words as they come together from quoted and unquoted parts."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.open: str | None = None

    def add(self, text: str) -> None:
        self.open = (self.open or "") + text

    def cut(self) -> None:
        self.done += [] if self.open is None else [self.open]
        self.open = None

    def add_split(self, text: str) -> None:
        """Add a value without quotes: its blanks end words, but within `$(...)`."""
        for token in _TOKENS.findall(text):
            self.cut() if token.isspace() else self.add(token)

    def add_value(self, value: Value, quoted: bool) -> None:
        for number, element in enumerate([value] if isinstance(value, str) else value):
            if number:
                self.cut()
            self.add(element) if quoted else self.add_split(element)


@dataclass
class Shell:
    """The state of a script; `run` follows a text."""

    variables: Variables = field(default_factory=Variables)
    functions: dict[str, Node] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # written by here-documents
    folder: Path | None = None  # of the script: what it starts or sources there is followed
    output: list[str] | None = None  # of a function in `$(...)`
    launches: list[Launch] = field(default_factory=list)
    steps: int = 0
    depth: int = 0

    def run(self, text: str, parameters: Sequence[str] | None = None) -> None:
        """Follow a script to its end. Raises ValueError for one that has none."""
        self._within(_parsed(text), self.variables.parameters if parameters is None else parameters)

    def _within(self, node: Node, parameters: Sequence[str]) -> bool | None:
        """Follow a script or the body of a function, which have parameters of their own."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("commands start each other without an end")
        before, self.variables.parameters = self.variables.parameters, list(parameters)
        try:
            return self._command(node)
        except (_Exit, _LeaveLoop):
            return None
        finally:
            self.depth -= 1
            self.variables.parameters = before

    def _body(self, nodes: Iterable[Node]) -> bool | None:
        """The status of the last command: did it succeed? None where only a shell knows."""
        status: bool | None = True
        for node in nodes:
            status = self._command(node)
        return status

    def _command(self, node: Node) -> bool | None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ValueError(f"it runs more than {MAX_STEPS} commands")
        follow = {
            "command": self._simple,
            "list": self._list,
            "negated_command": self._negated,
            "if_statement": self._if,
            "for_statement": self._for,
            "while_statement": self._while,
            "case_statement": self._case,
            "function_definition": self._define,
            "variable_assignment": self._assign,
            "redirected_statement": self._redirected,
            "test_command": self._test,
        }.get(node.type)
        if _text(node).startswith("(("):
            value = arithmetic(_text(node)[2:-2], self.variables)
            return None if value is None else value != "0"
        return follow(node) if follow else self._body(_uncommented(node))

    def _list(self, node: Node) -> bool | None:
        """`&&` and `||`; a condition that is not known is taken to be true."""
        left, operator, right = node.children[0], _text(node.children[1]), node.children[-1]
        status = self._command(left)
        if status is None and operator == "&&":
            return self._unless_exit([right])
        if status is None or status != (operator == "&&"):
            return status
        return self._command(right)

    def _unless_exit(self, nodes: Iterable[Node]) -> bool | None:
        """Commands under a condition that is not known: a check that would end the script is taken
        to have passed."""
        before = dict(self.variables.values)
        try:
            return self._body(nodes)
        except _Exit:
            self.variables.values = before
            return False

    def _negated(self, node: Node) -> bool | None:
        status = self._body(_uncommented(node))
        return None if status is None else not status

    def _define(self, node: Node) -> bool:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name and body:
            self.functions[_text(name)] = body
        return True

    def _if(self, node: Node) -> bool | None:
        """Also of its elif clauses, one after the other."""
        then = [child.type for child in node.children].index("then")
        start = node.children[then].start_byte
        children = _uncommented(node)
        condition = [child for child in children if child.start_byte < start]
        branches = children[len(condition) :]
        clauses = [child for child in branches if child.type in ("elif_clause", "else_clause")]
        body = [child for child in branches if child not in clauses]
        status = self._body(condition)
        if status is None:
            status = self._unless_exit(body) is not False
        elif status:
            self._body(body)
        for clause in () if status else clauses:
            if clause.type == "else_clause" or self._if(clause):
                if clause.type == "else_clause":
                    self._body(clause.named_children)
                break
        return status

    def _for(self, node: Node) -> bool:
        name, *values, body = _uncommented(node)
        for word in [word for value in values for word in self.expand(value)]:
            self.variables.set(_text(name), word)
            if not self._round(body):
                break
        return True

    def _while(self, node: Node) -> bool:
        *condition, body = _uncommented(node)
        wanted = node.children[0].type == "while"
        while self._body(condition) is wanted and self._round(body):
            pass
        return True

    def _round(self, body: Node) -> bool:
        """One round of a loop; does the loop go on?"""
        try:
            self._command(body)
        except _LeaveLoop as left:
            return left.args[0] == "continue"
        return True

    def _case(self, node: Node) -> bool | None:
        value, *cases = _uncommented(node)
        word = self.expand_text(value)
        for case in cases:
            patterns = case.children_by_field_name("value")
            if any(fnmatch.fnmatchcase(word, self.expand_text(each)) for each in patterns):
                return self._body(_uncommented(case)[len(patterns) :])
        return True

    def _assign(self, node: Node) -> bool:
        target, value_node = node.named_children[0], node.child_by_field_name("value")
        name = _text(target)
        before = self.variables.get(name)
        adds = any(child.type == "+=" for child in node.children)
        value: Value
        if value_node is not None and value_node.type == "array":
            value = [word for each in _uncommented(value_node) for word in self.expand(each)]
            for word in value:  # of an associative array, which is kept element by element
                if element := re.fullmatch(r"(\[.+?\])=(.*)", word, re.S):
                    self.variables.set(name + element[1], element[2])
            if adds and before:
                value = ([before] if isinstance(before, str) else before) + value
        else:
            value = self.expand_text(value_node) if value_node is not None else ""
            if adds:
                value = (first(before) or "") + value
                value = [value, *before[1:]] if isinstance(before, list) else value
        if target.type == "subscript":
            array, *index = target.named_children
            name = f"{_text(array)}[{''.join(map(self.expand_text, index))}]"
        self.variables.set(name, value)
        return True

    def _redirected(self, node: Node) -> bool | None:
        """`cat > FILE <<END` writes a file that may be started later; a shell reads a script."""
        body = node.child_by_field_name("body")
        document = next(_of_type(node, "heredoc_body"), None)
        if body is None or document is None:
            return None if body is None else self._command(body)
        mark = next(_of_type(node, "heredoc_start"))
        text = _text(document)
        if not re.search(r"['\"\\]", _text(mark)):
            words = _Words()
            self._add_children(document, words, quoted=True)
            words.cut()
            text = "".join(words.done)
        words_of_command = self._words_of(body)
        name = os.path.basename(words_of_command[0]) if words_of_command else ""
        target = next(_of_type(node, "file_redirect"), None)
        if name in (*_SHELLS, "sbatch", "srun"):
            self.run(text)
        elif name == "cat" and target is None and self.output is not None:
            self.output.append(text)
        elif name == "cat" and target is not None:
            self.files[self.expand_text(target.named_children[-1])] = text
        return None

    def _words_of(self, node: Node) -> list[str]:
        parts = (child for child in node.named_children if child.type != "variable_assignment")
        return [word for part in parts for word in self.expand(part)]

    def _test(self, node: Node) -> bool | None:
        """The condition in `[ ... ]` and `[[ ... ]]`."""
        if node.type in ("test_command", "parenthesized_expression"):
            return bool(node.named_children) and self._test(node.named_children[0])
        if node.type == "unary_expression" and _text(node.children[0]) == "!":
            status = self._test(node.named_children[-1])
            return None if status is None else not status
        if node.type == "binary_expression":
            left, operator, right = node.children[0], _text(node.children[1]), node.children[-1]
            if operator in ("&&", "-a", "||", "-o"):
                decides = operator in ("||", "-o")
                sides = (self._test(left), self._test(right))
                if decides in sides:
                    return decides
                return None if None in sides else not decides
            return self._compare(self._static_text(left), operator, self._static_text(right))
        if node.type != "unary_expression":
            text = self._static_text(node)
            return None if text is None else bool(text)
        operator, text = _text(node.children[0]), self._static_text(node.named_children[-1])
        if operator == "-v":
            return self.variables.get(_text(node.named_children[-1])) is not None
        if operator in ("-z", "-n") and text is not None:
            return bool(text) == (operator == "-n")
        return False if text == "" else None  # of a file

    def _static_text(self, node: Node) -> str | None:
        """A word of a condition, in which a variable that nobody sets is empty; None where only a
        running shell knows it."""
        text = self.expand_text(node)
        return None if "$(" in text or "`" in text else _UNSET.sub("", text)

    def _compare(self, left: str | None, operator: str, right: str | None) -> bool | None:
        if left is None or right is None:
            return None
        if operator in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (operator != "!=")
        if operator == "=~":
            try:
                return re.search(right, left) is not None
            except re.error:
                return None
        sign = _ORDER.get(operator, operator)
        value = arithmetic(f"{left or 0} {sign} {right or 0}", self.variables)
        return None if value is None else value == "1"

    def _simple(self, node: Node) -> bool | None:
        assigned = [child for child in node.named_children if child.type == "variable_assignment"]
        lines = _text(node)[assigned[-1].end_byte - node.start_byte :] if assigned else ""
        if re.match(r"[ \t]*\n", lines):  # assignments of a line of their own
            self._body(assigned)
        words = self._words_of(node)
        name = os.path.basename(words[0]) if words else ""
        if name in self.functions:
            return self._within(self.functions[name], words[1:])
        if name in ("exit", "return"):
            raise _Exit
        if name in ("break", "continue"):
            raise _LeaveLoop(name)
        if name == "test":
            return self._command(_parsed(f"[ {_text(node).partition(' ')[2]} ]"))
        if name == "shift":
            del self.variables.parameters[
                : int(words[1]) if words[1:] and words[1].isdigit() else 1
            ]
        elif name == "eval":
            self.run(" ".join(words[1:]))
        elif name in ("source", ".") and len(words) > 1:
            self.run(self._file(words[1]), words[2:] or None)
        elif name == "echo" and self.output is not None:
            self.output.append(" ".join(words[1:]))
        elif name in ("false", "getopts", "read"):
            return False
        elif words and name not in ("true", ":"):
            self._start(words, name)
            return None
        return True

    def _start(self, words: list[str], name: str) -> None:
        """A program: a training, or a shell that starts one."""
        if not (name in _STARTERS or name.startswith(("python", "$")) or PROGRAM.search(words[0])):
            return
        program = next((n for n, word in enumerate(words) if PROGRAM.search(word)), None)
        if program is not None:
            if len(words) > MAX_WORDS:
                raise ValueError(f"it starts {words[program]} with more than {MAX_WORDS} words")
            self.launches.append(
                Launch(tuple(words[:program]), tuple(words[program + 1 :]), words[program])
            )
            return
        shells = (n for n, word in enumerate(words) if os.path.basename(word) in _SHELLS)
        shell = next(shells, len(words) - 2)
        rest = words[shell + 1 :]
        count = next((n for n, word in enumerate(rest) if word[:1] != "-"), len(rest))
        options, script_words = "".join(rest[:count]), rest[count:]
        if script_words:
            count = len(self.launches)
            self.run(
                script_words[0] if "c" in options else self._file(script_words[0]),
                script_words[1:],
            )
            self.launches[count:] = (
                replace(launch, launcher=(*words[: max(shell, 0)], *launch.launcher))
                for launch in self.launches[count:]
            )

    def _file(self, name: str) -> str:
        """The text of a file that the script has written, or that is in its folder or below; of a
        path with a part that only a shell knows, that of the last part's name. Else empty."""
        if name in self.files or self.folder is None:
            return self.files.get(name, "")
        path = (self.folder / (os.path.basename(name) if "$" in name else name)).resolve()
        inside = path.is_file() and path.is_relative_to(self.folder.resolve())
        return read_text(path, errors="replace", limit=MAX_BYTES) if inside else ""

    def _output_of(self, function: str, words: Sequence[str]) -> str:
        """What a function prints in `$(...)`, a shell of its own."""
        outer, self.output = self.output, []
        before = dict(self.variables.values)
        try:
            self._within(self.functions[function], words)
            return "\n".join(self.output).rstrip("\n")
        finally:
            self.output = outer
            self.variables.values = before

    def expand(self, node: Node) -> list[str]:
        """The words that a word with quotes and variables becomes."""
        words = _Words()
        self._add(node, words, quoted=False)
        words.cut()
        return words.done

    def expand_text(self, node: Node) -> str:
        """The one text that a word becomes where a shell does not split it."""
        words = _Words()
        self._add(node, words, quoted=True)
        words.cut()
        return " ".join(words.done)

    def _expand_inner(self, text: str) -> str:
        """The text that a part of `${...}` becomes."""
        assignment = next(_of_type(_parsed(f"x={text}"), "variable_assignment"), None)
        value = assignment.child_by_field_name("value") if assignment is not None else None
        return self.expand_text(value) if value is not None else ""

    def _add(self, node: Node, words: _Words, quoted: bool) -> None:
        text = _text(node)
        if node.type == "raw_string":
            words.add(text[1:-1])
        elif node.type == "string":
            array = re.fullmatch(r'"\$(@|\{\w+\[@\]\})"', text)
            if not array or braces(text.strip('"${}'), self.variables, self._expand_inner):
                words.add("")
            self._add_children(node, words, quoted=True)
        elif node.type in ("concatenation", "command_name"):
            for child in node.children:
                self._add(child, words, quoted)
        elif node.type in ("simple_expansion", "expansion"):
            self._add_expansion(node, words, quoted)
        elif node.type == "command_substitution":
            words.add(self._substitute(node)) if quoted else words.add_split(self._substitute(node))
        elif text.startswith("$(("):
            # `$NAME` and `${NAME}` in a sum
            expression = re.sub(
                r"\$\{([^{}]*)\}|\$(\w+)",
                lambda m: first(braces(m[1] or m[2], self.variables, self._expand_inner)) or m[0],
                text[3:-2],
            )
            words.add(arithmetic(expression, self.variables) or text)
        else:
            words.add(re.sub(r"\\(.)", r"\1", text))

    def _add_children(self, node: Node, words: _Words, quoted: bool) -> None:
        """The parts of a string or a here-document, and the text between them."""
        source, start = node.text or b"", node.start_byte
        position = start + (node.type == "string")
        for child in [*node.named_children, None]:
            stop = (
                child.start_byte if child is not None else node.end_byte - (node.type == "string")
            )
            if child is not None and child.type in ("string_content", "heredoc_content"):
                continue
            between = source[position - start : stop - start].decode(errors="replace")
            if between:
                words.add(re.sub(r'\\([$`"\\])', r"\1", between.replace("\\\n", "")))
            if child is not None:
                self._add(child, words, quoted)
                position = child.end_byte

    def _add_expansion(self, node: Node, words: _Words, quoted: bool) -> None:
        blanks, dollar, expression = _text(node).partition("$")
        if blanks:  # in a string the parser takes them as a part of `${`
            words.add(blanks)
        text = dollar + expression
        inner = expression[1:-1] if expression.startswith("{") else expression
        value = braces(inner, self.variables, self._expand_inner)
        if value is None:
            words.add(text)
        elif isinstance(value, list) and quoted and "@" not in inner:
            words.add(" ".join(value))
        else:
            words.add_value(value, quoted)

    def _substitute(self, node: Node) -> str:
        """`$(...)` of the commands whose answer is in the text; others as they are written."""
        command = next(_of_type(node, "command"), node)
        name, *words = self._words_of(command) or [""]
        if name in self.functions:
            return self._output_of(name, words)
        if name == "echo":
            return " ".join(words)
        if name == "basename" and len(words) == 1 and "$" not in words[0]:
            return os.path.basename(words[0])
        if name == "dirname" and len(words) == 1 and "$" not in words[0]:
            return os.path.dirname(words[0]) or "."
        return _text(node)


def _parsed(text: str) -> Node:
    """The syntax tree. Raises ValueError for one of which the list of a node's children takes
    seconds."""
    data = text.encode()
    # the callback is code in which a signal of Python's is heard, so that the parse can be ended
    tree = Parser(Language(tree_sitter_bash.language())).parse(
        lambda start, point: data[start : start + READ_BYTES], progress_callback=lambda *_: False
    )
    root = tree.root_node
    cursor = root.walk()
    while True:
        if cursor.node is not None and cursor.node.child_count > MAX_CHILDREN:
            raise ValueError(f"a part of it has more than {MAX_CHILDREN} parts")
        if cursor.goto_first_child():
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return root


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def _uncommented(node: Node) -> list[Node]:
    return [child for child in node.named_children if child.type != "comment"]


def _of_type(node: Node, name: str) -> Iterator[Node]:
    """The nodes of a type at and below a node."""
    if node.type == name:
        yield node
    for child in node.children:
        yield from _of_type(child, name)
