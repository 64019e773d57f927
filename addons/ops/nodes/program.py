"""tools/check_nodes.py: names slow ranks and links, ranks that compute wrong numbers, and ranks
that do not answer, before a run. Started as the run would be, by torchrun or srun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron import launcher
from megatron.arguments import arg
from megatron.problems import error_lines
from tools.shared.program import complain, read

DESCRIPTION = (
    "Measures GEMMs, copies, messages between neighbours and collectives three times on every "
    "rank, compares results to the bit, and names ranks and links that are slow, ranks whose "
    "numbers are wrong, and ranks that do not answer. Start it as a run: torchrun "
    "--nproc-per-node 8 tools/check_nodes.py. Exit codes: 0 all is well, 1 something is named, "
    "2 it cannot start."
)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options."""

    mib: tuple[float, ...] | None = arg(None)
    """sizes of messages (default: 1 and 256; on a CPU 1 and 4)"""

    timeout_seconds: float = arg(60.0, above=0)
    """a rank that is so much later than others is named and ends the check"""

    device: str = arg("auto", choices=("auto", "cpu", "cuda", "xpu"))
    """where to compute"""


def problems(options: CheckOptions) -> list[str]:
    """What is wrong with the values."""
    return [
        f"--mib {size:g}: must be above 0 and finite [value-out-of-range]"
        for size in options.mib or ()
        if not 0 < size < float("inf")
    ]


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 all is well, 1 something is named, 2 it cannot start."""
    options = read(
        CheckOptions, argv, prog="check_nodes.py", description=DESCRIPTION, check=problems
    )
    wrong = [*launcher.read(os.environ)[1], *launcher.rendezvous_problems(os.environ)]
    if wrong:
        print(error_lines(wrong), end="", file=sys.stderr)
        return 2
    try:
        from .check import check

        return check(options.device, options.mib, options.timeout_seconds)
    except ValueError as error:
        complain(error)
        return 2
