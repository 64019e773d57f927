"""Sets up device and grid of ranks from a checked command line; the only file of training/ that
starts process groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist  # noqa: TID251

from megatron import device as devices
from megatron import launcher, log
from megatron.config.plan.plan import embedding_stages
from megatron.config.tree import Config
from megatron.parallel.context import ParallelContext
from megatron.timers import Timers
from megatron.training.launch.signals import SignalWatch

if TYPE_CHECKING:
    from megatron.training.launch.rendezvous import Rendezvous


@dataclass(frozen=True)
class Runtime:
    """This process's device and its place in the grid."""

    device: torch.device
    ctx: ParallelContext
    world_size: int
    rank: int


def connect(config: Config, watch: SignalWatch | None = None) -> Rendezvous | None:
    """The connections of this rank to the others (`rendezvous.Rendezvous`); None with one rank,
    which watches itself."""
    if launcher.world_size() == 1 and watch:
        from megatron.training.launch.hang_limits import limits
        from megatron.training.launch.progress import OwnWatch

        watch.monitor = OwnWatch(limits(config))
    if launcher.world_size() == 1 or dist.is_initialized():
        return None
    from megatron.training.launch.rendezvous import Rendezvous

    return Rendezvous(config, watch)


def initialize(config: Config, rendezvous: Rendezvous | None = None) -> Runtime:
    """Choose the device, join the process group (only when there is more than one rank), build the
    grid."""
    info = launcher.info()
    world_size = info.world_size
    training = config.training
    parallel = config.parallel
    set_max_connections(config)
    device = devices.choose_device(training.device, info.local_rank)
    for text in devices.device_notes(training.device):
        log.warn_once(text)
    devices.keep_freed_memory(device)
    devices.set_determinism(
        training.deterministic_mode, training.cudnn_benchmark, training.cudnn_deterministic
    )
    if config.precision.tf32:
        devices.allow_tf32(device)
    if config.precision.disable_bf16_reduced_precision_matmul:
        devices.sum_bf16_in_fp32()
    log.detail("> initializing torch distributed ...")
    if world_size > 1 and not dist.is_initialized():
        backend = devices.chosen_backend(parallel.distributed_backend, device)
        rendezvous = rendezvous or connect(config)
        assert rendezvous is not None  # it is None for one process alone
        rendezvous.use_interface()
        dist.init_process_group(
            backend,
            store=rendezvous.store,
            rank=info.rank,
            world_size=world_size,
            timeout=timedelta(minutes=parallel.distributed_timeout_minutes),
        )
    ctx = ParallelContext(parallel, world_size, info.rank, embedding_stages(config))
    if world_size > 1:
        log.detail(layout_line(ctx))
    log.detail(f"> initialized tensor model parallel with size {ctx.tp.size}")
    log.detail(f"> initialized pipeline model parallel with size {ctx.pp.size}")
    log.detail(f"> setting random seeds to {training.seed} ...")
    return Runtime(device, ctx, world_size, info.rank)


def set_max_connections(config: Config) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS as the layout needs it; before anything asks whether there is
    a CUDA device."""
    p = config.parallel
    ordered = p.tensor_model_parallel_size > 1 or p.context_parallel_size > 1
    if config.training.device != "cpu" and devices.set_max_connections(ordered):
        log.detail("CUDA_DEVICE_MAX_CONNECTIONS was not set: set to 1 before CUDA starts")


def layout_line(ctx: ParallelContext) -> str:
    """The sizes of the grid, slowest axis first, and the groups of this rank as examples."""
    axes = {"pipeline": ctx.pp, "data": ctx.dp, "context": ctx.cp, "tensor": ctx.tp}
    sizes = " x ".join(f"{name} {axis.size}" for name, axis in axes.items())
    shown = {
        name: [*axis.ranks[:4], "...", axis.ranks[-1]] if axis.size > 6 else axis.ranks
        for name, axis in reversed(axes.items())
        if axis.size > 1
    }
    groups = ", ".join(f"{name} [{' '.join(map(str, ranks))}]" for name, ranks in shown.items())
    return f"> layout: {ctx.world.size} ranks = {sizes}; rank {ctx.rank} is in the groups {groups}"


def build_timers(config: Config, runtime: Runtime) -> Timers:
    """The timers of a run. They wait for the device, to measure its work and not only the call;
    those of spans within a step read its stream, where it has one."""
    device = runtime.device
    return Timers(
        config.logging.timing_log_level,
        lambda: devices.synchronize(device),
        stream=devices.stream_clock(device),
    )


def finish(rendezvous: Rendezvous | None) -> None:
    """Disconnect: the monitor first, so that the end of this process is not reported as a death,
    then the process group."""
    if rendezvous:
        rendezvous.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    launcher.remove_log_folder()
