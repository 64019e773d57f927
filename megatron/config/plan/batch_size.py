"""The global batch size after any number of samples (constant, ramp-up, step schedule), and the
iterations that are skipped, as pure functions.

S(n), the samples consumed after iteration n, follows from these flags alone: never from what was
skipped or restarted. Constant size, ramp-up and step schedule follow Megatron-LM.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron.config.skip_ranges import SkipRanges

FOREVER = 2**63


class Phase(NamedTuple):
    """A run of iterations of equal batch size, from `first_iteration` (1-based), which starts after
    `consumed`."""

    first_iteration: int
    consumed: int
    global_batch_size: int


class BatchSizeSchedule:
    """The global batch size as a function of samples consumed: steps of (samples, nominal size),
    the first at 0.

    `nominal` is the size the flags ask for. With `decrease_batch_size_if_needed` the running size,
    which is what an iteration reads and what is counted, is the nominal one rounded down to whole
    micro-batches on every data-parallel rank; otherwise the two are equal and `problems` reports
    where they cannot be run. Raises ValueError on sizes that leave an iteration without a sample.
    All look-ups are a bisection.
    """

    def __init__(
        self,
        steps: Sequence[tuple[int, int]],
        *,
        micro_batch_size: int,
        data_parallel_size: int = 1,
        decrease_batch_size_if_needed: bool = False,
        flag: str = "--global-batch-size",
        headline: str | None = None,
        reach_target: bool = False,
    ) -> None:
        if micro_batch_size is None or micro_batch_size < 1:
            raise ValueError(
                f"--micro-batch-size {micro_batch_size} must be at least 1 [value-out-of-range]"
            )
        assert data_parallel_size >= 1 and steps and steps[0][0] == 0
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.steps = tuple(steps)
        self._flag = flag
        self._headline = headline
        self._reach_target = reach_target
        self._thresholds = [threshold for threshold, _ in steps]
        self.phases = self._find_phases()
        self._first_iterations = [phase.first_iteration for phase in self.phases]
        self._starts = [phase.consumed for phase in self.phases]

    @property
    def divisor(self) -> int:
        """Samples of one micro-batch on every data-parallel rank."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def final_global_batch_size(self) -> int:
        """The nominal size at the end of the schedule (what --global-batch-size names)."""
        return self.steps[-1][1]

    @property
    def is_constant(self) -> bool:
        """Whether every iteration has the same size."""
        return len(self.phases) == 1

    def nominal_global_batch_size(self, consumed: int) -> int:
        """The size the flags ask for after `consumed` samples."""
        return self.steps[bisect_right(self._thresholds, consumed) - 1][1]

    def global_batch_size(self, consumed: int) -> int:
        """Samples the iteration that starts after `consumed` samples reads."""
        return self._running(self.nominal_global_batch_size(consumed))

    def num_microbatches(self, consumed: int) -> int:
        """Micro-batches per data-parallel rank of that iteration; ValueError if its size does not
        divide."""
        size = self.global_batch_size(consumed)
        if size % self.divisor:
            raise ValueError(self._not_divisible(size))
        return size // self.divisor

    def samples_before(self, iteration: int) -> int:
        """S(n - 1): the samples consumed before iteration n = `iteration` (1-based), also its first
        sample's index."""
        if iteration < 1:
            raise ValueError(f"iterations start at 1, not {iteration}")
        phase = self.phases[bisect_right(self._first_iterations, iteration) - 1]
        return phase.consumed + (iteration - phase.first_iteration) * phase.global_batch_size

    def samples_in(self, skips: SkipRanges) -> int:
        """How many samples the iterations of `skips` have."""
        ends = [*(first - 1 for first in self._first_iterations[1:]), FOREVER]
        return sum(
            phase.global_batch_size * skips.count_in(phase.first_iteration, end)
            for phase, end in zip(self.phases, ends, strict=True)
        )

    def iterations_within(self, samples: int) -> int:
        """The largest n with S(n) <= `samples`."""
        phase = self.phases[bisect_right(self._starts, samples) - 1]
        return phase.first_iteration - 1 + (samples - phase.consumed) // phase.global_batch_size

    def train_iters_from_samples(self, train_samples: int) -> int:
        """Iterations for --train-samples: whole batches only, a partial last one is dropped
        (Megatron's rule).

        With --step-batch-size-schedule it is instead the first n with S(n) >= train_samples
        (Megatron's newer rule), so that the data must hold S(train_iters), which can be more than
        train_samples.
        """
        iterations = self.iterations_within(train_samples)
        if self._reach_target and self.samples_before(iterations + 1) < train_samples:
            return iterations + 1
        return iterations

    def problems(self, consumed: int = 0, remedy: str = "") -> list[str]:
        """Every size the schedule reaches from `consumed` samples on that does not divide into
        micro-batches.

        `remedy`: another remedy, as ", or 4 ranks".
        """
        first = bisect_right(self._starts, consumed) - 1
        sizes = {phase.global_batch_size for phase in self.phases[first:]}
        return [self._not_divisible(size, remedy) for size in sorted(sizes) if size % self.divisor]

    def lines(self) -> list[str]:
        """What to print at start: Megatron's lines, and the first phases of a size that changes."""
        lines = [self._headline] if self._headline else []
        if self.decrease_batch_size_if_needed:
            lines += [
                f"decreasing batch size from {nominal} to {self._running(nominal)}: whole "
                f"micro-batches of {self.micro_batch_size} on {self.data_parallel_size} "
                "data-parallel ranks"
                for nominal in sorted(
                    {self.nominal_global_batch_size(phase.consumed) for phase in self.phases}
                )
                if nominal != self._running(nominal)
            ]
        if self.is_constant:
            return [
                *lines,
                f"setting number of micro-batches to constant {self.num_microbatches(0)}",
            ]
        return lines + [
            f"  from iteration {phase.first_iteration} ({phase.consumed} samples): global batch "
            f"size {phase.global_batch_size}"
            for phase in self.phases[:20]
        ]

    def _running(self, nominal: int) -> int:
        return (
            nominal // self.divisor * self.divisor
            if self.decrease_batch_size_if_needed
            else nominal
        )

    def _not_divisible(self, size: int, remedy: str = "") -> str:
        below = size // self.divisor * self.divisor
        near = f"{below} or {below + self.divisor}" if below else f"{self.divisor}"
        return (
            f"{self._flag}: global batch size ({size}) is not divisible by micro batch size "
            f"({self.micro_batch_size}) times data parallel size ({self.data_parallel_size}); use "
            f"{near}, another --micro-batch-size, or --decrease-batch-size-if-needed{remedy} "
            "[batch-not-divisible]"
        )

    def _find_phases(self) -> list[Phase]:
        """Walk through the steps, not the iterations: a batch that begins before a threshold keeps
        its size."""
        phases: list[Phase] = []
        iteration = 1
        consumed = 0
        while True:
            step = bisect_right(self._thresholds, consumed) - 1
            size = self._running(self.steps[step][1])
            if size < 1:
                raise ValueError(
                    f"{self._flag}: a global batch size of {self.steps[step][1]} holds no "
                    f"micro-batch of {self.micro_batch_size} on each of {self.data_parallel_size} "
                    f"data-parallel ranks; use at least {self.divisor} "
                    "[batch-smaller-than-micro-batches]"
                )
            if not phases or phases[-1].global_batch_size != size:
                phases.append(Phase(iteration, consumed, size))
            if step + 1 == len(self.steps):
                return phases
            iterations = -(-(self._thresholds[step + 1] - consumed) // size)
            iteration += iterations
            consumed += iterations * size


@dataclass(frozen=True)
class EvaluationBatch:
    """The batch of validation and test, in samples; `divisor` are those of one micro-batch on every
    data-parallel rank."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int

    @property
    def divisor(self) -> int:
        """Samples of one micro-batch on every data-parallel rank."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Whole micro-batches of one batch on every data-parallel rank."""
        return self.global_batch_size // self.divisor

    def problem(self) -> str | None:
        """What is wrong if the batch is not made of whole micro-batches."""
        if self.global_batch_size % self.divisor == 0:
            return None
        above = -(-self.global_batch_size // self.divisor) * self.divisor
        near = sorted({max(self.divisor, above - self.divisor), above})
        return (
            f"--eval-global-batch-size {self.global_batch_size}: is not divisible by "
            f"--eval-micro-batch-size {self.micro_batch_size} times data parallel size "
            f"{self.data_parallel_size}; use {' or '.join(map(str, near))}, or another "
            "--eval-micro-batch-size [eval-batch-not-divisible]"
        )


def build_batch_size_schedule(
    *,
    micro_batch_size: int,
    global_batch_size: int | None = None,
    data_parallel_size: int = 1,
    rampup_batch_size: Sequence[int | str] | None = None,
    rampup_micro_batches: Sequence[int | str] | None = None,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
    decrease_batch_size_if_needed: bool = False,
) -> BatchSizeSchedule:
    """The schedule these flags give; without any size it is one micro-batch on every data-parallel
    rank.

    Whether each size divides into micro-batches is left to `BatchSizeSchedule.problems`, since a
    resumed run may have passed the sizes that do not. Raises ValueError naming the flag for
    everything else.
    """
    if micro_batch_size is None or micro_batch_size < 1:
        raise ValueError(
            f"--micro-batch-size {micro_batch_size} must be at least 1 [value-out-of-range]"
        )
    schedule = partial(
        BatchSizeSchedule, micro_batch_size=micro_batch_size, data_parallel_size=data_parallel_size
    )
    if step_batch_size_schedule is not None:
        ramps = {
            "--rampup-batch-size": rampup_batch_size,
            "--rampup-micro-batches": rampup_micro_batches,
            "--decrease-batch-size-if-needed": decrease_batch_size_if_needed or None,
        }
        for flag, value in ramps.items():
            if value is not None:
                raise ValueError(
                    f"{flag} cannot be given with --step-batch-size-schedule, which sets all sizes "
                    "[flags-exclude-each-other]"
                )
        from megatron.config.plan import batch_ramps

        steps = batch_ramps.parse_step_schedule(step_batch_size_schedule, seq_length)
        if global_batch_size not in (None, steps[-1][1]):
            raise ValueError(
                f"--global-batch-size {global_batch_size}: --step-batch-size-schedule ends with "
                f"{steps[-1][1]}; give that, or omit the flag [flags-exclude-each-other]"
            )
        return schedule(steps, flag="--step-batch-size-schedule", reach_target=True)
    size = micro_batch_size * data_parallel_size if global_batch_size is None else global_batch_size
    if size < 1:
        raise ValueError(f"--global-batch-size {size} must be at least 1 [value-out-of-range]")
    schedule = partial(schedule, decrease_batch_size_if_needed=decrease_batch_size_if_needed)
    if rampup_batch_size is not None:
        from megatron.config.plan import batch_ramps

        steps = batch_ramps.rampup_steps(rampup_batch_size, size)
        if rampup_micro_batches is not None:
            raise ValueError(
                "--rampup-micro-batches and --rampup-batch-size are two ramps: give only one of "
                "them [flags-exclude-each-other]"
            )
        start, increment, samples = rampup_batch_size
        ramp = (
            f"will use batch size rampup starting from global batch size {start} to global batch "
            f"size {size} with batch size increments {increment} over {samples} samples."
        )
        return schedule(steps, flag="--rampup-batch-size", headline=ramp)
    headline = f"setting global batch size to {size}" if global_batch_size is None else None
    if rampup_micro_batches is not None:
        divisor = micro_batch_size * data_parallel_size
        from megatron.config.plan import batch_ramps

        steps = batch_ramps.micro_batch_steps(rampup_micro_batches, size, divisor)
        return schedule(steps, flag="--rampup-micro-batches", headline=headline)
    return schedule([(0, size)], flag="--global-batch-size", headline=headline)
