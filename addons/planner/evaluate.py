"""How far predictions are from measured steps: by system and GPU, with systems left out of the fit,
and what the advice would have cost."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from megatron.config.plan.fit import GIB

from . import nanotron, points
from .machines import FOLDER, Constants, load
from .step_time import Runs, step_seconds

Rows = Sequence[Mapping[str, str]]
Key = TypeVar("Key", bound=Hashable)
HELD = 5.0  # as many runs of a system as its factor is held to 1 by
CLOSE = 0.06  # of a run's memory, what a prediction may be off
CLEARLY = 1.2  # a step tells a program where those of the two differ by as much
LEAST_CELL = 10  # layouts of a cell of a sweep


@dataclass(frozen=True)
class Comparison:
    """Rows with seconds predicted and measured."""

    rows: Rows
    predicted: np.ndarray
    measured: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """Relative errors, without a factor."""
        return self.predicted / self.measured - 1

    @property
    def factored(self) -> np.ndarray:
        """Relative errors with the nuisance factor."""
        return self.predicted * factors(self) / self.measured - 1


def system(row: Mapping[str, str]) -> tuple[str, str, str]:
    """What a nuisance factor belongs to: the source, the GPU, and experts or dense."""
    kind = "experts" if row.get("experts") else "dense"
    return row["source"], row["gpu"], kind


def groups(rows: Rows, key: Callable[[Mapping[str, str]], Key]) -> dict[Key, list[int]]:
    """Numbers of rows by key."""
    result = defaultdict(list)
    for number, row in enumerate(rows):
        result[key(row)].append(number)
    return result


def factors(found: Comparison) -> np.ndarray:
    """Of each row measured over predicted, as the median of its system's *other* rows has it, held
    to 1 where they are few: no row is corrected by itself."""
    logs = np.log(found.measured / found.predicted)
    result = np.zeros(len(logs))
    for members in groups(found.rows, system).values():
        for number in members:
            others = [other for other in members if other != number]
            if others:
                result[number] = np.median(logs[others]) * len(others) / (len(others) + HELD)
    return np.exp(result)


def predict(rows: Rows, runs: Runs | None = None) -> np.ndarray:
    """Seconds of a step by the constants that are shipped; `runs`: other runs than the rows say."""
    machines = [load(points.machine_of(row)) for row in rows]
    names = machines[0].constants
    constants = {name: np.array([m.constants[name] for m in machines]) for name in names}
    seconds = step_seconds(constants, points.runs(rows) if runs is None else runs)
    return np.sum(list(seconds.values()), axis=0)


def _fitted(rows: Rows, kinds: list[str]) -> tuple[Constants, np.ndarray]:
    constants = Constants(kinds)
    which = np.array([kinds.index(points.machine_of(row)) for row in rows])
    systems = np.zeros(len(rows), int)
    for number, members in enumerate(groups(rows, lambda row: system(row)[:2]).values()):
        systems[members] = number
    measured = np.array([float(row["step_s"]) for row in rows])
    return constants, constants.fitted(points.runs(rows), which, measured, systems)


def kinds_of(rows: Rows) -> list[str]:
    """The machines of these rows."""
    return sorted({points.machine_of(row) for row in rows})


def refit(rows: Rows) -> None:
    """Write machines/fitted.json from all rows."""
    constants, x = _fitted(rows, kinds_of(rows))
    text = json.dumps(constants.as_json(x), indent=1)
    (FOLDER / "fitted.json").write_text(text + "\n", encoding="utf-8")
    load.cache_clear()


def unseen(rows: Rows, test: Iterable[Sequence[int]]) -> Comparison:
    """Predictions of each of these parts by constants that were fitted without it."""
    kinds = kinds_of(rows)
    seen, seconds = [], []
    for part in test:
        left = set(part)
        constants, x = _fitted([row for n, row in enumerate(rows) if n not in left], kinds)
        chosen = [rows[number] for number in part]
        which = np.array([kinds.index(points.machine_of(row)) for row in chosen])
        seconds.append(sum(step_seconds(constants.of(x, which), points.runs(chosen)).values()))
        seen += chosen
    measured = np.array([float(row["step_s"]) for row in seen])
    return Comparison(seen, np.concatenate(seconds), measured)


def summary(errors: np.ndarray) -> str:
    """Mean absolute error, its 90th percentile and median."""
    size = np.abs(errors)
    high = np.quantile(size, 0.9)
    return f"{size.mean():.1%}, 90th percentile {high:.1%}, median {np.median(size):.1%}"


def read(path: str) -> tuple[list[dict[str, str]], list[str]]:
    """Rows that can be compared, and why others cannot. Raises ValueError."""
    rows = points.read(path)
    reasons = [points.unusable(row) for row in rows]
    left = Counter(reason for reason in reasons if reason)
    usable = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    if not usable:
        raise ValueError(f"--evaluate {path}: no row can be compared [points-malformed]")
    return usable, [f"{count} rows left out: {reason}" for reason, count in left.items()]


def compared(rows: Rows) -> Comparison:
    """All rows by the shipped constants."""
    return Comparison(rows, predict(rows), np.array([float(row["step_s"]) for row in rows]))


def table(found: Comparison) -> list[str]:
    """The errors by system and GPU."""
    factored = np.abs(found.factored)
    plain = np.abs(found.errors)
    lines = [f"{'rows':>5} {'error':>7} {'factor':>7} {'with it':>8} {'p90':>6}  system, GPU"]
    for key, members in sorted(groups(found.rows, system).items()):
        factor = np.median((found.measured / found.predicted)[members])
        name, gpu, kind = key
        lines.append(
            f"{len(members):5} {plain[members].mean():7.1%} {factor:7.2f} "
            f"{factored[members].mean():8.1%} {np.quantile(factored[members], 0.9):6.1%}  "
            f"{name}, {gpu}, {kind}"
        )
    return [
        *lines,
        f"all {len(plain)}: mean absolute error {summary(found.errors)}",
        f"with a factor per system (of its other rows): {summary(found.factored)}",
    ]


def _of_program(rows: Rows, runs: Runs, later: np.ndarray) -> np.ndarray:
    """Seconds of nanotron's steps, of the later of its two programs where `later`."""
    waiting = replace(runs, polls=nanotron.POLL * later)
    return predict(rows, waiting) + nanotron.slow_sums(runs)


