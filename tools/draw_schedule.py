#!/usr/bin/env python
"""Draw a pipeline schedule: what each stage computes when, the pipeline bubble, and the activations
it holds.

Without --output it prints a timeline with one line per stage: a number is the forward pass of that
micro-batch, (number) its backward pass, a letter after it the chunk (virtual stage), dots are idle
time. --output FILE.svg writes a picture.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

from megatron.arguments import arg
from megatron.config.plan.stages import bubble_fraction
from megatron.parallel.schedules import Action, compute_order, timetable
from tools.shared.program import read

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Box(NamedTuple):
    """One computation of a stage, from `start` to `end` in units of time."""

    start: int
    end: int
    step: Action


Drawing = list[list[Box]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    pipeline_model_parallel_size: int = arg(help="number of pipeline stages")
    num_microbatches: int = arg(help="micro-batches per step")
    num_virtual_stages_per_pipeline_rank: int = arg(
        1,
        help="virtual stages (chunks of layers) per pipeline stage; more "
        "than one gives the interleaved schedule",
    )
    forward_time: int = arg(1, help="time units of the forward pass of a chunk")
    backward_time: int = arg(2, help="time units of the backward pass of a chunk")
    forward_only: bool = arg(False, help="forward passes only, as in evaluation")
    output: str | None = arg(
        None, metavar="FILE.svg", help="write a picture to this file instead of text to stdout"
    )


def make_drawing(
    stages: int, micro_batches: int, chunks: int, forward: int, backward: int, forward_only: bool
) -> Drawing:
    """The boxes of each stage. Raises ValueError if there is no such schedule."""
    orders = [
        compute_order(stage, stages, micro_batches, chunks, forward_only) for stage in range(stages)
    ]
    times = timetable([[(step,) for step in order] for order in orders], chunks, forward, backward)
    return [
        [Box(int(start), int(end), step) for (start, end), step in zip(time, order, strict=True)]
        for time, order in zip(times, orders, strict=True)
    ]


def most_alive(boxes: list[Box]) -> int:
    """The most forwards of a stage whose backward is not done yet."""
    alive = most = 0
    for box in boxes:
        alive += 1 if box.step.kind == "forward" else -1
        most = max(most, alive)
    return most


def summary(drawing: Drawing, micro_batches: int, chunks: int) -> list[str]:
    """What the drawing shows, in numbers."""
    length = max(boxes[-1].end for boxes in drawing)
    busy = sum(box.end - box.start for box in drawing[0])
    lines = [
        f"time {length}, of which a stage works {busy}: bubble {length / busy - 1:.2%} of the "
        f"ideal time (formula: {bubble_fraction(len(drawing), micro_batches, chunks):.2%})"
    ]
    if any(box.step.kind == "backward" for box in drawing[0]):
        lines.append(
            "activations alive (micro-batch x chunk), by stage: "
            + " ".join(str(most_alive(boxes)) for boxes in drawing)
        )
    return lines


def as_text(drawing: Drawing, chunks: int) -> list[str]:
    """One line per stage: each box is the micro-batch and its chunk's letter, `(...)` around a
    backward, dots idle."""
    label = {
        box.step: f"{box.step.micro_batch}{LETTERS[box.step.chunk] if chunks > 1 else ''}"
        for boxes in drawing
        for box in boxes
    }
    unit = max(
        -(-(len(label[box.step]) + 2 * (box.step.kind == "backward") + 1) // (box.end - box.start))
        for boxes in drawing
        for box in boxes
    )
    lines = []
    for stage, boxes in enumerate(drawing):
        line = f"stage {stage:<{len(str(len(drawing)))}}|"
        at = 0
        for box in boxes:
            line += "." * (unit * (box.start - at))
            text = label[box.step] if box.step.kind == "forward" else f"({label[box.step]})"
            line += f"{text:<{unit * (box.end - box.start)}}"
            at = box.end
        lines.append(line + "." * (unit * (max(boxes[-1].end for boxes in drawing) - at)) + "|")
    return lines


def as_svg(drawing: Drawing, chunks: int, title: str, notes: Sequence[str]) -> str:
    """A picture: blue forwards, green backwards, a lighter shade for each later chunk, grey idle
    time."""
    width = 26
    height = 26
    left = 70
    top = 34
    length = max(boxes[-1].end for boxes in drawing)
    bottom = top + height * len(drawing)
    size = (
        f'width="{max(left + width * length, 640) + 10}" height="{bottom + 20 * len(notes) + 30}"'
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for stage, boxes in enumerate(drawing):
        y = top + height * stage
        out.append(f'<text x="8" y="{y + 17}">stage {stage}</text>')
        out.append(
            f'<rect x="{left}" y="{y}" width="{width * length}" height="{height - 2}" '
            'fill="#e4e4e4"/>'
        )
        for box in boxes:
            forward = box.step.kind == "forward"
            light = 48 + 34 * box.step.chunk // max(1, chunks - 1)
            x = left + width * box.start
            wide = width * (box.end - box.start)
            out.append(
                f'<rect x="{x}" y="{y}" width="{wide - 1}" height="{height - 2}" '
                f'fill="hsl({212 if forward else 130},{70 if forward else 45}%,{light}%)"/>'
            )
            out.append(
                f'<text x="{x + wide / 2}" y="{y + 16}" text-anchor="middle" '
                f'fill="{"white" if light < 60 else "black"}">{box.step.micro_batch}</text>'
            )
    legend = (
        "blue: forward, green: backward, grey: idle, numbers: micro-batches"
        + "; the lighter, the later the chunk" * (chunks > 1)
    )
    for i, line in enumerate([legend, *notes]):
        out.append(f'<text x="{left}" y="{bottom + 18 + 20 * i}">{escape(line)}</text>')
    return "\n".join([*out, "</svg>", ""])


def problems(options: Options) -> list[str]:
    """Everything that is wrong with the options, one line each."""
    names = (
        "pipeline_model_parallel_size",
        "num_microbatches",
        "num_virtual_stages_per_pipeline_rank",
        "forward_time",
        "backward_time",
    )
    found = [
        f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1"
        for name in names
        if getattr(options, name) < 1
    ]
    chunks = options.num_virtual_stages_per_pipeline_rank
    if chunks > len(LETTERS) or chunks > 1 and options.pipeline_model_parallel_size == 1:
        found.append(
            f"--num-virtual-stages-per-pipeline-rank {chunks}: must be 1 with one stage, and at "
            f"most {len(LETTERS)}"
        )
    if options.output and not options.output.endswith(".svg"):
        found.append(
            f"--output {options.output}: only SVG is written; give a name that ends in .svg"
        )
    return found


def draw(options: Options) -> str:
    """What to print. Raises ValueError or OSError."""
    stages = options.pipeline_model_parallel_size
    micro_batches = options.num_microbatches
    chunks = options.num_virtual_stages_per_pipeline_rank
    output = options.output
    drawing = make_drawing(
        stages,
        micro_batches,
        chunks,
        options.forward_time,
        options.backward_time,
        options.forward_only,
    )
    name = (
        "forward only"
        if options.forward_only
        else "1F1B"
        if chunks == 1
        else f"interleaved 1F1B, {chunks} chunks"
    )
    title = f"{name}: {stages} stage{'s' * (stages > 1)}, {micro_batches} micro-batches"
    notes = summary(drawing, micro_batches, chunks)
    if output:
        with open(output, "w", encoding="utf-8") as file:
            file.write(as_svg(drawing, chunks, title, notes))
        return "\n".join([title, *notes, f"wrote {output}"])
    return "\n".join([title, *as_text(drawing, chunks), *notes])


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 the file could not be written, 2 a wrong command line."""
    options = read(
        Options, argv, prog="draw_schedule.py", description=__doc__ or "", check=problems
    )
    try:
        print(draw(options))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
