"""A row of the table in docs/benchmarks.md, of a metrics file: row.py FILE SIZE TARGET [PEAK]. Exit
code 1 if the last validation loss is above the target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean


def row(path: Path, size: str, target: float, peak: float | None) -> tuple[str, bool]:
    """The row, and whether the target was reached. Time is that of the iterations; MFU is against
    `peak` TFLOP/s of a device."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [each for each in rows if "split" not in each]
    loss = [each["lm_loss"] for each in rows if each.get("split") == "validation"][-1]
    seconds = sum(each["elapsed_ms"] for each in steps) / 1e3
    tokens = steps[-1]["consumed_tokens"]
    tflops = mean(each["tflops"] for each in steps)
    cells = [
        size,
        f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.1f} min",
        f"{tokens / 1e6:,.1f} M",
        f"{loss:.4f} ({'' if loss <= target else 'not '}<= {target:g})",
        f"{tokens / seconds:,.0f}",
        f"{tflops:.3g}",
        f"{tflops / peak:.1%}" if peak else "-",
    ]
    return f"| {' | '.join(cells)} |", loss <= target


if __name__ == "__main__":
    file, name, wanted, *most = sys.argv[1:]
    line, reached = row(Path(file), name, float(wanted), float(most[0]) if any(most) else None)
    print("| size | time | tokens | validation loss | tokens/s | TFLOP/s | MFU |")
    print("|---|---|---|---|---|---|---|")
    print(line)
    sys.exit(not reached)
