"""Plots curves of runs as text, for a terminal."""

import math
from collections.abc import Sequence

from megatron.analysis.run_reader import PANELS, Curve, RecordedRun, smoothed
from megatron.training.logging.short_format import metric, scientific

HEIGHT = {"loss": 14}
MARGIN = 10  # columns of the numbers next to an axis


def text_plot(runs: Sequence[RecordedRun], width: int = 80, window: int = 1) -> list[str]:
    """The panels of the runs one below the other, in lines of at most `width` characters of ASCII.

    A run's training curve has a small letter, its evaluations the capital one; of one run they are
    `.` and `V`, `T`.
    """
    lines = []
    for number, run in enumerate(runs):
        marks = [f"{_mark(number, len(runs))} training"]
        marks += [f"{_mark(number, len(runs), split)} {split}" for split in run.evaluations]
        lines.append(f"{run.name}: {', '.join(marks)}")
    for name, title in PANELS.items():
        curves: list[tuple[str, Curve]] = []
        for number, run in enumerate(runs):
            if name in run.panels:
                steps, values = run.panels[name]
                curves.append(
                    (
                        _mark(number, len(runs)),
                        (steps, smoothed(values, 1 if name == "learning_rate" else window)),
                    )
                )
            if name == "loss":
                curves += [
                    (_mark(number, len(runs), split), points)
                    for split, points in run.evaluations.items()
                ]
        if curves:
            lines += ["", title, *_panel(curves, width - MARGIN, HEIGHT.get(name, 7), name)]
    return lines


def _mark(number: int, runs: int, split: str | None = None) -> str:
    if runs == 1:
        return "." if split is None else split[0].upper()
    letter = chr(ord("a") + number % 26)
    return letter if split is None else letter.upper()


def _panel(curves: Sequence[tuple[str, Curve]], width: int, height: int, name: str) -> list[str]:
    points = [
        (x, y) for _, curve in curves for x, y in zip(*curve, strict=True) if math.isfinite(y)
    ]
    if not points:
        return [" " * MARGIN + "(no finite number)"]
    left = min(x for x, _ in points)
    right = max(x for x, _ in points)
    low = min(y for _, y in points)
    high = max(y for _, y in points)
    if low == high:
        low = low - (abs(low) or 1) / 2
        high = high + (abs(high) or 1) / 2
    rows = [[" "] * width for _ in range(height)]
    for mark, curve in curves:
        for column, value in _columns(curve, left, right, width).items():
            rows[round((high - value) / (high - low) * (height - 1))][column] = mark
    labelled = {
        0: high,
        height // 2: high - (high - low) * (height // 2) / (height - 1),
        height - 1: low,
    }
    labels = {line: _number(value, name) for line, value in labelled.items()}
    lines = [
        f"{labels.get(line, ''):>{MARGIN - 2}} |{''.join(row)}".rstrip()
        for line, row in enumerate(rows)
    ]
    ends = f"{left}{str(right):>{width - len(str(left))}}"
    return [*lines, " " * (MARGIN - 1) + "+" + "-" * width, " " * MARGIN + ends]


def _columns(curve: Curve, left: int, right: int, width: int) -> dict[int, float]:
    """The mean of the finite values of each column."""
    columns: dict[int, list[float]] = {}
    for x, y in zip(*curve, strict=True):
        if math.isfinite(y):
            columns.setdefault(round((x - left) / max(1, right - left) * (width - 1)), []).append(y)
    return {column: sum(values) / len(values) for column, values in columns.items()}


def _number(value: float, name: str) -> str:
    if name == "learning_rate":
        return scientific(value)
    return metric(value) if name == "tokens_per_second" else f"{value:.3g}"
