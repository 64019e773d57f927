"""Turn an InternLM python config into an .args file: tools/internlm_config.py CONFIG.py
--world-size N > run.args

`torchrun ... pretrain_gpt.py @run.args` then runs it. The config is read, never executed. Each of
its keys becomes a flag, a comment that says why it needs none, or an error; what it cannot honour
is listed together and nothing is printed. See addons/internlm/internlm.md for every key.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments import Problems, arg, config_from, parse_typed
from megatron.config import command_line
from megatron.config.checks import rules as check
from megatron.features.registry import RunConfig
from tools.shared.program import complain, read

from .read_config import ConfigError, read_config
from .to_flags import to_flags


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    config: Path = arg(position="positional", metavar="CONFIG.py", parse=Path)
    """the InternLM config to convert"""

    world_size: int = arg(minimum=1)
    """number of ranks (GPUs) of the run"""


def refused(words: Sequence[str], world_size: int) -> list[str]:
    """What pretrain_gpt.py would say against these flags, but for files that are not here."""
    try:
        typed = parse_typed(command_line.parser(RunConfig), words)
    except Problems as error:
        return error.lines
    return check.problems(
        config_from(RunConfig, typed | {"dry_run": True}), world_size, tuple(typed)
    )


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 printed, 1 the config cannot be honoured, 2 a wrong command line."""
    args = read(Options, argv, prog="internlm_config.py", description=__doc__ or "")
    try:
        values, lines = read_config(args.config)
    except ConfigError as error:
        complain(error)
        return 1
    translation = to_flags(values, args.world_size)
    translation.problems = translation.problems or refused(translation.words, args.world_size)
    if translation.problems:
        for problem in translation.problems:
            section = problem.partition(".")[0].partition(":")[0].partition(" ")[0]
            line = f", line {lines[section]}" if section in lines else ""
            print(f"error: {args.config}{line}: {problem}", file=sys.stderr)
        return 1
    print(
        f"# {args.config} for {args.world_size} ranks, by tools/internlm_config.py; "
        "addons/internlm/internlm.md says what differs."
    )
    print("\n".join(translation.lines))
    return 0
