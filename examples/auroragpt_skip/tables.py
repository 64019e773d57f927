#!/usr/bin/env python
"""The post's two tables out of two logs, and which of their columns agree.

tables.py UNSKIPPED.txt SKIPPED.txt
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.analysis.log_reader import Record  # noqa: E402
from megatron.analysis.run_reader import read_run  # noqa: E402

COLUMNS: dict[str, Callable[[Record], str]] = {
    "iteration": lambda r: str(r.iteration),
    "consumed_samples": lambda r: str(r.consumed_samples),
    "consumed_tokens": lambda r: f"{r.numbers['consumed_tokens']:.0f}",
    "learning_rate": lambda r: f"{r.learning_rate:.6g}",
    "lm loss": lambda r: "" if r.loss is None else f"{r.loss:.6f}",
    "grad_norm": lambda r: "" if r.grad_norm is None else f"{r.grad_norm:.3f}",
    "skipped": lambda r: str(r.skipped + r.user_skipped),
    "tokens_per_gpu_per_second": lambda r: (
        f"{r.numbers['tokens_per_gpu']:.0f}" if "tokens_per_gpu" in r.numbers else ""
    ),
}


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 printed, 2 a wrong command line or what cannot be read."""
    if len(argv) != 2:
        print(__doc__, end="", file=sys.stderr)
        return 2
    try:
        runs = [read_run(path).records for path in argv]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, records in zip(argv, runs, strict=True):
        print(f"\n{path}\n\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        for record in records:
            print(f"| {' | '.join(show(record) for show in COLUMNS.values())} |")
    pairs = list(zip(*runs, strict=True))
    same = [name for name, show in COLUMNS.items() if all(show(a) == show(b) for a, b in pairs)]
    print(f"\nthe same in all {len(pairs)} iterations: {', '.join(same)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
