"""Flags of the profiler."""

from dataclasses import dataclass

from megatron.arguments import Needs, arg


@dataclass(frozen=True)
class ProfilingConfig:
    """Which iterations of which ranks are profiled."""

    profile: bool = arg(
        False,
        needs=Needs(
            "--use-pytorch-profiler (--device is cpu, without a CUDA profiler)",
            lambda v: v["use_pytorch_profiler"] or v["device"] != "cpu",
        ),
        help="profile iterations --profile-step-start to --profile-step-end: a CUDA profiler"
        " range for nsys, or --use-pytorch-profiler",
    )
    use_pytorch_profiler: bool = arg(
        False,
        needs="profile",
        help="with --profile: torch.profiler, as a Chrome trace for TensorBoard or Perfetto; "
        "without it a CUDA profiler range is opened (nsys -c cudaProfilerApi)",
    )
    profile_step_start: int = arg(
        10, minimum=0, needs="profile", help="with --profile: iterations before the profiled ones"
    )
    profile_step_end: int = arg(
        12, minimum=1, needs="profile", help="with --profile: last profiled iteration"
    )
    profile_ranks: tuple[int, ...] = arg(
        (0,), needs="profile", help="with --profile: ranks that are profiled"
    )
