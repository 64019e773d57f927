"""From a checked command line to a device and a grid of ranks; alone in training/ to start process groups."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron import device as devices
from megatron import log
from megatron.config.tree import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.shared_sums import open_shared
from megatron.training.lifeline import Hub, Line, Place, my_place
from megatron.training.network import address_towards, interface_towards
from megatron.training.signals import SignalWatch


@dataclass(frozen=True)
class Runtime:
    """Where this process stands: its device and its place in the grid."""
    device: torch.device
    ctx: ParallelContext
    world_size: int
    rank: int


class Meeting:
    """How this rank has met the others: torch's key-value store, and the line over which they hear of failures.

    With one rank there is neither. Without `watch` (a caller that ends processes itself) there is no line. Raises
    ValueError where the ranks cannot meet.
    """

    def __init__(self, config: Config, watch: SignalWatch | None = None):
        self.store: dist.Store | None = None
        self._hub: Hub | None = None
        self._line: Line | None = None
        if log.world_size() == 1 or dist.is_initialized():
            return
        minutes = config.parallel.distributed_timeout_minutes
        limit = f"--distributed-timeout-minutes {minutes}"
        self.store = _open_store(timedelta(minutes=minutes), limit)
        if watch is not None:
            watch.limit = limit
            self._line = watch.line = self._open_line(watch)

    def _open_line(self, watch: SignalWatch) -> Line | None:
        """Rank 0 opens a hub and leaves its address in the store."""
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        key = f"lifeline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        try:
            if log.rank() == 0:
                family, address = address_towards(*master)
                self._hub = Hub(log.world_size(), family)
                self.store.set(key, json.dumps([address, self._hub.port, self._hub.token, asdict(my_place())]))
            address, port, token, place = json.loads(self.store.get(key))
            return Line([(address, port), (master[0], port)], token, Place(**place), watch.leave_for)
        except OSError as error:
            print(f"WARNING: rank {log.rank()} has no line to rank 0 ({error}); should a rank fail, this one hears of it "
                  f"only when a collective fails", flush=True)
            return None

    def close(self) -> None:
        """The run is over; from here on nobody minds if this process ends."""
        if self._line:
            self._line.close()
        if self._hub:
            self._hub.finish()


def initialize(config: Config, meeting: Meeting | None = None) -> Runtime:
    """Choose the device, join the process group (only when there is more than one rank), build the grid."""
    world_size, rank, local_rank = log.world_size(), log.rank(), log.local_rank()
    training, parallel = config.training, config.parallel
    if training.device != "cpu" and devices.set_max_connections():
        log.print_rank_0("CUDA_DEVICE_MAX_CONNECTIONS was not set: set to 1 before CUDA starts")
    device = devices.choose_device(training.device, local_rank)
    if config.logging.log_memory_to_tensorboard and training.device == "auto" and device.type == "cpu":
        log.print_rank_0("--log-memory-to-tensorboard: no effect on the CPU, the only device here")
    devices.keep_freed_memory(device)
    devices.set_determinism(training.deterministic_mode, training.cudnn_benchmark, training.cudnn_deterministic)
    if config.precision.tf32:
        devices.allow_tf32(device)
    log.print_rank_0("> initializing torch distributed ...")
    if world_size > 1 and not dist.is_initialized():
        backend = parallel.distributed_backend or devices.default_backend(training.device)
        interface = interface_towards(os.environ.get("MASTER_ADDR", ""))
        if interface:       # gloo would take that of the machine's own name, which is often the loopback's
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        dist.init_process_group(backend, store=(meeting or Meeting(config)).store, rank=rank, world_size=world_size,
                                timeout=timedelta(minutes=parallel.distributed_timeout_minutes))
    ctx = ParallelContext(parallel, world_size, rank)
    ctx.tp = replace(ctx.tp, shared=open_shared(ctx.tp, timedelta(minutes=parallel.distributed_timeout_minutes)))
    if world_size > 1:
        log.print_rank_0(layout_line(ctx))
    log.print_rank_0(f"> initialized tensor model parallel with size {ctx.tp.size}")
    log.print_rank_0(f"> initialized pipeline model parallel with size {ctx.pp.size}")
    log.print_rank_0(f"> setting random seeds to {training.seed} ...")
    return Runtime(device, ctx, world_size, rank)


def layout_line(ctx: ParallelContext) -> str:
    """The sizes of the grid, slowest axis first, and the groups of this rank as examples."""
    axes = {"pipeline": ctx.pp, "data": ctx.dp, "context": ctx.cp, "tensor": ctx.tp}
    sizes = " x ".join(f"{name} {axis.size}" for name, axis in axes.items())
    groups = ", ".join(f"{name} [{_some(axis.ranks)}]" for name, axis in reversed(axes.items()) if axis.size > 1)
    return f"> layout: {ctx.world.size} ranks = {sizes}; rank {ctx.rank} is in the groups {groups}"


def _some(ranks: tuple[int, ...]) -> str:
    shown = [*ranks[:4], "...", ranks[-1]] if len(ranks) > 6 else ranks
    return " ".join(map(str, shown))


def synchronizer(runtime: Runtime) -> Callable[[], None]:
    """What a timer calls so that it measures the device's work and not only the call."""
    return lambda: devices.synchronize(runtime.device)


def finish(meeting: Meeting) -> None:
    """Leave the others: the line first, so that no end is taken for a death, then the process group."""
    meeting.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _open_store(limit: timedelta, flag: str) -> dist.Store:
    """The key-value store in which the ranks meet: torchrun's own, or rank 0's at MASTER_ADDR and MASTER_PORT."""
    rank, world_size = log.rank(), log.world_size()
    _set_rendezvous(world_size, rank)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(host, port, world_size, serves, limit, wait_for_workers=False, multi_tenant=serves)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        if serves:
            raise ValueError(f"MASTER_PORT {port}: rank 0 cannot listen there ({reason}); choose a free port, and an "
                             f"address of rank 0's node as MASTER_ADDR (now {host})") from None
        raise ValueError(f"MASTER_ADDR {host}, MASTER_PORT {port}: rank 0 did not answer there within {flag} ({reason}); "
                         f"start all ranks, and let them reach that port") from None


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
