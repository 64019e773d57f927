"""Runs of scripts with a step, data or a program of Megatron's form: in which layouts, and the numbers of their steps."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.core.parity.layouts import CP, DISTRIBUTED, PP, TP
from tests.forkrun import run_ranks
from tests.runs import with_flags

LAYOUTS = {
    "one": (1, []),
    "data": (2, DISTRIBUTED),
    "tensor": (2, [TP, "2"]),
    "pipeline": (2, [PP, "2"]),
    "context": (2, [CP, "2"]),
}


def rows_of_run(
    rank: Callable, folder: Path, form: object, argv: Sequence[str], *more: str, world: int = 1
) -> list[dict]:
    """Call `rank(rank, world, folder, form, argv)` on each rank, with the flags `more` and a metrics file in
    place of theirs in `argv`; all rows of that file."""
    folder.mkdir(exist_ok=True)
    words = with_flags(argv, "--metrics-file", str(folder / "m"), *more)
    run_ranks(world, rank, folder, form, words, seconds=100.0)
    return [json.loads(row) for row in (folder / "m").read_text().splitlines()]


def steps_of(rows: list[dict]) -> list[tuple]:
    """(iteration, loss, gradient norm) of each row; of an evaluation the norm is 0."""
    return [(row["iteration"], row["lm_loss"], row.get("grad_norm") or 0.0) for row in rows]
