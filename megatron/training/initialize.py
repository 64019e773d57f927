"""From a checked command line to a device and a grid of ranks; alone in training/ to start process groups."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron import device as devices
from megatron import log
from megatron.config.tree import Config
from megatron.parallel.context import ParallelContext


@dataclass(frozen=True)
class Runtime:
    """Where this process stands: its device and its place in the grid."""
    device: torch.device
    ctx: ParallelContext
    world_size: int
    rank: int


def initialize(config: Config) -> Runtime:
    """Choose the device, join the process group (only when there is more than one rank), build the grid."""
    world_size, rank, local_rank = log.world_size(), log.rank(), log.local_rank()
    training, parallel = config.training, config.parallel
    if training.device != "cpu" and devices.set_max_connections():
        log.print_rank_0("CUDA_DEVICE_MAX_CONNECTIONS was not set: set to 1 before CUDA starts")
    device = devices.choose_device(training.device, local_rank)
    devices.set_determinism(training.deterministic_mode, training.cudnn_benchmark, training.cudnn_deterministic)
    log.print_rank_0("> initializing torch distributed ...")
    if world_size > 1 and not dist.is_initialized():
        _set_rendezvous(world_size, rank)
        backend = parallel.distributed_backend or devices.default_backend(training.device)
        dist.init_process_group(backend, timeout=timedelta(minutes=parallel.distributed_timeout_minutes),
                                rank=rank, world_size=world_size)
    ctx = ParallelContext(parallel, world_size, rank)
    log.print_rank_0(f"> initialized tensor model parallel with size {ctx.tp.size}")
    log.print_rank_0(f"> initialized pipeline model parallel with size {ctx.pp.size}")
    log.print_rank_0(f"> setting random seeds to {training.seed} ...")
    return Runtime(device, ctx, world_size, rank)


def synchronizer(runtime: Runtime) -> Callable[[], None]:
    """What a timer calls so that it measures the device's work and not only the call."""
    return lambda: devices.synchronize(runtime.device)


def finish() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_rendezvous(world_size: int, rank: int) -> None:
    """srun gives ranks but no meeting point: take the launch node and a port made from the job's number."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(world_size))
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if address:
        os.environ.setdefault("MASTER_ADDR", address)
    if os.environ.get("SLURM_JOB_ID"):
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 20000))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not set: {world_size} ranks need a meeting point; start with "
                         f"torchrun, or set MASTER_ADDR and MASTER_PORT to the address of rank 0 and a free port there")
