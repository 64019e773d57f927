"""Kinds of machines: what data sheets say (machines/*.toml), and the constants that measured runs
gave (machines/fitted.json)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.small_files import read_text

from .fit import fit
from .step_time import Numbers, Runs, step_seconds

FOLDER = Path(__file__).parent / "machines"
FACTS = ("tflops", "tflops8", "tflops4", "hbm_bytes", "nvlink_bytes", "sms", "overlap")
OVERLAP = 8.0  # of a device that computes beside its host; 1: one after the other, as on a CPU


class Prior(NamedTuple):
    """What a constant was taken for before any run: its value, the spread of its logarithm, and the
    spread between kinds of GPUs (0: all have the same)."""

    value: float
    spread: float
    between: float = 0.0


PRIORS = {
    "gemm": Prior(0.73, 0.07, 0.1),  # of the peak, in a large GEMM; in FP8, in FP4
    "gemm8": Prior(0.52, 0.15, 0.1),
    "gemm4": Prior(0.35, 0.3, 0.15),
    "attention": Prior(0.53, 0.1, 0.1),  # of the peak, forward, many keys: kernels of the device's
    "flash": Prior(0.3, 0.15, 0.15),  # ... and flash-attn 2
    "copy": Prior(0.88, 0.07, 0.05),  # of the data sheet's bandwidth of memory
    "nvlink": Prior(0.75, 0.08, 0.05),  # ... of links
    "net": Prior(0.75, 0.1, 0.1),
    "grouped": Prior(0.8, 0.2, 0.15),  # GEMMs of experts, of others of the same sizes
    "alpha_near": Prior(15e-6, 0.7),  # seconds of a collective by the logarithm of its size
    "alpha_far": Prior(30e-6, 1.0, 0.3),
    "hop": Prior(30e-6, 0.7),  # ... of a ring for each node that it passes
    "alpha_pipe": Prior(50e-6, 1.0),
    "stream": Prior(66, 0.15),  # elements of width h that a layer reads and writes for a token
    "routed": Prior(14, 0.5),  # ... and for each of its experts
    "cast": Prior(6, 0.5),  # ... for scales and casts of FP8
    "wave": Prior(0.2, 0.5),  # share of the last wave's loss that libraries do not avoid
    "inner": Prior(30, 0.7),  # inner dimension that costs as much as filling a tile's pipeline
    "keys": Prior(175, 0.2),  # mean number of keys at which attention has half its rate
    "head": Prior(0.25, 0.2),  # exponent of a head's width in attention's rate
    "core_backward": Prior(3.4, 0.05),  # attention's backward, of its forward
    "dispatch": Prior(1, 0.5),  # exchanges of experts, of what bandwidth says
    "host": Prior(3e-3, 0.5),  # seconds to launch forward and backward of a layer
    "host_tp": Prior(0.5, 0.7),  # ... in addition with tensor parallelism, and with experts
    "host_experts": Prior(1.5, 0.7),
    "aging": Prior(0.5, 0.7),  # by which the programs' work beside experts' GEMMs falls in a year
    "late": Prior(0.6, 0.5),  # share of the gradients' sum that may hide in backward
    "logits": Prior(14, 0.3),  # bytes that the loss reads and writes of a logit
    "state": Prior(40, 0.2),  # bytes that the optimizer reads and writes of an element
    "fixed": Prior(5e-3, 1.0),  # seconds of a step that nothing else has
}
COMMON = list(PRIORS)
BETWEEN = [name for name, prior in PRIORS.items() if prior.between]


class Machine(NamedTuple):
    """A kind of GPU: facts of its file, and the constants of the formulas."""

    name: str
    facts: Mapping[str, Any]
    constants: Mapping[str, float]


def names() -> list[str]:
    """The kinds that have a file."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@lru_cache
