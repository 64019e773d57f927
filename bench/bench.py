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
import inspect
import itertools
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(FOLDER), str(FOLDER / "step")]

from cases import generate, parts, programs, step, windows  # noqa: E402, F401
from harness import (  # noqa: E402
    PEERS,
    REGISTRY,
    Case,
    Failed,
    Setup,
    aligned,
    commit_of,
    parameters,
    run_case,
)

from tools.shared.program import complain  # noqa: E402

Asked = tuple[Callable[..., Iterator[Case]], dict[str, list[str]]]


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
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the training step")
    add("--small", action="store_true", help="the smallest sizes, to try a benchmark")
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


def read_words(words: Sequence[str]) -> list[Asked]:
    """The benchmarks that are asked for, with their parameters. Raises ValueError."""
    asked: list[Asked] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            if name not in REGISTRY:
                raise ValueError(f"{name!r} is none of {', '.join(REGISTRY)}")
            asked.append((REGISTRY[name], {}))
            continue
        known = parameters(asked[-1][0]) if asked else {"none": "give a benchmark first"}
        if not asked or name not in known:
            raise ValueError(f"{word!r}: the parameters are {', '.join(known)}")
        asked[-1][1].setdefault(name, []).append(value)
    return asked


def cases_of(asked: Asked, setup: Setup) -> Iterator[Case]:
    """The cases of every combination of parameters. Raises ValueError for a value that is none."""
    function, requested = asked
    values: dict[str, Sequence[Any]] = {}
    for name, default in parameters(function).items():
        usual = default if isinstance(default, tuple) else (default,)
        kind = type(usual[0])
        values[name] = usual[:1] if setup.small else usual
        if name in requested:
            values[name] = [kind(text) for text in requested[name]]
    for chosen in itertools.product(*values.values()):
        yield from function(setup, **dict(zip(values, chosen, strict=True)))


def machine() -> dict[str, Any]:
    """When, where and with what the figures were measured."""
    from megatron import device

    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit_of(ROOT),
        "processor": device.cpu_info("model name"),
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
    for name, function in REGISTRY.items():
        shown = [
            f"{word}={' or '.join(map(str, value)) if isinstance(value, tuple) else value}"
            for word, value in parameters(function).items()
        ]
        print(textwrap.fill(f"{name}: {inspect.getdoc(function)}", 100, subsequent_indent="  "))
        print(textwrap.indent(textwrap.fill("; ".join(shown), 96), "    "))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 1 sides disagree or a process failed, 2 a wrong command line."""
    options = build_parser().parse_intermixed_args(argv)
    if not options.words:
        list_benchmarks()
        return 0
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for tree in options.against:
        print(f"{tree.name}: commit {commit_of(tree)}")
    results = []
    code = 0
    try:
        for asked in read_words(options.words):
            name = asked[0].__name__
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                taking_part = (options.peer, options.against, options.device)
                setup = Setup(Path(folder), options.small, *taking_part)
                for case in cases_of(asked, setup):
                    print(f"\n{name}: {case.name}", flush=True)
                    try:
                        result = run_case(case, options.rounds)
                    except Failed as error:  # of one case; the others can still be measured
                        complain(error)
                        code = 1
                        continue
                    results.append({"benchmark": name, **result})
                    print("\n".join(lines_of(result)), flush=True)
    except ValueError as error:
        complain(error)
        code = 2
    if options.json:
        json.dump({"machine": facts, "results": results}, options.json, indent=1)
        options.json.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
