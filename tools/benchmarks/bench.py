#!/usr/bin/env python
"""Benchmarks of this suite, each beside what it is compared with.

    bench.py                                      the benchmarks and their parameters
    bench.py step size=nano dtype=fp32            one of them; a parameter may be given repeatedly
    bench.py tokenize startup --against ../old    both beside another checkout of this repository

Each side of a comparison is a process of its own; the sides take turns, and a ratio is the median
over the rounds of (seconds of the other side / ours) in the same round: more than 1 = ours is
faster. Sides that must compute the same are compared first. Quote ratios of one run, never seconds
of two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(FOLDER), str(FOLDER / "step")]

from cases import data, generate, parts, program, step  # noqa: E402, F401
from harness import (  # noqa: E402
    PEERS,
    REGISTRY,
    Benchmark,
    Case,
    Disagreement,
    Setup,
    aligned,
    run_case,
)
from processes import OutOfMemory, WorkerFailed, commit_of  # noqa: E402

from tools.shared.program import complain


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="NAME [PARAMETER=VALUE ...]", help="what is measured")
    add(
        "--peer",
        action="append",
        choices=(*PEERS, "none"),
        help="only this peer; may be repeated (default: all that are installed)",
    )
    add(
        "--against",
        action="append",
        type=checkout,
        default=[],
        metavar="DIR",
        help="another checkout of this repository, C++ built, that takes part; may be repeated",
    )
    add("--rounds", type=int, default=5, help="turns of each side (default: 5)")
    add("--threads", type=int, help="CPU threads of each process (default: torch's)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the training step")
    add("--small", action="store_true", help="the smallest sizes, to try a benchmark")
    add("--folder", metavar="DIR", help="where files are written (default: the temporary folder)")
    add("--json", type=argparse.FileType("w"), metavar="FILE", help="write all figures there")
    return parser


def checkout(text: str) -> Path:
    """That directory. Raises ArgumentTypeError where it is no checkout, or its C++ is not built and
    ours is."""
    tree = Path(text).resolve()
    if not (tree / "pretrain_gpt.py").is_file():
        raise argparse.ArgumentTypeError(f"{text}: not a checkout of this repository")
    built = "megatron/kernels/**/*.so"
    if any(ROOT.glob(built)) and not any(tree.glob(built)):
        raise argparse.ArgumentTypeError(
            f"{text}: its C++ is not built; run `python setup.py build_ext --inplace` there"
        )
    return tree


def read_words(words: Sequence[str]) -> list[tuple[Benchmark, dict[str, list[str]]]]:
    """The benchmarks that are asked for, with their parameters. Raises ValueError."""
    asked: list[tuple[Benchmark, dict[str, list[str]]]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            if name not in REGISTRY:
                raise ValueError(f"{name!r} is none of {', '.join(REGISTRY)}")
            asked.append((REGISTRY[name], {}))
        elif not asked or name not in asked[-1][0].parameters:
            known = ", ".join(asked[-1][0].parameters) if asked else "none: give a benchmark first"
            raise ValueError(f"{word!r}: the parameters are {known}")
        else:
            asked[-1][1].setdefault(name, []).append(value)
    return asked


def cases_of(benchmark: Benchmark, requested: dict[str, list[str]], setup: Setup) -> Iterator[Case]:
    """The cases of every combination of its parameters. Raises ValueError for a value that is
    none."""
    values: dict[str, Sequence[Any]] = {}
    for name, default in benchmark.parameters.items():
        usual = default if isinstance(default, tuple) else (default,)
        kind = type(usual[0])
        values[name] = [kind(text) for text in requested[name]] if name in requested else usual
        if setup.small and name not in requested:
            values[name] = usual[:1]
    for chosen in itertools.product(*values.values()):
        yield from benchmark.cases(setup, **dict(zip(values, chosen, strict=True)))


def machine() -> dict[str, Any]:
    """When, where and with what the figures were measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit_of(ROOT),
        "processor": next(names, platform.machine()),
        "cores": os.cpu_count(),
        "torch": metadata.version("torch"),
        "load": round(os.getloadavg()[0], 1),
    }


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table of one case: each side's median, its rate, and how many times as fast is ours."""
    unit = result["unit"]
    rows = []
    for name, side in result["sides"].items():
        ratio = result["ratios"].get(name)
        row = {"": name, "seconds": f"{side['median']:.4g}"}
        row |= {f"{unit}/s": f"{side['rate']:.4g}"} if unit else {}
        row["ours is faster"] = (
            "{median:.2f} x ({range[0]:.2f} to {range[1]:.2f})".format(**ratio) if ratio else ""
        )
        further = {k: v for k, v in side.items() if k not in ("seconds", "median", "rate")}
        row |= {k: v if isinstance(v, str) else f"{v:.4g}" for k, v in further.items()}
        rows.append(row)
    titles = list(dict.fromkeys(title for row in rows for title in row))
    return aligned([titles, *([row.get(title, "") for title in titles] for row in rows)])


def list_benchmarks() -> None:
    """Print the registry."""
    for benchmark in REGISTRY.values():
        shown = (
            f"{name}={' or '.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in benchmark.parameters.items()
        )
        print(textwrap.fill(f"{benchmark.name}: {benchmark.about}", 100, subsequent_indent="  "))
        print(textwrap.fill("; ".join(shown), 100, initial_indent="    ", subsequent_indent="    "))


def main(argv: Sequence[str] | None = None, in_process: bool = False) -> int:
    """Exit codes: 0 measured, 1 sides disagree or a process failed, 2 a wrong command line.
    `in_process`: all sides in this process."""
    parser = build_parser()
    options = parser.parse_intermixed_args(argv)
    if not options.words:
        list_benchmarks()
        return 0
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for tree in options.against:
        print(f"{tree.name}: commit {commit_of(tree)}")
    results = []
    try:
        for benchmark, words in read_words(options.words):
            with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
                setup = Setup(
                    Path(folder), options.small, options.peer, options.against, options.device
                )
                for case in cases_of(benchmark, words, setup):
                    print(f"\n{benchmark.name}: {case.name}", flush=True)
                    try:
                        result = run_case(case, options.rounds, in_process, options.threads)
                    except OutOfMemory as error:
                        print(f"  out of memory: {error}", flush=True)
                        continue
                    results.append({"benchmark": benchmark.name, **result})
                    print("\n".join(lines_of(result)), flush=True)
    except (Disagreement, WorkerFailed) as error:
        complain(error)
        return 1
    except ValueError as error:
        complain(error)
        return 2
    finally:
        if options.json:
            json.dump({"machine": facts, "results": results}, options.json, indent=1)
            options.json.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
