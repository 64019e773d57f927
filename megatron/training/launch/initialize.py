"""From a checked command line to a device and a grid of ranks; alone in training/ to start process
groups."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron import device as devices
from megatron import launcher, log, optional
from megatron.config.tree import Config
from megatron.parallel.context import ParallelContext
from megatron.training.launch.network import (
    address_towards,
    allow_open_files,
    interface_towards,
    listen_problem,
    unreachable,
)
from megatron.training.launch.rank_monitor import (
    MonitorClient,
    MonitorServer,
    ProcessId,
    this_process,
)
from megatron.training.launch.signals import SignalWatch

CONNECT_WITHIN = 50.0  # seconds
STRANGERS_ANSWER_WITHIN = 5.0
RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Runtime:
    """Where this process stands: its device and its place in the grid."""

    device: torch.device
    ctx: ParallelContext
    world_size: int
    rank: int


class Rendezvous:
    """The connections of this rank to the others before any process group: torch's key-value store
    and the rank monitor.

    With one rank there is neither. Without `watch` (a caller that ends processes itself) there is
    no monitor. Raises ValueError if the ranks cannot connect.
    """

    def __init__(self, config: Config, watch: SignalWatch | None = None):
        self.store: dist.Store | None = None
        self.master: tuple[str, int] | None = None
        self._server: MonitorServer | None = None
        self._monitor: MonitorClient | None = None
        if launcher.world_size() == 1 or dist.is_initialized():
            return
        minutes = config.parallel.distributed_timeout_minutes
        if launcher.rank() == 0:
            allow_open_files()  # one connection per rank for the store and one for the monitor
        self.master = launcher.rendezvous(os.environ)
        self.store = open_store(*self.master, timedelta(minutes=minutes))
        if watch is not None:
            watch.limit = f"--distributed-timeout-minutes {minutes}"
            self._monitor = watch.monitor = self._connect(watch)

    def _connect(self, watch: SignalWatch) -> MonitorClient | None:
        """Rank 0 starts the server of the monitor and publishes its address in the store."""
        try:
            if launcher.rank() == 0:
                family, address = address_towards(*self.master)
                self._server = MonitorServer(launcher.world_size(), family)
                contact = [address, self._server.port, self._server.token, asdict(this_process())]
                self.store.set("rank-monitor", json.dumps(contact))
            address, port, token, process = json.loads(self.store.get("rank-monitor"))
            return MonitorClient(
                [(address, port), (self.master[0], port)],
                token,
                ProcessId(**process),
                watch.leave_for,
            )
        except OSError as error:
            print(
                f"WARNING: rank {launcher.rank()} has no connection to the rank monitor on rank 0 "
                f"({error}); if a rank fails, this one notices only when a collective fails",
                flush=True,
            )
            return None

    def close(self) -> None:
        """The run is over: from now on the end of this process is no failure."""
        if self._monitor:
            self._monitor.close()
        if self._server:
            self._server.finish()


def initialize(config: Config, rendezvous: Rendezvous | None = None) -> Runtime:
    """Choose the device, join the process group (only when there is more than one rank), build the
    grid."""
    here = launcher.info()
    world_size = here.world_size
    rank = here.rank
    training = config.training
    parallel = config.parallel
    set_max_connections(config)
    device = devices.choose_device(training.device, here.local_rank)
    for text in devices.device_notes(training.device):
        log.warn_once(text)
    if (
        config.logging.log_memory_to_tensorboard
        and training.device == "auto"
        and device.type == "cpu"
    ):
        log.print_rank_0("--log-memory-to-tensorboard: no effect on the CPU, the only device here")
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
        backend = parallel.distributed_backend or devices.default_backend(training.device)
        rendezvous = rendezvous or Rendezvous(config)
        interface = interface_towards(rendezvous.master[0])
        # gloo would take that of the machine's own name, which is often the loopback's
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        dist.init_process_group(
            backend,
            store=rendezvous.store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=parallel.distributed_timeout_minutes),
        )
    ctx = ParallelContext(parallel, world_size, rank)
    if ctx.tp.size > 1:
        open_shared = optional.load("megatron.parallel.shared_sums").open_shared
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        ctx.tp = replace(ctx.tp, shared=open_shared(ctx.tp, timeout))
    if world_size > 1:
        log.detail(layout_line(ctx))
    log.detail(f"> initialized tensor model parallel with size {ctx.tp.size}")
    log.detail(f"> initialized pipeline model parallel with size {ctx.pp.size}")
    log.detail(f"> setting random seeds to {training.seed} ...")
    return Runtime(device, ctx, world_size, rank)


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
    groups = ", ".join(
        f"{name} [{_some(axis.ranks)}]" for name, axis in reversed(axes.items()) if axis.size > 1
    )
    return f"> layout: {ctx.world.size} ranks = {sizes}; rank {ctx.rank} is in the groups {groups}"


def _some(ranks: tuple[int, ...]) -> str:
    shown = [*ranks[:4], "...", ranks[-1]] if len(ranks) > 6 else ranks
    return " ".join(map(str, shown))


def synchronizer(runtime: Runtime) -> Callable[[], None]:
    """What a timer calls so that it measures the device's work and not only the call."""
    return lambda: devices.synchronize(runtime.device)


