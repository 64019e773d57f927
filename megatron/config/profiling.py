"""Flags of the profiler."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.arguments import arg


@dataclass(frozen=True)
class ProfilingConfig:
    """Which iterations of which ranks are profiled."""

    profile: bool = arg(
        False,
        help="profile iterations --profile-step-start to --profile-step-end: a CUDA profiler"
        " range for nsys, or --use-pytorch-profiler",
    )
    use_pytorch_profiler: bool = arg(
        False,
        dump=False,
        help="with --profile: torch.profiler, as a Chrome trace for TensorBoard or Perfetto; "
        "without it a CUDA profiler range is opened (nsys -c cudaProfilerApi)",
    )
    profile_step_start: int = arg(10, help="with --profile: iterations before the profiled ones")
    profile_step_end: int = arg(12, help="with --profile: last profiled iteration")
    profile_ranks: tuple[int, ...] = arg((0,), help="with --profile: ranks that are profiled")