def _expected(found: Comparison, by_step: bool = False) -> np.ndarray:
    """Seconds of a step; of nanotron's runs by the likelier of its two programs, or by that which
    the run's measured step tells."""
    rows = found.rows
    runs = points.runs(rows)
    known = np.array(["nanotron" in row["source"] for row in rows])
    later = nanotron.likely_later(runs)
    if by_step:
        later = _program_by_step(rows, runs, later)
    return np.where(known, _of_program(rows, runs, later), found.predicted)


def _program_by_step(rows: Rows, runs: Runs, likely: np.ndarray) -> np.ndarray:
    """Which of nanotron's runs are of the later program: those whose measured step is nearer to
    it, and the `likely` ones where the steps of both hardly differ."""
    measured = np.array([float(row["step_s"]) for row in rows])
    later, earlier = [_of_program(rows, runs, np.full(len(rows), which)) for which in (True, False)]
    nearer = np.abs(np.log(later / measured)) < np.abs(np.log(earlier / measured))
    return np.where(later > CLEARLY * earlier, nearer, likely)


def memory(rows: Rows) -> list[str]:
    """How far the memory predicted for nanotron's runs is from what was measured."""
    rows = [row for row in rows if "nanotron" in row["source"] and row.get("peak_mem_GB")]
    if not rows:
        return []
    runs = points.runs(rows)
    measured = np.array([float(row["peak_mem_GB"]) for row in rows])
    later, earlier = [np.abs(each / GIB / measured - 1) for each in nanotron.held(runs)]
    likely = nanotron.likely_later(runs)
    by_step = _program_by_step(rows, runs, likely)
    lines = ["memory of nanotron's first rank, by one of its two programs:"]
    for name, size in (
        ("the likelier for the layout", np.where(likely, later, earlier)),
        ("the one that the run's step tells", np.where(by_step, later, earlier)),
        ("the nearer of the two", np.minimum(later, earlier)),
    ):
        share = (size < CLOSE).mean()
        lines.append(
            f"  {name}: {share:.1%} of {len(rows)} runs within {CLOSE:.0%}, {summary(size)}"
        )
    return lines


