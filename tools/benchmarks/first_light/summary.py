"""The results of first_light.sh on one screen, and its table of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import aligned
from steps import short

TABLE = 25  # kernels of each contestant that are kept


def number(value: Any, form: str = ".0f", missing: str = "-") -> str:
    """A figure in that form, or that there is none."""
    return format(value, form) if isinstance(value, (int, float)) else missing


def probe_lines(facts: Mapping[str, Any]) -> list[str]:
    """The probe's figures in a few lines."""

    def of(*path: str) -> Any:
        value: Any = facts
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    small = ".0f" if (of("machine", "matmul_tflops", "bf16") or 0) > 10 else ".3f"  # a CPU's
    adds = of("weight gradient TFLOP/s", "adds in fp32")
    lines = [
        f"GEMM {number(of('machine', 'matmul_tflops', 'bf16'), small)} TFLOP/s, copy "
        f"{number(of('copy TB/s'), '.2f')} TB/s, launch {number(of('launch us'), '.1f')} us",
        f"weight gradient {number(of('weight gradient TFLOP/s', 'product'), small)}, adding in "
        f"fp32 {number(of('weight gradient TFLOP/s', 'adding product'), small, str(adds))}; FP8 "
        f"{number(of('FP8 TFLOP/s', 'precise'), small)}, with fast accumulation "
        f"{number(of('FP8 TFLOP/s', 'fast accumulation'), small)}",
    ]
    for width in ("attention d 64", "attention d 128"):
        rates = [
            f"{name} {number(of(width, name, 'forward'), small)} / "
            f"{number(of(width, name, 'both'), small)}"
            for name in ("default", "cudnn", "flash")
        ]
        kernel = of(width, "default", "kernel") or ""
        lines.append(f"{width}: {', '.join(rates)} TFLOP/s forward / both; default is {kernel}")
    gemms = of("GEMMs TFLOP/s")
    if isinstance(gemms, dict):
        rates = [f"{name} {number(rate, small)}" for name, rate in gemms.items()]
        lines.append(f"GEMMs: {', '.join(rates)}")
    return lines


def bench_lines(facts: Mapping[str, Any]) -> list[str]:
    """A row for each contestant."""
    titles = ("", "ms", "tok/s", "TFLOP/s", "MFU %", "peak GiB", "compile s", "loss")
    cells = [titles]
    for row in facts.get("rows", ()):
        figures = (
            number(row.get("ms"), ".1f"),
            number(row.get("tokens/s")),
            number(row.get("TFLOP/s"), ".3g"),
            number(row.get("MFU %"), ".1f"),
            number(row.get("peak GiB"), ".1f"),
            number(row.get("compile s"), ".0f"),
            number((row.get("losses") or [None])[-1], ".4f"),
        )
        cells.append((short(row["cell"]), *figures))
    return aligned(cells)


def other_lines(name: str, facts: Mapping[str, Any]) -> list[str]:
    """The results of a step without a table."""
    if not facts:
        return []
    if name in ("kernels", "compiled"):
        return [
            f"{facts['passed']} passed, {len(facts['failed'])} failed, {facts['skipped']} skipped"
        ]
    if name == "resume":
        return [f"{facts['iterations']} iterations, {len(facts['different'])} differ"]
    apart = (
        f"{family} {number(facts[family]['largest difference'], '.1e')} over "
        f"{facts[family]['iterations']} iterations"
        for family in ("gpt", "llama")
    )
    values = facts["bf16"]["losses"]
    ends = f"{values[0]:.3f} to {values[-1]:.3f}" if values else "none"
    return [f"losses, CPU and device: {', '.join(apart)}; bf16 {ends}"]


def summary(head: str, steps: Mapping[str, Mapping[str, Any]]) -> str:
    """All results of the steps that ran."""
    lines = [head]
    for place, (name, step) in enumerate(steps.items(), 1):
        lines.append(f"{place} {name}: {step['state']}, {step['seconds']:.0f} s")
        facts = step["results"]
        try:
            make = {"probe": probe_lines, "bench": bench_lines}.get(name)
            shown = make(facts) if make else other_lines(name, facts)
        except (KeyError, TypeError, ValueError) as error:
            shown = [f"results.json has them: {error!r}"]
        lines += [f"  {line}" for line in shown]
        lines += [f"  FAILED {problem[:200]}" for problem in step["problems"][:6]]
    return "\n".join(lines) + "\n"


def write_kernels(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """The longest kernels of each contestant; no more of them stay in its row."""
    with open(file, "w", encoding="utf-8") as out:
        for row in rows:
            found = row.get("kernels", [])
            row["kernels"] = found[:TABLE]
            total = sum(seconds for _, _, seconds in found) or 1.0
            launches = sum(count for _, count, _ in found)
            print(f"== {short(row['cell'])}: {launches} launches, {1e3 * total:.2f} ms", file=out)
            for name, count, seconds in row["kernels"]:
                share = 100 * seconds / total
                print(f"{1e3 * seconds:9.3f} ms {share:5.1f} % x {count:5d} {name[:130]}", file=out)
