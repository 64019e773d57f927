"""Where the time of runs went, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.analysis.plots import load_matplotlib, save_figure

from .accounting import KINDS, Goodput

KIND_COLORS = dict(
    zip(
        KINDS,
        (
            "#2a9d4e",
            "#c0392b",
            "#7f6a00",
            "#8e44ad",
            "#1f77b4",
            "#16a2b8",
            "#d95f02",
            "#f0b429",
            "#9e9e9e",
            "#d9d9d9",
        ),
        strict=True,
    )
)


def draw_goodput(path: str, runs: Sequence[Goodput]) -> None:
    """Draw what each run did on a time axis, one bar per run, into an .svg, .png or .pdf. Raises
    ValueError where that cannot be."""
    matplotlib = load_matplotlib(f"--output {path}")
    longest = max(run.seconds for run in runs)
    unit, divisor = next(
        candidate
        for candidate in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        if longest >= 2 * candidate[1] or candidate[1] == 1.0
    )
    size = (10, 1.6 + 0.7 * len(runs))
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for row, run in enumerate(runs):
        for span in run.spans:
            axes.broken_barh(
                [((span.start - run.spans[0].start) / divisor, span.seconds / divisor)],
                (row - 0.35, 0.7),
                color=KIND_COLORS[span.kind],
                linewidth=0,
            )
    axes.set_yticks(range(len(runs)), [f"{run.name}\n{run.share:.1%} effective" for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, longest / divisor)
    axes.set_xlabel(f"{unit} since the first start")
    axes.spines[["top", "right"]].set_visible(False)
    shown = [kind for kind in KINDS if any(run.of(kind) for run in runs)]
    figure.legend(
        handles=[matplotlib.patches.Patch(color=KIND_COLORS[kind], label=kind) for kind in shown],
        loc="outside upper center",
        ncols=min(5, len(shown)),
        frameon=False,
        fontsize=9,
    )
    save_figure(figure, path, "--output")
