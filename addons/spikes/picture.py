"""A run as a picture: loss and gradient norm, spikes, skips, checkpoints and restarts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.analysis.log_reader import Record
from megatron.analysis.plots import load_matplotlib, save_figure
from megatron.analysis.run_reader import RecordedRun

from .events import Event, not_judged

LOSS, NORM, SPIKE, SKIPPED, SAVED = "#1f4e79", "#5f6b76", "#d62728", "#2ca02c", "#2ca02c"
NOT_JUDGED = "#9e9e9e"


def skipped_bands(records: Sequence[Record]) -> list[tuple[int, int]]:
    """The (first, last) iterations of each stretch that was not trained."""
    bands: list[tuple[int, int]] = []
    for r in records:
        if r.trained or not (r.user_skipped or r.skipped):
            continue
        count = max(1, r.user_skipped)
        if bands and bands[-1][1] == r.iteration - count:
            bands[-1] = (bands[-1][0], r.iteration)
        else:
            bands.append((r.iteration - count + 1, r.iteration))
    return bands


def draw(path: str, run: RecordedRun, events: Sequence[Event], saved: Sequence[int]) -> None:
    """Draw the run into an .svg, .png or .pdf. Raises ValueError where that cannot be."""
    matplotlib = load_matplotlib(f"--plot {path}")
    figure = matplotlib.figure.Figure(figsize=(10, 5.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.plot(*run.panels["loss"], color=LOSS, linewidth=1)
    bottom.semilogy(*run.panels.get("grad_norm", ([], [])), color=NORM, linewidth=1)
    for set_formatter in (bottom.yaxis.set_major_formatter, bottom.yaxis.set_minor_formatter):
        set_formatter(matplotlib.ticker.LogFormatter(minor_thresholds=(1.5, 0.6)))
    top.set_ylabel("loss (nats per token)")
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("iteration")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        _bands(axes, not_judged(run.records), NOT_JUDGED, "not judged")
        _bands(axes, [(event.start, event.end) for event in events], SPIKE, "spike: skip")
        _bands(axes, skipped_bands(run.records), SKIPPED, "skipped")
        for number, join in enumerate(run.joins):
            axes.axvline(
                join - 0.5,
                color="black",
                linewidth=0.8,
                linestyle=":",
                label=None if number else "restart",
            )
    _mark(top, events)
    if saved:
        shown = [n for n in saved if n <= run.records[-1].iteration]
        bottom.plot(
            shown,
            [0.03] * len(shown),
            "^",
            color=SAVED,
            markersize=5,
            transform=bottom.get_xaxis_transform(),
            label="checkpoint",
            clip_on=False,
        )
    handles = {
        name: handle
        for axes in (bottom, top)
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside upper right",
            ncols=len(handles),
            frameon=False,
            fontsize=9,
        )
    save_figure(figure, path, "--plot")


# matplotlib's Axes
def _bands(axes, ranges: Sequence[tuple[int, int]], color: str, name: str) -> None:
    for number, (first, last) in enumerate(ranges):
        axes.axvspan(
            first - 0.5,
            last + 0.5,
            color=color,
            alpha=0.22,
            linewidth=0,
            label=None if number else name,
        )


def _mark(axes, events: Sequence[Event]) -> None:
    """The worst iteration of each event next to its point; above the picture where the loss is no
    number."""
    for event in events:
        finite = math.isfinite(event.loss)
        text, height = (
            (f"{event.peak}", event.loss) if finite else (f"{event.peak}: {event.loss}", 1)
        )
        axes.annotate(
            text,
            (event.peak, height),
            xycoords="data" if finite else ("data", "axes fraction"),
            textcoords="offset points",
            xytext=(5, -2 if finite else -12),
            fontsize=9,
            color=SPIKE,
        )
