"""Draw a pipeline schedule: what each stage computes when, the pipeline bubble, and the activations
it holds.

It prints a timeline with one line per stage: a number is the forward pass of that micro-batch,
(number) its backward pass, a letter after it the chunk (virtual stage), dots are idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.arguments import arg
from megatron.config.plan.schedules import Action, activations_alive, compute_order, timetable
from tools.shared.program import complain, read

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

    pipeline_model_parallel_size: int = arg(minimum=1)
    """number of pipeline stages"""

    num_microbatches: int = arg(minimum=1)
    """micro-batches per step"""

    num_virtual_stages_per_pipeline_rank: int = arg(1, minimum=1)
    """virtual stages (chunks of layers) per pipeline stage; more than one gives the interleaved
    schedule"""

    forward_time: int = arg(1, minimum=1)
    """time units of the forward pass of a chunk"""

    backward_time: int = arg(2, minimum=1)
    """time units of the backward pass of a chunk"""


def make_drawing(
    stages: int, micro_batches: int, chunks: int, forward: int, backward: int
) -> Drawing:
    """The boxes of each stage. Raises ValueError if there is no such schedule."""
    orders = [compute_order(stage, stages, micro_batches, chunks) for stage in range(stages)]
    times = timetable([[(step,) for step in order] for order in orders], chunks, forward, backward)
    return [
        [Box(int(start), int(end), step) for (start, end), step in zip(time, order, strict=True)]
        for time, order in zip(times, orders, strict=True)
    ]


def summary(drawing: Drawing, micro_batches: int, chunks: int) -> list[str]:
    """What the drawing shows, in numbers."""
    stages = len(drawing)
    length = max(boxes[-1].end for boxes in drawing)
    busy = sum(box.end - box.start for box in drawing[0])
    return [
        f"time {length}, of which a stage works {busy}: bubble {length / busy - 1:.2%} of the "
        f"ideal time (formula: {(stages - 1) / (chunks * micro_batches):.2%})",
        "activations alive (micro-batch x chunk), by stage: "
        + " ".join(
            str(activations_alive(stage, stages, micro_batches, chunks)) for stage in range(stages)
        ),
    ]


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
        column = 0
        for box in boxes:
            line += "." * (unit * (box.start - column))
            text = label[box.step] if box.step.kind == "forward" else f"({label[box.step]})"
            line += f"{text:<{unit * (box.end - box.start)}}"
            column = box.end
        lines.append(line + "." * (unit * (max(boxes[-1].end for boxes in drawing) - column)) + "|")
    return lines


def problems(options: Options) -> list[str]:
    """What is wrong with the options together, one line each."""
    chunks = options.num_virtual_stages_per_pipeline_rank
    if chunks > len(LETTERS) or chunks > 1 and options.pipeline_model_parallel_size == 1:
        return [
            f"--num-virtual-stages-per-pipeline-rank {chunks}: must be 1 with one stage, and at "
            f"most {len(LETTERS)} "
            "[value-out-of-range]"
        ]
    return []


def draw(options: Options) -> str:
    """What to print. Raises ValueError."""
    stages = options.pipeline_model_parallel_size
    micro_batches = options.num_microbatches
    chunks = options.num_virtual_stages_per_pipeline_rank
    drawing = make_drawing(
        stages, micro_batches, chunks, options.forward_time, options.backward_time
    )
    name = "1F1B" if chunks == 1 else f"interleaved 1F1B, {chunks} chunks"
    title = f"{name}: {stages} stage{'s' * (stages > 1)}, {micro_batches} micro-batches"
    notes = summary(drawing, micro_batches, chunks)
    return "\n".join([title, *as_text(drawing, chunks), *notes])


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 2 a wrong command line."""
    options = read(
        Options, argv, prog="draw_schedule.py", description=__doc__ or "", check=problems
    )
    try:
        print(draw(options))
    except ValueError as error:
        complain(error)
        return 2
    return 0