def finish(rendezvous: Rendezvous) -> None:
    """Disconnect: the monitor first, so that the end of this process is not reported as a death,
    then the process group."""
    rendezvous.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def open_store(host: str, port: int, limit: timedelta) -> dist.Store:
    """The key-value store in which the ranks meet, served by rank 0.

    Operations on it wait for `limit` at most, connections about a minute. Without torchrun it is at
    `host` and `port`. torchrun's own store is there otherwise, and outlives the ranks that it
    restarts (--max-restarts), with the addresses of dead ones: from it only the address of rank 0's
    store is read, until that one answers. Raises ValueError where rank 0 cannot listen, or does not
    answer.
    """
    here = launcher.info()
    agent = launcher.agent_has_store()
    seconds = _answer_limit(here.world_size, limit)
    if here.rank == 0 and not agent and (reason := listen_problem(port)):
        raise ValueError(
            f"MASTER_PORT {port}: rank 0 cannot listen there ({reason}); choose a free port "
            "[rendezvous-failed]"
        )
    if (here.rank or agent) and (reason := unreachable(host, port, seconds)):
        who = "torchrun's agent" if agent else "rank 0"
        raise ValueError(
            f"MASTER_ADDR {host}, MASTER_PORT {port}: {who} did not answer there ({reason}); "
            "MASTER_ADDR must be rank 0's node, and all ranks must be started and reach that port "
            "[rendezvous-failed]"
        )
    try:
        store = _store_at(host, port, here.rank == 0 and not agent, seconds)
        if agent:
            store = (
                _serve_attempt(store, host, port)
                if here.rank == 0
                else _join_attempt(store, seconds)
            )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"MASTER_ADDR {host}, MASTER_PORT {port}: rank {here.rank} cannot connect ({reason}); "
            "MASTER_ADDR must be an address of rank 0's node [rendezvous-failed]"
        ) from None
    store.set_timeout(limit)
    return store


def _answer_limit(world_size: int, limit: timedelta) -> float:
    """Seconds in which rank 0 has to answer: within a minute; many ranks do not load torch at the
    same time."""
    return min(CONNECT_WITHIN + world_size / 20, limit.total_seconds())


def _store_at(host: str, port: int, serves: bool, seconds: float) -> dist.TCPStore:
    return dist.TCPStore(
        host,
        port,
        None,
        serves,
        timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=serves and port > 0,
    )


def _serve_attempt(agent: dist.Store, host: str, port: int) -> dist.TCPStore:
    """Rank 0's store for this attempt, on a free port; its address and a token are left in
    torchrun's store."""
    _, address = address_towards(host, port)
    store = _store_at(address, 0, True, CONNECT_WITHIN)
    token = secrets.token_hex(16)
    store.set("token", token)
    agent.set("store of rank 0", json.dumps([address, store.port, token]))
    return store


def _join_attempt(agent: dist.Store, seconds: float) -> dist.TCPStore:
    """Rank 0's store for this attempt. Until rank 0 has come again, its last address leads nowhere,
    or to a stranger."""
    deadline = time.monotonic() + seconds
    while True:
        address, port, token = json.loads(agent.get("store of rank 0"))
        if unreachable(address, port, 0.0) is None:
            with contextlib.suppress(dist.DistError):
                store = _store_at(address, port, False, STRANGERS_ANSWER_WITHIN)
                if store.check(["token"]) and store.get("token").decode() == token:
                    return store
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank 0's store at {address}, port {port}: no answer for {seconds:.0f} seconds; "
                "let the nodes reach each other at any port [rendezvous-failed]"
            )
        time.sleep(RETRY_SECONDS)
