"""Pictures of the planner: predicted over measured, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.analysis.plots import RUNS, load_matplotlib, save_figure

from .evaluate import Comparison, groups

OTHERS = ("#e377c2", "#bcbd22", "#1b1b6f", "#8c564b")


def draw_errors(path: str, found: Comparison) -> None:
    """Seconds of a step predicted over measured, a colour for each GPU. Raises ValueError where
    that cannot be drawn."""
    matplotlib = load_matplotlib(f"--plot {path}")
    figure = matplotlib.figure.Figure(figsize=(7.5, 7), layout="constrained")
    axes = figure.subplots()
    colors = (*RUNS, *OTHERS)
    by_gpu = sorted(groups(found.rows, lambda row: row["gpu"]).items())
    for number, (gpu, members) in enumerate(by_gpu):
        axes.loglog(
            found.measured[members],
            found.predicted[members],
            "o",
            markersize=3.5,
            alpha=0.6,
            color=colors[number % len(colors)],
            label=f"{gpu} ({len(members)})",
        )
    ends = [found.measured.min() * 0.8, found.measured.max() * 1.25]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.8, 1.25):
        axes.plot(ends, [factor * end for end in ends], color="black", linewidth=0.6, linestyle=":")
    axes.set_xlabel("measured (seconds of a step)")
    axes.set_ylabel("predicted, no factor; dotted: 20 % and 25 % off")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path, "--plot")


def draw_step(path: str, runs: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Where the time of each layout's step goes, one bar each. Raises ValueError where that cannot
    be drawn."""
    matplotlib = load_matplotlib(f"--plot {path}")
    figure = matplotlib.figure.Figure(figsize=(10, 1.8 + 0.6 * len(runs)), layout="constrained")
    axes = figure.subplots()
    colors = (*RUNS, *OTHERS)
    left = [0.0] * len(runs)
    for number, kind in enumerate(runs[0][1]):
        widths = [seconds[kind] for _, seconds in runs]
        if max(widths) > 0:
            axes.barh(range(len(runs)), widths, left=left, label=kind, color=colors[number])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, (name, _) in enumerate(runs):
        axes.text(0, row - 0.42, name[:150], fontsize=7, va="bottom")
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    save_figure(figure, path, "--plot")
