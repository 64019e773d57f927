"""Faults in runs on CPUs of this machine, and whether what follows is as it must be: one program
for each check. Exit code 1 if not. Needs Linux."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.faults import hangs, results

CHECKS = {"results": results, "hangs": hangs}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a check: python -m bench.faults CHECK --help."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True)
    for name, module in CHECKS.items():
        kind = argparse.RawDescriptionHelpFormatter
        flags = checks.add_parser(name, description=module.__doc__, formatter_class=kind)
        flags.add_argument("--seed", type=int, default=1, help="of the first run (default: 1)")
        flags.add_argument("--keep", type=Path, metavar="DIR", help="folders of what is wrong")
        module.add_flags(flags)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        home = (args.keep or Path(name)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        return int(not CHECKS[args.check].check(args, home))


if __name__ == "__main__":
    sys.exit(main())
