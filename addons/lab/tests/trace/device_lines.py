"""Prints which lines of a step's code nothing here runs: neither a trace of the layouts of the parity table
with `cuda` chosen nor, on a CPU, the tests of these folders. Needs the package coverage.

    python -m megatron.addons.lab.tests.trace.device_lines trace 1/4     (and 2/4, 3/4, 4/4)
    python -m megatron.addons.lab.tests.trace.device_lines tests tests/core/kernels tests/core/parallel ...
    python -m megatron.addons.lab.tests.trace.device_lines report
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import coverage

from tests.forkrun import ROOT

FOLDER = ROOT / "runs" / "device_lines"
# What a step goes through; its CPU kernels have nothing to do with a device.
STEP = ("device.py", "cuda.py", "kernels", "model", "optimizer", "parallel", "training/step*.py")
STEP += ("training/batch.py", "training/build.py")
OMITTED = "kernels/cpu"
# The first that the rules of the command line allow is traced, from another one on for each layout.
VARIANTS = (
    "--bf16 --attention-backend flash",
    "--bf16 --transformer-impl transformer_engine",
    "--bf16 --fp8-format hybrid",
    "--bf16 --fp8-format e4m3 --transformer-impl transformer_engine",
    "--fp16",
    "--bf16",
)
RC = """[run]
source = {root}/megatron
data_file = {folder}/data
parallel = true
concurrency = multiprocessing, thread
patch = subprocess, _exit
"""


def trace(number: int, parts: int) -> None:
    """Trace the first and the last rank of every `parts`-th layout, as it is and with a variant of
    precision and libraries."""
    cov = coverage.Coverage(config_file=str(_configured()), data_suffix=f"trace.{number}")
    cov.start()
    from megatron.addons.lab.tests.trace.tracing import Traced
    from megatron.addons.lab.trace.traced_rank import TraceError
    from tests.core.parity.layouts import LAYOUTS, argv

    pretend_libraries()
    layouts = list(enumerate(LAYOUTS.items()))
    for i, (name, case) in layouts[number - 1 :: parts]:
        flags = [flag for flag in (*case.layout, *case.only) if flag]
        for variant in (case.precision, *(VARIANTS[i % 6 :] + VARIANTS[: i % 6])):
            line = argv("x", case.model, 4, *flags, *variant.split())
            try:
                traced = Traced(_mock(line), case.world)
            except (ValueError, SystemExit):
                continue
            for rank in {0, case.world - 1}:
                try:
                    traced.rank(rank)
                except TraceError as error:
                    print(f"{name}: {variant}: rank {rank}: {error}")
            if variant != case.precision:
                break
    cov.stop()
    cov.save()


def _mock(line: Sequence[str]) -> list[str]:
    """The command line on --mock-data and a GPU."""
    from tests.runs import with_flags

    found = list(line)
    for flag in ("--data-path", "--split"):
        at = found.index(flag)
        del found[at : at + 2]
    return with_flags(found, "--mock-data", "--device", "cuda")


def pretend_libraries() -> None:
    """Transformer Engine, flash-attn and apex are there, and the meta device counts as one that
    they run on."""
    from megatron.kernels import libraries
    from tests.core.kernels import fake_libraries as fakes

    fakes.install(*fakes.transformer_engine(), *fakes.flash_attn(), *fakes.apex())
    libraries.cuda_only = lambda device: None


def _configured() -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / "coveragerc"
    file.write_text(RC.format(root=ROOT, folder=FOLDER))
    return file


def tests(paths: Sequence[str]) -> int:
    """Run quick tests of a CPU."""
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={_configured()}"]
    command += ["-m", "pytest", "-q", "-p", "no:xdist", *paths]
    return subprocess.run(command, cwd=ROOT, env=os.environ).returncode


def report() -> None:
    """Print file and lines that neither ran, and how many there are."""
    cov = coverage.Coverage(config_file=str(_configured()))
    ran = {kind: _data(kind) for kind in ("trace", "tests")}
    total = dict.fromkeys(("lines", "no trace", "nothing"), 0)
    for path in sorted(_files()):
        _, lines, _, _, _ = cov.analysis2(str(path))
        traced = set(ran["trace"].lines(str(path)) or ())
        tested = set(ran["tests"].lines(str(path)) or ())
        untraced = set(lines) - traced
        left = untraced - tested
        total["lines"] += len(lines)
        total["no trace"] += len(untraced)
        total["nothing"] += len(left)
        if left:
            print(f"{path.relative_to(ROOT)}: {', '.join(_ranges(sorted(left), lines))}")
    print(", ".join(f"{name}: {count}" for name, count in total.items()))


def _data(kind: str) -> coverage.CoverageData:
    found = coverage.CoverageData(basename=str(FOLDER / f"all.{kind}"))
    found.erase()
    for file in FOLDER.glob("data.*"):
        if ("trace." in file.name) == (kind == "trace"):
            one = coverage.CoverageData(basename=str(file))
            one.read()
            found.update(one)
    return found


def _files() -> Iterator[Path]:
    top = ROOT / "megatron"
    for pattern in STEP:
        one = top / pattern
        found = one.rglob("*.py") if one.is_dir() else top.glob(pattern)
        yield from (path for path in found if not path.is_relative_to(top / OMITTED))


def _ranges(left: list[int], lines: list[int]) -> list[str]:
    """Lines that follow each other among the executable ones, as first-last."""
    place = {line: i for i, line in enumerate(sorted(lines))}
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(left)) if place[b] != place[a] + 1)]
    ends = [*(start - 1 for start in starts[1:]), len(left) - 1]
    return [
        str(left[a]) if a == b else f"{left[a]}-{left[b]}"
        for a, b in zip(starts, ends, strict=True)
    ]


if __name__ == "__main__":
    if sys.argv[1] == "trace":
        trace(*map(int, sys.argv[2].split("/")))
    elif sys.argv[1] == "tests":
        sys.exit(tests(sys.argv[2:]))
    else:
        report()
