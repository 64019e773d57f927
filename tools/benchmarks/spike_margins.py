#!/usr/bin/env python
"""How near the spike detector came to its limits in runs that are known to be healthy.

    python tools/benchmarks/spike_margins.py LOG...

For each log or metrics file: the largest distances of loss and gradient norm from their line, with
the excess and the ratio there, the flags, and how many values are beyond lower limits.
examples/auroragpt_skip/calibrate.sh makes such runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.analysis.run_reader import read_run  # noqa: E402
from megatron.training.spikes import detector as spikes  # noqa: E402
from megatron.training.spikes.detector import Finding, SpikeDetector  # noqa: E402

COLUMNS = (
    "run",
    "iterations",
    "largest loss z (excess)",
    "largest norm z (ratio)",
    "marks from 4 sigma on",
    "flags",
    "flags with losses from 4 sigma on",
    "flags with norms from 2 times on",
)


def flags(
    findings: Sequence[Finding], loss_z: float, excess: float, norm_z: float, ratio: float
) -> int:
    """How many of the findings are beyond these limits."""
    return sum(
        f.loss_z > loss_z and f.excess > excess or f.norm_z > norm_z and f.ratio > ratio
        for f in findings
    )


def margins(path: str) -> list[str]:
    """The row of a run. Raises ValueError."""
    seen = [r for r in read_run(path).records if r.trained]
    detector = SpikeDetector()
    found = [detector.check(r.loss, r.grad_norm) for r in seen]
    loss = max(found, key=lambda f: f.loss_z)
    norm = max(found, key=lambda f: f.norm_z)
    limits = spikes.LOSS_Z, spikes.LOSS_EXCESS, spikes.NORM_Z, spikes.NORM_RATIO
    return [
        Path(path).stem,
        f"{len(seen):,}",
        f"{loss.loss_z:.1f} ({loss.excess:+.2f})",
        f"{norm.norm_z:.1f} ({norm.ratio:.1f} x)",
        str(sum(f.kind == "precursor" for f in found)),
        str(sum(f.spike for f in found)),
        str(flags(found, 4.0, *limits[1:])),
        str(flags(found, *limits[:3], 2.0)),
    ]


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 no run has a flag, 10 one has, 2 a wrong command line or what cannot be
    read."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    try:
        rows = [margins(path) for path in argv]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print("| " + " | ".join(row) + " |")
    return 10 if any(row[5] != "0" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
