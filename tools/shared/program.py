"""What the programs of tools/ share: a command line read into a dataclass, commands of a program,
--help and --version.

Flags are declared as fields (megatron/arguments.py). Imports no torch and no numpy, so that --help
is immediate.
"""

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from megatron import addons, explain
from megatron.arguments import Parsed, Parser, flags_of_group, parse
from megatron.checkpoint.filesystem import CheckpointError
from megatron.problems import error_lines
from megatron.version import version_line
from tools.shared.positional import missing, parse_words

Options = TypeVar("Options")
_CODED = re.compile(r" \[[a-z0-9]+(-[a-z0-9]+)+\]$")


def read(
    options: type[Options],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    check: Callable[[Options], list[str]] = lambda parsed_options: [],
) -> Options:
    """The options that a command line gives. `check` returns what is wrong with values that can be
    read.

    --help and --version raise SystemExit(0) after printing; every problem goes to stderr in a line
    of its own, and SystemExit(2) is raised.
    """
    flags = flags_of_group(options, "options")
    parser = Parser(
        flags.values(), prog=prog, description=description, sections={"options": "Options"}
    )
    parsed = parse_words(parser, argv) if parser.takes_words else parse(parser, argv)
    answer(parser, parsed)
    problems = [*parsed.problems, *missing(parser, parsed), *out_of_range(parser, parsed)]
    if not any(flag.required and flag.name not in parsed.typed for flag in parser.flags):
        unread = tuple(flags[name].spelling for name in parsed.broken)
        typed_options = options(**parsed.typed)
        problems += [problem for problem in check(typed_options) if not problem.startswith(unread)]
    if problems:
        print(error_lines(problems), end="", file=sys.stderr, flush=True)
        raise SystemExit(2)
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    return typed_options


def added(program: str) -> list[ModuleType]:
    """What add-ons add to a program of tools/: their modules PROGRAM_flags.py, each with the
    dataclass `Flags` and what the program asks of it."""
    return [importlib.import_module(name) for name in addons.modules(f"{program}_flags")]


def answer(parser: Parser, parsed: Parsed) -> None:
    """Do what --help, --version and --explain ask for, and raise SystemExit."""
    if parsed.help:
        print(parser.help(parsed.topic), end="", flush=True)
        raise SystemExit(0)
    if parsed.version:
        print(version_line(parser.prog), flush=True)
        raise SystemExit(0)
    if parsed.explain is not None:
        raise SystemExit(explain.main(parsed.explain))


def complain(error: Exception) -> None:
    """Print what is wrong to stderr."""
    print(error_lines(said(error)), end="", file=sys.stderr)


def said(error: Exception) -> list[str]:
    """What is wrong, one line each, with a code: that of the message or, where it has none, `code`
    of the exception's class."""
    if isinstance(error, OSError) and error.errno is not None:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        where += error.strerror or str(error)
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            return [f"{where}; fix path or permissions [file-not-readable]"]
        return [f"{where} [file-operation-failed]"]
    code = getattr(error, "code", "")
    return [
        line if _CODED.search(line) else f"{line} {code}".rstrip()
        for line in str(error).split("\n")
    ]


def out_of_range(parser: Parser, parsed: Parsed) -> list[str]:
    """A line for each number that is not in the range that its flag declares."""
    return [
        f"{flag.spelling} {value}: {problem}"
        for flag in parser.flags
        if flag.limits and (value := parsed.typed.get(flag.name)) is not None
        if (problem := flag.limits.problem(value))
    ]


def run_program(
    options: type[Options],
    run: Callable[[Options], None],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    check: Callable[[Options], list[str]],
) -> int:
    """Read the command line and `run` the program; its exit code: 0, or 1 with one line on stderr
    where it could not be done. Raises SystemExit as `read` does."""
    parsed_options = read(options, argv, prog=prog, description=description, check=check)
    try:
        run(parsed_options)
    except (ValueError, OSError, CheckpointError) as error:
        complain(error)
        return 1
    return 0


@dataclass(frozen=True)
class Command:
    """A command of a program: its help in one line, its options, what runs it (returns the exit
    code), and what checks its options before it runs."""

    summary: str
    options: type
    run: Callable[[Any], int]
    check: Callable[[Any], list[str]] = lambda checked: []


def run_command(
    commands: Mapping[str, Command], argv: Sequence[str], *, prog: str, description: str
) -> int:
    """Run the command that the first word names; the exit code, 1 with one line on stderr where it
    could not be done. Raises SystemExit as `read` does."""
    name = argv[0] if argv else ""
    if name in commands:
        command = commands[name]
        options = read(
            command.options,
            argv[1:],
            prog=f"{prog} {name}",
            description=command.summary,
            check=command.check,
        )
        try:
            return command.run(options)
        except (ValueError, OSError, CheckpointError) as error:
            complain(error)
            return 1
    if name == "--version":
        print(version_line(prog), flush=True)
        return 0
    if name == "--explain":
        return explain.main(argv[1:])
    if name and name not in ("-h", "--help"):
        close = difflib.get_close_matches(name, [*commands, "--help", "--version"], 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(commands)}"
        text = error_lines([f"unknown command {name}; {hint} [command-unknown]"])
        print(text, end="", file=sys.stderr, flush=True)
        return 2
    lines = [
        f"usage: {prog} COMMAND ...",
        "",
        *description.strip().splitlines(),
        "",
        f"Commands ({prog} COMMAND --help lists the flags of each)",
    ]
    width = max(map(len, commands))
    lines += [f"  {each:<{width}}  {command.summary}" for each, command in commands.items()]
    print("\n".join(lines), file=sys.stdout if name else sys.stderr, flush=True)
    return 0 if name else 2
