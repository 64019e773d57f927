#!/usr/bin/env python
"""Say what a launch script of Megatron-LM would do here: check_script.py FILE [NAME=VALUE ...]

FILE is a shell script or a YAML recipe of Megatron's CI. It is read and never executed. Printed:
what happens to each flag of its pretrain_gpt.py command line, everything that keeps it from
running, and the command that starts it. NAME=VALUE sets a variable that the script expects.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments import Parser, arg, is_flag, parse
from megatron.config import command_line
from megatron.config.megatron_compat import flags as megatron_flags
from megatron.features.registry import RunConfig
from megatron.small_files import read_text
from tools.script.read_shell import Script, ranks, read_recipe, read_shell, shown
from tools.shared.program import read

MAX_BYTES = 1 << 17  # of a script
_CODE = re.compile(r" \[[a-z0-9-]+\]$")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    script: Path = arg(
        place="positional", metavar="FILE", parse=Path, help="a shell script, or a YAML recipe"
    )
    variables: tuple[str, ...] = arg(
        (), place="positional", metavar="NAME=VALUE", help="variables that the script expects"
    )
    world_size: int | None = arg(
        None, help="number of ranks (default: that of the launcher in the script, else the fewest)"
    )


def _wrong(options: Options) -> list[str]:
    found = [f"{each}: not NAME=VALUE" for each in options.variables if "=" not in each]
    if options.world_size is not None and options.world_size < 1:
        found.append(f"--world-size {options.world_size}: must be at least 1")
    return found


def fate(flags: Parser, words: Sequence[str]) -> str:
    """What happens to one flag with its values."""
    spelling = words[0].partition("=")[0]
    flag = flags.find(spelling)
    if flag is None:
        return "no effect" if megatron_flags.ignores(spelling) else "ERROR, see below"
    parsed = parse(flags, list(words))
    if parsed.problems:
        return "ERROR, see below"
    foreign = megatron_flags.FOREIGN.get(flag.name)
    if foreign is None:
        return "supported"
    value = parsed.typed[flag.name]
    given = foreign.shown(value)
    if given is None:
        return "the default"
    if foreign.refuses(value):
        return "ERROR, see below"
    if foreign.verdict == megatron_flags.READ_AS:
        return f"read as {' '.join(megatron_flags.replaced(parsed.typed)[given])}"
    if foreign.verdict == megatron_flags.MORE:
        return f"more than requested: {foreign.text}"
    return f"no effect: {foreign.text}"


def table(words: Sequence[str]) -> list[str]:
    """A line for each flag."""
    flags = command_line.parser(RunConfig)
    starts = [at for at, word in enumerate(words) if at == 0 or is_flag(word)]
    rows = [words[a:b] for a, b in zip(starts, [*starts[1:], len(words)], strict=True)]
    width = min(44, max((len(shown(list(row))) for row in rows), default=0))
    return [f"  {shown(list(row)):<{width}}  {fate(flags, row)}" for row in rows]


def fewest_ranks(words: Sequence[str]) -> int:
    """The ranks of one copy of the model."""
    typed = parse(command_line.parser(RunConfig), list(words)).typed
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    found = 1
    for name in sizes:
        found *= max(1, typed.get(name, 1))
    return found


def report(script: Script, world_size: int) -> tuple[list[str], bool]:
    """(lines, is it accepted?)."""
    notes, problems = command_line.judge(script.words, world_size, RunConfig)
    lines = [f"pretrain_gpt.py with {world_size} rank{'s' * (world_size > 1)}:"]
    lines += table(script.words)
    if script.unresolved:
        names = ", ".join(script.unresolved)
        lines += ["", f"not set in the script: {names}; give NAME=VALUE for each"]
    if problems:
        lines += ["", "what keeps it from running:", *(f"  {_CODE.sub('', p)}" for p in problems)]
        return lines, False
    other = [note for note in notes if not note.startswith("flags of Megatron-LM")]
    if other:
        lines += ["", "notes:", *(f"  {_CODE.sub('', note)}" for note in other)]
    start = f"torchrun --nproc-per-node {world_size}" if world_size > 1 else "python"
    return [*lines, "", f"accepted: {start} pretrain_gpt.py {shown(script.words)}"], True


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 accepted, 1 refused or no command line found, 2 a wrong command line."""
    options = read(Options, argv, prog="check_script.py", description=__doc__ or "", check=_wrong)
    try:
        text = read_text(options.script, errors="replace", limit=MAX_BYTES)
    except OSError as error:
        print(f"error: {options.script}: {error.strerror or error}", file=sys.stderr)
        return 1
    given = dict(each.split("=", 1) for each in options.variables)
    recipe = options.script.suffix in (".yaml", ".yml")
    try:
        script = read_recipe(text) if recipe else read_shell(text, given)
    except (ValueError, RecursionError, MemoryError) as error:
        print(f"error: {options.script}: cannot be read ({error})", file=sys.stderr)
        return 1
    if not script.found:
        print(
            f"error: {options.script}: no command line of pretrain_gpt.py found; it is looked for "
            "in shell scripts and below MODEL_ARGS: in YAML",
            file=sys.stderr,
        )
        return 1
    world_size = options.world_size or ranks(script) or fewest_ranks(script.words)
    lines, accepted = report(script, world_size)
    print("\n".join(lines))
    return 0 if accepted else 1


if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
