"""--calibrate: the constants of a machine from the steps that a run on it wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron.analysis.run_reader import read_run

from .fit import fit
from .machines import PRIORS, Machine
from .step_time import Runs, step_seconds

WARM = 3  # iterations that are not counted: memory is allocated, kernels are chosen
# Spread of the logarithm of the factor that the times of computing have in common; messages are
# not faster where a device is.
SPEED = 1.0
RATES = ("gemm", "gemm8", "gemm4", "attention", "flash", "copy")
TIMES = ("host", "fixed")


@dataclass(frozen=True)
class Calibrated:
    """The machine's constants, and by batch size (samples, steps, seconds measured, predicted
    before, predicted after)."""

    constants: Mapping[str, float]
    steps: list[tuple[int, int, float, float, float]]


def measured_steps(path: str) -> dict[int, list[float]]:
    """Seconds of the steps in a metrics file, log or run directory, by global batch size. Raises
    ValueError."""
    steps: dict[int, list[float]] = {}
    for record in read_run(path).records:
        milliseconds = record.numbers.get("milliseconds")
        if record.trained and record.iteration > WARM and milliseconds and record.global_batch_size:
            steps.setdefault(record.global_batch_size, []).append(milliseconds / 1000)
    if not steps:
        raise ValueError(
            f"--calibrate {path}: no iteration after {WARM} has a batch and a time; give the "
            "--metrics-file of a longer run [value-out-of-range]"
        )
    return steps


def _scaled(constants: Mapping[str, float], x: np.ndarray) -> dict[str, float]:
    """Constants `x` (logarithms: of the common speed, then of each) away from these."""
    result = {
        name: constants[name] * float(np.exp(move))
        for name, move in zip(PRIORS, x[1:], strict=True)
    }
    slower = float(np.exp(x[0]))
    result |= {name: result[name] / slower for name in RATES}
    result |= {name: result[name] * slower for name in TIMES}
    return {**constants, **result}


def calibrate(machine: Machine, run: Runs, steps: Mapping[int, list[float]]) -> Calibrated:
    """Constants nearest to the median steps of each batch size of this run: one factor for the
    speed of everything, and what several batch sizes tell apart."""
    batches = sorted(steps)
    runs = replace(run, batch=np.array(batches, float))
    measured = np.array([np.median(steps[batch]) for batch in batches])

    def predict(x: np.ndarray) -> np.ndarray:
        return np.log(sum(step_seconds(_scaled(machine.constants, x), runs).values()))

    spread = np.array([SPEED, *(prior.spread for prior in PRIORS.values())])
    start = np.zeros(len(spread))
    x = fit(predict, measured, start, spread)
    before, after = np.exp(predict(start)), np.exp(predict(x))
    rows = zip(batches, (len(steps[b]) for b in batches), measured, before, after, strict=True)
    return Calibrated(_scaled(machine.constants, x), [tuple(row) for row in rows])


def write(path: str, machine: Machine, found: Calibrated, source: str) -> None:
    """A machine file like those of machines/, for --gpu. Raises OSError, also if there is one."""
    facts = {**machine.facts, "like": machine.facts.get("like", machine.name)}
    lines = [f"# {machine.name!r}, calibrated by tools/plan.py from {Path(source).name!r}"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in facts.items()]
    lines += ["", "[measured]"]
    lines += [f"{name} = {found.constants[name]:.5g}" for name in PRIORS]
    with open(path, "x", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
