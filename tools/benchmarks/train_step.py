#!/usr/bin/env python
"""Time whole training steps: ours against a bare torch loop and transformers, eager and compiled.

Every contestant is a process of its own, from the same weights and on the same samples; before any
clock runs the losses must agree. The processes take turns, one turn of about half a second (at
least two steps, of which the first is not timed) per round, the order moving on by one every round;
all others are stopped meanwhile (SIGSTOP), so that none of their threads takes a core. On CUDA a
stopped process would keep the device's memory: there one contestant has all its turns and ends
before the next one starts, and the first steps (--warmup), which make cuDNN's plans and compile
kernels, are not timed.

Each contestant runs with its own defaults (no variable for threads in its environment; ours sets
what pretrain_gpt.py sets) and with each setting of --env. After three rounds it keeps its defaults
and its fastest setting.

How to read the table:
  default ms, best ms  a step with the defaults and with the best setting: the median over the
                       rounds of a turn's median
  best setting         the one with the lowest median; the lines below the table have all settings
  tok/s, TFLOP/s, of matmul, MFU, peak GB
                       with the best setting; GB of the process, on CUDA of the device
  compile s            what torch.compile took, in no timed step
  x bare, x ...        how many times as fast as that contestant: each with its best setting, in
                       brackets both with their defaults; the median over the rounds of the ratio
                       within the same round
  of ceiling           the time of the step's GEMMs and attention by themselves, as a share of the
                       fastest turn

If memory is short, processes are ended between their turns and started again, which is never timed.
On CUDA the default is ours alone over GPT sizes, with its MFU. Needs torch and numpy; transformers
takes part if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent / "step")]

import step_profile  # noqa: E402
from checkouts import check_names, checkout_name, commit_of, parse_checkout  # noqa: E402
from processes import OutOfMemory, Worker, WorkerFailed, make_job  # noqa: E402
from race import OURS, Contestant, Disagreement, Plan, Race, run_race  # noqa: E402
from settings import (  # noqa: E402
    CPU_SETTINGS,
    DEFAULT,
    environment_of,
    parse_setting,
    thread_variables,
)
from sizes import CPU_SIZES, CUDA_SIZES, parse_size  # noqa: E402
from table import heading, table  # noqa: E402

DTYPES = ("fp32", "bf16")
CONTESTANTS = {
    OURS: Contestant(OURS, "ours"),
    "ours-compiled": Contestant("ours-compiled", "ours", compiled=True),
    "bare": Contestant("bare", "bare"),
    "bare-compiled": Contestant("bare-compiled", "bare", compiled=True),
    "transformers": Contestant("transformers", "transformers"),
    "transformers-compiled": Contestant("transformers-compiled", "transformers", compiled=True),
}
OTHERS = (*(name for name in CONTESTANTS if name != OURS), "ceiling")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [OPTION ...]",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_contestants(parser)
    add_measurement(parser)
    return parser


def add_contestants(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is compared."""
    add = parser.add_argument
    add(
        "--size",
        action="append",
        type=_read(parse_size),
        metavar="SIZE",
        help="a size by name, with changes (gpt10m:seq=128), or a new one "
        "(name:layers=2,hidden=64,...); may be repeated (default: the four CPU sizes, on CUDA "
        "125m to 6.7b)",
    )
    add(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="may be repeated (default: fp32 and bf16; on CUDA bf16)",
    )
    add(
        "--contestants",
        nargs="+",
        choices=OTHERS,
        metavar="NAME",
        help=f"in addition to ours: {', '.join(OTHERS)} (default: all; on CUDA none)",
    )
    add("--alone", action="store_true", help="only ours")
    add(
        "--compare-with",
        action="append",
        type=_read(parse_checkout),
        metavar="DIR",
        help="another checkout of this repository (86e72bf or later, C++ built), whose step "
        "takes part too; may be repeated",
    )
    add(
        "--env",
        action="append",
        type=_read(parse_setting),
        metavar="'NAME=VALUE ...'",
        help="each contestant also runs with these environment variables; may be repeated; "
        f"'default': with its defaults only (default: {', '.join(CPU_SETTINGS)}; on CUDA default)",
    )