def load(name: str) -> Machine:
    """The machine of this name, or of this file. Raises ValueError."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.exists():
        raise ValueError(
            f"--gpu {name}: must be one of {', '.join(names())}, or a .toml file like theirs "
            "[value-not-a-choice]"
        )
    try:
        facts = {"overlap": OVERLAP} | tomllib.loads(read_text(path))
        fitted = json.loads(read_text(FOLDER / "fitted.json"))
        constants = {key: prior.value for key, prior in PRIORS.items()} | fitted["common"]
        constants |= fitted.get(facts.get("like", path.stem), {}) | facts.pop("measured", {})
        constants |= {key: float(facts[key]) for key in FACTS}
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: not a machine ({error}); machines/h100.toml has all keys [machine-malformed]"
        ) from None
    return Machine(path.stem, facts, constants)


class Constants:
    """The constants of several kinds at once, as a vector of logarithms: those that all have in
    common, then by how much each kind's differ."""

    def __init__(self, kinds: list[str]):
        self.kinds = kinds
        self.facts = [load(kind).facts for kind in kinds]
        common = np.array([np.log(prior.value) for prior in PRIORS.values()])
        apart = np.zeros((len(BETWEEN), len(kinds)))
        for number, kind in enumerate(kinds):
            if kind.startswith("a100"):  # its flash-attn 2 is the device's; lower clocks drop less
                apart[BETWEEN.index("flash"), number] = np.log(2.0)
                apart[BETWEEN.index("gemm"), number] = np.log(1.15)
        self.start = np.concatenate([common, apart.ravel()])
        spread = [PRIORS[name].between for name in BETWEEN for _ in kinds]
        self.spread = np.array([prior.spread for prior in PRIORS.values()] + spread)

    def of(self, x: np.ndarray, which: np.ndarray) -> dict[str, Numbers]:
        """By name, for runs of these kinds."""
        count = len(self.kinds)
        values = dict(zip(COMMON, np.exp(x), strict=False))
        for number, name in enumerate(BETWEEN):
            first = len(COMMON) + number * count
            values[name] = values[name] * np.exp(x[first : first + count])[which]
        for fact in FACTS:
            values[fact] = np.array([float(each[fact]) for each in self.facts])[which]
        return values

    def fitted(
        self, runs: Runs, which: np.ndarray, measured: np.ndarray, systems: np.ndarray
    ) -> np.ndarray:
        """The vector nearest to these steps. Each of the `systems` may differ by a factor that
        scatters by 8 %, so that none with many runs bends the constants."""
        size, count = len(self.start), len(self.kinds)
        rows = np.arange(len(measured))

        def predict(x: np.ndarray) -> np.ndarray:
            seconds = step_seconds(self.of(x[:size], which), runs)
            return np.log(sum(seconds.values())) + x[size:][systems]

        def slopes(x: np.ndarray, base: np.ndarray) -> np.ndarray:
            # a run knows the constants of one kind: one evaluation moves those of all
            result = np.zeros((len(measured), len(x)))
            for number in range(len(COMMON)):
                moved = x.copy()
                moved[number] += 1e-3
                result[:, number] = (predict(moved) - base) / 1e-3
            for first in range(len(COMMON), size, count):
                moved = x.copy()
                moved[first : first + count] += 1e-3
                result[rows, first + which] = (predict(moved) - base) / 1e-3
            result[rows, size + systems] = 1
            return result

        extra = int(systems.max()) + 1
        start = np.concatenate([self.start, np.zeros(extra)])
        spread = np.concatenate([self.spread, np.full(extra, 0.08)])
        return fit(predict, measured, start, spread, slopes)[:size]

    def as_json(self, x: np.ndarray) -> dict[str, dict[str, float]]:
        """What machines/fitted.json has: those in common, and of each kind those of its own."""
        result = {"common": {name: _short(v) for name, v in zip(COMMON, np.exp(x), strict=False)}}
        for number, kind in enumerate(self.kinds):
            own = self.of(x, np.array([number]))
            result[kind] = {name: _short(own[name][0]) for name in BETWEEN}
        return result


def _short(number: float) -> float:
    return float(f"{number:.4g}")
