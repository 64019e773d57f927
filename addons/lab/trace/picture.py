"""The memory of traced ranks over a step, of a file of --trace-output, as a picture:
python -m megatron.addons.lab.trace.picture trace.json memory.png"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.analysis.plots import load_matplotlib, save_figure
from megatron.problems import error_lines
from megatron.small_files import read_json

VISIBLE = 0.001  # of the height of the picture


def draw_memory(trace: str, picture: str) -> None:
    """Draw the memory of each rank by kind over the operations of a step, one above the other, into
    an .svg, .png or .pdf. Raises ValueError where that cannot be."""
    matplotlib = load_matplotlib(picture)
    try:
        ranks = read_json(trace)["ranks"]
        over_step = [rank["memory_over_step"] for rank in ranks]
        most = max(
            sum(point) for m in over_step for point in zip(*m["bytes"].values(), strict=True)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{trace}: no whole file of --trace-output ({error}); trace again [file-not-readable]"
        ) from None
    peaks: dict[str, float] = {}
    for memory in over_step:
        for kind, values in memory["bytes"].items():
            peaks[kind] = max(peaks.get(kind, 0), *values)
    kinds = [kind for kind, peak in peaks.items() if peak > VISIBLE * most]
    figure = matplotlib.figure.Figure(figsize=(10, 0.8 + 2.4 * len(ranks)), layout="constrained")
    grid = figure.subplots(len(ranks), 1, sharey=True, squeeze=False)[:, 0]
    for rank, memory, axes in zip(ranks, over_step, grid, strict=True):
        points = range(len(next(iter(memory["bytes"].values()))))
        axes.stackplot(
            [memory["operations_per_point"] * point for point in points],
            [memory["bytes"].get(kind, [0] * len(points)) for kind in kinds],
            labels=kinds,
            step="post",
        )
        axes.set_title(f"rank {rank['rank']}, pipeline stage {rank['stage']}", loc="left")
        axes.yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(unit="B"))
    grid[-1].set_xlabel("operations of the step")
    grid[0].legend(loc="upper right", frameon=False, fontsize=9)
    save_figure(figure, picture, "the picture")


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 drawn, 2 what cannot be read or written."""
    try:
        trace, picture = argv
        draw_memory(trace, picture)
    except ValueError as error:
        print(error_lines([str(error)]), end="", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
