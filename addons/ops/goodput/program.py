"""Where the time of runs went: training, start-up, checkpoints, lost steps, failures, restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.analysis.plots import picture_problems
from megatron.arguments import arg
from tools.shared.program import complain, read

from .accounting import failure_lines, read_goodput, table
from .picture import draw_goodput

DESCRIPTION = (
    "Where the time of one or several runs went: productive steps, steps that were lost and "
    "repeated, saves, start-up, detection of failures, restarts, waiting; the effective share, and "
    "the --save-interval that would lose least. RUN is a --save directory (a run writes "
    "run_events.jsonl there)."
)


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """Options."""

    runs: tuple[str, ...] = arg(position="positional", metavar="RUN")
    """--save directory of a run, or a run_events.jsonl"""

    output: str | None = arg(None, metavar="FILE")
    """picture on a time axis to write (.png, .svg or .pdf; needs matplotlib)"""

    failures: bool = arg(False)
    """print one line per failure instead: time, iteration, rank, host, exit code and reason,
    separated by tabs"""


def problems(options: GoodputOptions) -> list[str]:
    """What is wrong with the values."""
    if options.failures and options.output:
        return ["--failures and --output exclude each other"]
    return picture_problems(options.output)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 printed, 2 a wrong command line or what cannot be read or written."""
    options = read(GoodputOptions, argv, prog="goodput.py", description=DESCRIPTION, check=problems)
    try:
        if options.failures:
            for path in options.runs:
                for line in failure_lines(path):
                    print(line)
            return 0
        runs = [read_goodput(path) for path in options.runs]
        for run in runs:
            print("\n".join(table(run)))
        if options.output:
            draw_goodput(options.output, runs)
            print(f"wrote {options.output}")
    except ValueError as error:
        complain(error)
        return 2
    return 0
