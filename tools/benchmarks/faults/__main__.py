"""Faults in runs on CPUs of this machine, and whether what follows is as it must be: one program
for each check. Exit code 1 if not. Needs Linux."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.benchmarks.faults import hangs, results

CHECKS = {"results": results, "hangs": hangs}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a check: python -m tools.benchmarks.faults CHECK --help."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True)
    for name, module in CHECKS.items():
        kind = argparse.RawDescriptionHelpFormatter
        text = module.__doc__
        module.add_flags(checks.add_parser(name, description=text, formatter_class=kind))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        return int(not CHECKS[args.check].check(args, Path(name).resolve()))


if __name__ == "__main__":
    sys.exit(main())
