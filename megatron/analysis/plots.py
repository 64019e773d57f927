"""Curves of runs as a picture. The only importer of matplotlib."""

import itertools
import math
from collections.abc import Sequence
from types import ModuleType

from megatron.analysis.run_reader import PANELS, Curve, RecordedRun, smoothed

RUNS = ("#1f77b4", "#d95f02", "#2a9d4e", "#8e44ad", "#c0392b", "#16a2b8", "#7f6a00", "#555555")
ENDINGS = (".png", ".svg", ".pdf")


def picture_problems(output: str | None) -> list[str]:
    """What is wrong with the name of a picture to write."""
    if output is None or output.lower().endswith(ENDINGS):
        return []
    return [
        f"--output {output}: unknown format; end it with .png, .svg or .pdf [value-not-a-choice]"
    ]


def draw_curves(path: str, runs: Sequence[RecordedRun], window: int = 1) -> None:
    """Draw the panels of several runs, one above the other, into an .svg, .png or .pdf; with
    `window` above 1 the mean over that many neighbouring points, and the points themselves faintly.
    Raises ValueError where that cannot be."""
    matplotlib = load_matplotlib(f"--output {path}")
    shown = [name for name in PANELS if any(run.panels.get(name) for run in runs)]
    heights = [2.0 if name == "loss" else 1.0 for name in shown]
    size = (10, 1.2 + 1.55 * sum(heights))
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(shown), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for name, axes in zip(shown, grid, strict=True):
        for run, color in zip(runs, itertools.cycle(RUNS), strict=False):
            width = 1 if name == "learning_rate" else window
            _curve(
                axes, run.panels.get(name), color, width, run.name if len(runs) > 1 else "training"
            )
            for split, points in run.evaluations.items() if name == "loss" else ():
                label = split if len(runs) == 1 else f"{run.name}: {split}"
                axes.plot(
                    *points,
                    color=color if len(runs) > 1 else RUNS[1],
                    markersize=4.5,
                    linewidth=1.2,
                    marker="s" if split == "test" else "o",
                    linestyle="--" if len(points[0]) > 1 else "",
                    label=label,
                )
            for first, reached in run.joins.items():
                axes.axvspan(first - 1, reached, color=color, alpha=0.12, linewidth=0)
                axes.axvline(
                    reached,
                    color="black",
                    linewidth=0.8,
                    linestyle=":",
                    label=f"ended at {reached}, resumed from {first - 1}",
                )
        axes.set_ylabel(PANELS[name])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        values = [
            y
            for run in runs
            if name in run.panels
            for y in run.panels[name][1]
            if y > 0 and math.isfinite(y)
        ]
        if name == "grad_norm" and values and max(values) > 20 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        if name == "tokens_per_second":
            axes.yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
            axes.set_ylim(bottom=0)
    grid[-1].set_xlabel("iteration")
    grid[0].legend(loc="upper right", frameon=False, fontsize=9)
    figure.align_ylabels(list(grid))
    save_figure(figure, path, "--output")


def load_matplotlib(flag: str) -> ModuleType:
    try:
        import matplotlib.figure
        import matplotlib.patches
        import matplotlib.ticker
    except ImportError:
        raise ValueError(
            f"{flag}: needs the package matplotlib; run: pip install matplotlib, or omit the flag "
            "[package-missing]"
        ) from None
    return matplotlib


def _curve(axes, curve: Curve | None, color: str, window: int, label: str) -> None:
    """A curve of matplotlib's `axes`; where it is smoothed its points stand behind it."""
    if curve is None:
        return
    steps, values = curve
    if window > 1:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.25)
    axes.plot(
        steps,
        smoothed(values, window),
        color=color,
        linewidth=1.4,
        label=label,
        marker="." if len(steps) == 1 else None,
    )


def save_figure(figure, path: str, flag: str) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{flag} {path}: cannot be written ({error}) [file-operation-failed]"
        ) from None
