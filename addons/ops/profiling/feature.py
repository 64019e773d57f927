"""--profile: traces of some iterations, for humans and for other profilers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import Needs, arg
from megatron.config.checks.facts import Facts
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class ProfilingConfig(Feature):
    """Which iterations of which ranks are profiled."""

    profile: bool = arg(
        False,
        needs=Needs(
            "--use-pytorch-profiler (--device is cpu, without a CUDA profiler)",
            lambda v: v["use_pytorch_profiler"] or v["device"] != "cpu",
        ),
    )
    """profile iterations --profile-step-start to --profile-step-end: a CUDA profiler range for
    nsys, or --use-pytorch-profiler"""

    use_pytorch_profiler: bool = arg(False, needs="profile")
    """with --profile: torch.profiler, as a Chrome trace for TensorBoard or Perfetto; without it a
    CUDA profiler range is opened (nsys -c cudaProfilerApi)"""

    profile_step_start: int = arg(10, minimum=0, needs="profile")
    """with --profile: iterations before the profiled ones"""

    profile_step_end: int = arg(12, minimum=1, needs="profile")
    """with --profile: last profiled iteration"""

    profile_ranks: tuple[int, ...] = arg((0,), needs="profile")
    """with --profile: ranks that are profiled"""

    def check(self, facts: Facts) -> Iterator[str]:
        """Iterations and ranks that there are not."""
        f = facts
        if self.profile and f.ok("profile_step_start", "profile_step_end"):
            if self.profile_step_end <= self.profile_step_start:
                yield (
                    f"{f.say('profile_step_end')}: profiles no iteration, because "
                    f"{f.say('profile_step_start')} is not less; iterations start + 1 to end are "
                    "profiled [profile-steps-empty]"
                )
            for rank in self.profile_ranks:
                if not 0 <= rank < f.world_size:
                    yield (
                        f"--profile-ranks {rank}: there are ranks 0 to {f.world_size - 1} "
                        "[value-out-of-range]"
                    )

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """On the chosen ranks, the one that profiles."""
        if self.profile and loop.run.runtime.rank in self.profile_ranks:
            from .hook import Profiling

            first, last = self.profile_step_start + 1, self.profile_step_end
            yield Profiling(loop.run, first, last, self.use_pytorch_profiler)
