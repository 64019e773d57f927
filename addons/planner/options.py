"""The flags of tools/plan.py beside those of the run. Imports no numpy, so that --help is
immediate."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.arguments import arg, flags_of_group, is_flag
from megatron.config.command_line import parser
from megatron.features.registry import RunConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the plan."""

    gpus: int | None = arg(None, minimum=1)
    """number of GPUs of the run"""

    gpu: str = arg("h100", metavar="NAME")
    """kind of GPU: a file of addons/planner/machines, or a .toml"""

    search: bool = arg(False)
    """rank all parallel layouts that fit, and print the best as flags"""

    top: int = arg(10, minimum=1)
    """with --search: number of layouts to print"""

    tokens: float | None = arg(None, above=0)
    """tokens of the whole run: days, energy, price"""

    mtbf_hours: float | None = arg(None, above=0)
    """hours between two failures of the whole job: lost time, save interval"""

    save_seconds: float = arg(30.0, above=0)
    """seconds that a save stops training for"""

    restart_seconds: float = arg(600.0, minimum=0)
    """seconds from a failure to the next step"""

    price: float | None = arg(None, above=0)
    """price of an hour of a GPU"""

    plot: str | None = arg(None, metavar="FILE")
    """draw where time goes, or predicted over measured (.png, .svg)"""

    calibrate: str | None = arg(None, metavar="FILE")
    """metrics file or log of this run on --gpus of --gpu: fit that machine's constants to its
    steps; needs --output"""

    output: str | None = arg(None, metavar="FILE")
    """with --calibrate: the machine file to write (.toml), for --gpu"""

    evaluate: str | None = arg(None, metavar="FILE")
    """compare predictions with a table of measured runs, without a run"""

    leave_out: bool = arg(False)
    """with --evaluate: also by fits without each source and without random thirds"""

    known: bool = arg(False)
    """with --evaluate: instead, published layouts of tuned runs against --search's best"""

    refit: bool = arg(False)
    """with --evaluate: first fit machines/fitted.json to the table, in a checkout"""


def divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(words of these flags, words of the run). One of neither belongs to what it is most like."""
    flags = {
        spelling: flag
        for flag in flags_of_group(Options, "").values()
        for spelling in flag.spellings
    }
    of_run = ["--model", *parser(RunConfig).every_spelling]
    own: list[str] = []
    others: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name not in flags and name not in ("-h", "--help", "--version", "--explain"):
            unknown = is_flag(word) and name not in of_run
            meant = difflib.get_close_matches(name, [*flags, *of_run], 1) if unknown else []
            (own if flags.keys() & meant else others).append(word)
            continue
        own.append(word)
        if name not in flags or equals or not words or is_flag(words[0]):
            continue
        # what stands behind a switch is refused, but for an @FILE of the run
        if flags[name].kind == "value" or not words[0].startswith("@"):
            own.append(words.pop(0))
    return own, others
