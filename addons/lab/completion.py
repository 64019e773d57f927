"""Shell completion of the flags of megatron-pretrain, made of their declarations by shtab."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg, build_parser
from megatron.features.registry import RunConfig
from tools.shared.program import read

DESCRIPTION = (
    "Prints a completion script for megatron-pretrain, the installed pretrain_gpt.py. In bash: "
    'eval "$(python tools/completion.py bash)"; then megatron-pretrain --hid<TAB>.'
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options."""

    shell: Literal["bash", "zsh", "tcsh"] = arg(position="positional", metavar="SHELL")
    """bash, zsh or tcsh"""


def problems(options: Options) -> list[str]:
    """What is missing."""
    if importlib.util.find_spec("shtab"):
        return []
    return ["completion needs shtab; pip install shtab [package-missing]"]


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 printed, 2 a wrong command line or no shtab."""
    options = read(Options, argv, prog="completion.py", description=DESCRIPTION, check=problems)
    import shtab

    parser = build_parser(RunConfig, prog="megatron-pretrain", description="")
    values = {flag.name: flag.choices for flag in parser.flags}
    for action in parser.arguments._actions:
        action.choices = values.get(action.dest)
    print(shtab.complete(parser.arguments, options.shell))
    return 0
