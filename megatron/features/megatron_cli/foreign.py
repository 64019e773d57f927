"""Megatron's flags that have no field here: read as others, accepted without effect, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.arguments import OtherFlags, Parser, ReadAs, parse
from megatron.config.megatron_compat import flags as compat
from megatron.config.megatron_compat.deepspeed import read_deepspeed


def other_flags() -> OtherFlags:
    """The table of `config.megatron_compat`."""
    return OtherFlags(
        compat.parser_flags(), compat.explain, compat.ignores, compat.SYNONYMS, read_as
    )


def read_as(
    parser: Parser, typed: dict[str, Any], foreign: dict[str, Any], ignored: Sequence[str]
) -> ReadAs:
    """As `OtherFlags.read_as`."""
    for words in compat.replaced(foreign).values():
        typed = parse(parser, words).typed | typed
    typed, problems = _with_deepspeed(parser, typed, foreign.get("deepspeed_config"))
    return ReadAs(typed, [*compat.refused(foreign), *problems], compat.accepted(foreign, ignored))


def _with_deepspeed(
    flags: Parser, typed: dict[str, Any], path: str | None
) -> tuple[dict[str, Any], list[str]]:
    """(typed flags and those of the JSON file of --deepspeed_config, problems)."""
    if path is None:
        return typed, []
    try:
        words, problems = read_deepspeed(path)
    except OSError as error:
        missing = f"--deepspeed_config {path}: {error.strerror or error}; give a JSON file"
        return typed, [] if typed.get("dry_run") else [f"{missing} [file-not-readable]"]
    theirs = parse(flags, words)
    problems += [f"--deepspeed_config {path}: {line}" for line in theirs.problems]
    for name, value in theirs.typed.items():
        if typed.get(name, value) != value:
            flag = next(flag.spelling for flag in flags.flags if flag.name == name)
            problems.append(
                f"{flag} {typed[name]}: --deepspeed_config {path} says {value}; make them agree "
                "[flag-contradicts-deepspeed-config]"
            )
    return theirs.typed | typed, problems