def rule_of_thumb(row: Mapping[str, str]) -> tuple[float, ...]:
    """Megatron's advice: as little model parallelism as fits, tensor parallelism in a node before
    stages, the distributed optimizer, a large micro-batch; the least of these is taken."""
    tp, pp, micro = (float(row[name]) for name in ("tp", "pp", "mbs"))
    return tp * pp, float(tp > 8), pp, -float("zero1" in row["zero_fsdp"]), -micro


def regret(found: Comparison) -> list[str]:
    """What the advised layout costs against the best that was measured, cell by cell; two other
    ways to choose, and what it would cost if it were known which program made each run."""

    def cell(row: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(
            row.get(name, "")
            for name in ("source", "model", "gpu", "gpus", "seq", "gbs_seqs", "precision")
        )

    informed = "planner that knows each run's program"
    ways = ("planner", "rule of thumb", "median layout", informed)
    lost: dict[str, list[float]] = {way: [] for way in ways}
    lines = []
    advised, by_step = _expected(found), _expected(found, by_step=True)
    for key, members in sorted(groups(found.rows, cell).items()):
        layouts = {
            (found.rows[n]["tp"], found.rows[n]["pp"], found.rows[n]["mbs"]) for n in members
        }
        if len(layouts) < LEAST_CELL:
            continue
        measured = found.measured[members]
        chosen = {
            "planner": measured[np.argmin(advised[members])],
            "rule of thumb": measured[
                min(range(len(members)), key=lambda n: rule_of_thumb(found.rows[members[n]]))
            ],
            "median layout": np.median(measured),
            informed: measured[np.argmin(by_step[members])],
        }
        for name, seconds in chosen.items():
            lost[name].append(float(seconds / measured.min() - 1))
        lines.append(
            f"  {key[1]} on {key[3]} GPUs, {len(members)} layouts: best {measured.min():.3f} s, "
            + ", ".join(f"{name} {values[-1]:+.1%}" for name, values in lost.items())
        )
    for name, values in lost.items():
        if values:
            lines.append(
                f"regret of {name}: median {np.median(values):.1%}, worst {max(values):.1%} in "
                f"{len(values)} cells"
            )
    return lines


def report(rows: Rows, leave_out: bool) -> tuple[list[str], Comparison]:
    """What --evaluate prints, and the comparison; `leave_out`: fits without each source and without
    random thirds, too."""
    found = compared(rows)
    lines = [*table(found), *memory(rows), *regret(found)]
    if leave_out:
        by_source = list(groups(rows, lambda row: row["source"]).values())
        left = unseen(rows, by_source)
        lines.append(
            f"each source predicted by a fit without it, no factor: {summary(left.errors)}"
        )
        for source, members in groups(left.rows, lambda row: row["source"]).items():
            lines.append(
                f"  {np.abs(left.errors[members]).mean():6.1%} of {len(members):4}  {source}"
            )
        order = np.random.default_rng(1).permutation(len(rows))
        thirds = unseen(rows, [order[n::3].tolist() for n in range(3)])
        lines.append(
            f"each random third by a fit of the others: {summary(thirds.errors)}; with a factor: "
            f"{summary(thirds.factored)}"
        )
    return lines, found