def add_measurement(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how it is measured."""
    add = parser.add_argument
    add(
        "--profile",
        action="store_true",
        help="where the time of our step goes, by torch's profiler, in steps after its turns: by "
        "kinds of work, on CUDA by kernels",
    )
    add(
        "--rounds",
        type=_read(_count),
        help="turns of each contestant (default: 7; on CUDA 20; 1 for bf16 of the others on "
        "a CPU that emulates it)",
    )
    add(
        "--warmup",
        type=_read(_count),
        help="steps before, whose losses are compared (default: 2; on CUDA 5)",
    )
    add(
        "--minutes",
        type=float,
        help="time limit of the whole run; it ends with fewer rounds to keep it "
        "(default: no limit; on CUDA 9)",
    )
    add(
        "--threads",
        type=_read(_count),
        help="CPU threads of each contestant, by OMP_NUM_THREADS (default: torch's)",
    )
    add(
        "--busy",
        type=_read(_count),
        default=0,
        metavar="N",
        help="run N processes that compute without end while the contestants take their turns "
        "(default: none)",
    )
    add(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time of the process, for a machine with other work; use it with "
        "--threads 1",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: CUDA if available",
    )
    add("--peak-tflops", type=float, help="peak of the device for MFU (default: by its name)")
    add("--json", metavar="FILE", type=_read(_writable), help="write all figures to this file")


def _read(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that shows what the reader's ValueError says."""

    def read(text: str) -> Any:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _writable(text: str) -> Path:
    """That path; an error before the race and not after it where it cannot be written."""
    try:
        open(text, "a").close()
    except OSError as error:
        raise ValueError(f"{text}: {error.strerror}") from None
    return Path(text)


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def ask_machine(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a process of its own says of the device, of torch and of large GEMMs. Raises what Worker
    raises."""
    job = make_job(
        "machine", device=options.device, clock=options.clock, dtypes=options.dtype or DTYPES
    )
    worker = Worker(
        "the look at the device", job, environment_of(DEFAULT, environment, options.threads)
    )
    try:
        return worker.receive()
    finally:
        worker.end()


def machine_line(options: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """Where, when and how the figures were measured."""
    cuda = facts["device_type"] == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit_of(ROOT),
        "device": facts["device_name"] if cuda else f"{cpu_name()}, {os.cpu_count()} cores",
        "torch": facts["torch"],
        "cpu_capability": facts["cpu_capability"],
        "threads": facts["threads"],
        "clock": options.clock,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "busy_processes": options.busy or None,
        "transformers": metadata.version("transformers") if _has_transformers() else None,
    }


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def complete(options: argparse.Namespace, device: str) -> None:
    """Fill in what was not given; it depends on the device. Raises ValueError for what this machine
    cannot do."""
    cuda = device == "cuda"
    options.device = device
    options.size = options.size or list(CUDA_SIZES if cuda else CPU_SIZES)
    options.dtype = options.dtype or (["bf16"] if cuda else list(DTYPES))
    options.rounds_given = options.rounds is not None
    options.rounds = options.rounds or (20 if cuda else 7)
    options.warmup = options.warmup or (5 if cuda else 2)
    options.minutes = options.minutes or (9.0 if cuda else None)
    options.compare_with = options.compare_with or []
    check_names(options.compare_with)
    given = [DEFAULT] if cuda else CPU_SETTINGS
    options.env = list(dict.fromkeys([DEFAULT, *(options.env or given)]))
    if options.contestants is None:
        options.contestants = [] if cuda else list(OTHERS)
    if options.alone:
        options.contestants = []
    _remove_contestants(
        options, "transformers", "transformers is not installed", _has_transformers()
    )
    if not cuda:
        compiler = os.environ.get("CXX", "g++")
        _remove_contestants(
            options,
            "compiled",
            f"there is no C++ compiler ({compiler})",
            bool(shutil.which(compiler)),
        )


def _remove_contestants(options: argparse.Namespace, word: str, reason: str, usable: bool) -> None:
    removed = [name for name in options.contestants if word in name and not usable]
    if removed:
        print(f"{reason}: {', '.join(removed)} will be skipped")
        options.contestants = [name for name in options.contestants if name not in removed]


def make_plan(options: argparse.Namespace, dtype: str, native: bool, folder: Path) -> Plan:
    """How to run the races of a dtype. `native`: the device has instructions for it."""
    names = [OURS, *(name for name in CONTESTANTS if name in options.contestants)]
    contestants = [CONTESTANTS[name] for name in names]
    contestants += [
        Contestant(checkout_name(tree), "ours", tree=tree) for tree in options.compare_with
    ]
    slow = not native and not options.rounds_given
    others = [one.name for one in contestants if one.kind != "ours"]
    if slow and others:
        print(
            f"\nthis CPU emulates {dtype}, a step may take minutes: 1 round of "
            f"{', '.join(others)} with the defaults (--rounds N: N of all, with all settings)",
            flush=True,
        )
    return Plan(
        contestants=contestants,
        settings=options.env,
        rounds=options.rounds,
        warmup=options.warmup,
        environment=os.environ,
        device=options.device,
        folder=folder,
        ceiling="ceiling" in options.contestants,
        slow_rounds=1 if slow else None,
        profile=options.profile,
        busy=options.busy,
        threads=options.threads,
        clock=options.clock,
    )


def figures(race: Race) -> dict[str, Any]:
    """All figures of a race, for --json."""
    others = [name for name in race.contestants if name != OURS]
    return {
        **asdict(race),
        "tokens_per_step": race.size.tokens,
        "best_setting": {name: race.best(name).setting for name in race.contestants},
        "ratio": {
            other: dict(zip(("best", "defaults"), race.ratio(other, OURS), strict=True))
            for other in others
        },
        "ceiling_seconds": race.ceiling(),
    }


def teller() -> Callable[[str], None]:
    """Shows on a terminal what runs now; each text replaces the one before."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def print_machine(
    options: argparse.Namespace, machine: dict[str, Any], facts: dict[str, Any]
) -> None:
    """The lines before the first table."""
    print(
        ", ".join(
            f"{key.replace('_', ' ')} {value}"
            for key, value in machine.items()
            if value is not None
        )
    )
    for tree in options.compare_with:
        print(f"{checkout_name(tree)}: commit {commit_of(tree)}")
    removed = thread_variables(os.environ)
    if removed:
        print(
            f"removed from the environment of the contestants: {', '.join(removed)} "
            f"(--env sets such variables)"
        )
    rates = ", ".join(
        f"{dtype} {facts['matmul_tflops'][dtype]:.3f} TFLOP/s"
        + " (in fp32)" * (dtype != "fp32" and facts["fast_dtype"][dtype] == "float32")
        for dtype in options.dtype
    )
    peak = options.peak_tflops or "not known (--peak-tflops): no MFU"
    print(
        f"large GEMM: {rates}; peak {peak}; TFLOP/s of a step count {facts['flops_convention']}",
        flush=True,
    )


def run_all(options: argparse.Namespace, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Run every size in every dtype and print its table; the figures of each. Raises what
    run_race raises."""
    tell = teller()
    pairs = [(size, dtype) for size in options.size for dtype in options.dtype]
    end = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    results = []
    for number, (size, dtype) in enumerate(pairs):
        now = time.monotonic()
        deadline = now + (end - now) / (len(pairs) - number)
        try:
            with tempfile.TemporaryDirectory() as folder:
                plan = make_plan(options, dtype, facts["native"][dtype], Path(folder))
                race = run_race(plan, size, dtype, deadline, tell)
        except OutOfMemory as error:
            print(f"\n{size.name} {dtype}: {error}, skipped", flush=True)
            results.append({"size": asdict(size), "dtype": dtype, "out_of_memory": True})
            continue
        except Disagreement as error:
            raise Disagreement(f"{size.name} {dtype}: {error}") from None
        finally:
            tell("")
        lines = table(race, facts["matmul_tflops"][dtype], options.peak_tflops)
        print("\n".join(["", heading(race), *lines]), flush=True)
        if race.profile:
            print("\n".join(["", *step_profile.lines(race.profile, race.ceiling())]), flush=True)
        results.append(figures(race))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if contestants disagree or one fails, 2 if the command line cannot be
    run."""
    options = build_parser().parse_args(argv)
    try:
        facts = ask_machine(options, os.environ)
        complete(options, facts["device_type"])
        options.peak_tflops = options.peak_tflops or facts["peak_tflops"]
        machine = machine_line(options, facts)
        print_machine(options, machine, facts)
        results = run_all(options, facts)
    except (Disagreement, WorkerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        report = {
            "machine": machine,
            "matmul_tflops": facts["matmul_tflops"],
            "peak_tflops": options.peak_tflops,
            "races": results,
        }
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
