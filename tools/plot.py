#!/usr/bin/env python
"""Plot loss, gradient norm, tokens/s and learning rate of one or several runs."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.analysis.plots import draw_curves, picture_problems
from megatron.analysis.run_reader import read_run
from megatron.analysis.text_plot import text_plot
from megatron.arguments import arg
from megatron.features.registry import READERS
from tools.shared.program import complain, read

DESCRIPTION = (
    "Plot training and validation loss, gradient norm, tokens/s and learning rate of one or "
    "several runs, overlaid. LOG is a --metrics-file, what a run printed in any --log-format, its "
    "--tensorboard-dir, or a directory that holds one of them. Of iterations that a run repeated "
    "after a restart the last counts."
)
WIDEST = 120


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Options."""

    runs: tuple[str, ...] = arg(position="positional", metavar="LOG")
    """metrics file, log or TensorBoard directory of a run, or a directory that holds one"""

    output: str | None = arg(None, metavar="FILE")
    """picture to write (.png, .svg or .pdf; needs matplotlib); default: plot as text"""

    smooth: int = arg(1, minimum=1)
    """points to average over, for the curves of training; 1: no smoothing"""

    first: int = arg(1, minimum=1)
    """first iteration to plot"""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 plotted, 2 a wrong command line or what cannot be read or written."""
    options = read(
        PlotOptions,
        argv,
        prog="plot.py",
        description=DESCRIPTION,
        check=lambda options: picture_problems(options.output),
    )
    try:
        runs = [read_run(path, first=options.first, readers=READERS) for path in options.runs]
        if options.output:
            draw_curves(options.output, runs, options.smooth)
            print(f"wrote {options.output}")
        else:
            columns = min(WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 80
            print("\n".join(text_plot(runs, columns, options.smooth)))
    except ValueError as error:
        complain(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
