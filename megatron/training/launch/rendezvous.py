"""How the ranks of a run find each other: torch's key-value store, and the rank monitor."""

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist  # noqa: TID251

from megatron import cluster, launcher, log
from megatron.config.plan.report import entry
from megatron.config.tree import Config
from megatron.training.launch import hang
from megatron.training.launch.hang_limits import limits
from megatron.training.launch.network import (
    address_towards,
    allow_open_files,
    interface_towards,
    is_loopback,
    listen_problem,
    unreachable,
)
from megatron.training.launch.process import HUNG, Failure, ProcessId, Refusal, this_process
from megatron.training.launch.rank_monitor import MonitorClient, MonitorServer
from megatron.training.launch.signals import SignalWatch

CONNECT_WITHIN = 50.0  # seconds
STRANGERS_ANSWER_WITHIN = 5.0
RETRY_SECONDS = 0.2


class Rendezvous:
    """The connections of this rank to the others before any process group: torch's key-value store
    and the rank monitor.

    Without `watch` (a caller that ends processes itself) there is no monitor. Raises ValueError if
    the ranks cannot connect.
    """

    def __init__(self, config: Config, watch: SignalWatch | None = None):
        self._server: MonitorServer | None = None
        self._monitor: MonitorClient | None = None
        minutes = config.parallel.distributed_timeout_minutes
        self.limits = limits(config)
        if launcher.rank() == 0:
            allow_open_files()  # one connection per rank for the store and one for the monitor
        self.master = cluster.rendezvous(os.environ)
        self.store = open_store(*self.master, timedelta(minutes=minutes), self.limits.startup)
        if watch is not None:
            log.print_rank_0(entry("hang limits", f"seconds without progress: {self.limits}"))
            watch.limit = f"--distributed-timeout-minutes {minutes}"
            self._monitor = watch.monitor = self._connect(watch)

    def _connect(self, watch: SignalWatch) -> MonitorClient | None:
        """Rank 0 starts the server of the monitor and publishes its address in the store."""

        def noticed(failure: Failure) -> None:
            watch.on_failure(failure)

        try:
            if launcher.rank() == 0:
                family, address = address_towards(*self.master)
                info = launcher.info()
                if info.local_world_size == info.world_size or is_loopback(address):
                    family, address = socket.AF_INET, "127.0.0.1"  # all ranks are on this machine
                self._server = MonitorServer(
                    info.world_size,
                    family,
                    address if is_loopback(address) else "",
                    noticed,
                    self.limits.startup,
                    watch.start.gone if watch.start else lambda ranks: None,
                )
                if watch.start:
                    watch.start.joined = True
                contact = [address, self._server.port, self._server.token, asdict(this_process())]
                self.store.set("rank-monitor", json.dumps(contact))
            try:
                self.store.wait(["rank-monitor"], timedelta(seconds=self.limits.startup or 1e6))
            except dist.DistError:
                raise _rank_0_is_missing(
                    f"rank 0 made no progress between {self.master[0]}, port {self.master[1]}, and "
                    "its rank monitor [rendezvous-failed]",
                    self.limits.startup,
                ) from None
            address, port, token, process = json.loads(self.store.get("rank-monitor"))
            return MonitorClient(
                [(address, port), (self.master[0], port)],
                token,
                ProcessId(**process),
                watch.leave_for,
                noticed=noticed,
                limits=self.limits,
            )
        except OSError as error:
            print(
                f"WARNING: rank {launcher.rank()} has no connection to the rank monitor on rank 0 "
                f"({error}); if a rank fails, this one notices only when a collective fails",
                flush=True,
            )
            return None
        finally:
            if watch.start:
                watch.start.joined = True

    def use_interface(self) -> None:
        """Let gloo use the interface that leads to rank 0: it would take that of the machine's own
        name, which is often the loopback's."""
        interface = interface_towards(self.master[0])
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def close(self) -> None:
        """The run is over: from now on the end of this process is no failure."""
        if self._monitor:
            self._monitor.close()
        if self._server:
            self._server.finish()


def _rank_0_is_missing(text: str, startup: float | None) -> ValueError:
    """The error of a rank that rank 0 did not answer: `text`, or what rank 0 is doing if its
    process is on this machine; it is ended then."""
    if startup is None:
        return ValueError(text)
    for process, answer in hang.inspect({}, [0]).items():
        failure = hang.name(process, startup, answer)
        hang.kill(process, failure.text)
        return Refusal(f"{process} {failure.text}", HUNG)
    return ValueError(text)


def open_store(host: str, port: int, limit: timedelta, startup: float | None = None) -> dist.Store:
    """The key-value store in which the ranks meet, served by rank 0.

    Operations on it wait for `limit` at most, connections about a minute. Without torchrun it is at
    `host` and `port`. torchrun's own store is there otherwise, and outlives the ranks that it
    restarts (--max-restarts), with the addresses of dead ones: from it only the address of rank 0's
    store is read, until one answers that this rank has not joined yet. Rank 0 has `startup` seconds
    to answer, at most about a minute. Raises ValueError where rank 0 cannot listen, or does not
    answer.
    """
    info = launcher.info()
    agent = cluster.agent_has_store()
    # within a minute; many ranks do not load torch at the same time
    seconds = min(CONNECT_WITHIN + info.world_size / 20, limit.total_seconds())
    if startup:
        seconds = min(seconds, startup)
    if info.rank == 0 and not agent and (reason := listen_problem(port)):
        raise ValueError(
            f"MASTER_PORT {port}: rank 0 cannot listen there ({reason}); choose a free port "
            "[rendezvous-failed]"
        )
    if (info.rank or agent) and (reason := unreachable(host, port, seconds)):
        who = "torchrun's agent" if agent else "rank 0"
        raise _rank_0_is_missing(
            f"MASTER_ADDR {host}, MASTER_PORT {port}: {who} did not answer there ({reason}); "
            "MASTER_ADDR must be rank 0's node, and all ranks must be started and reach that port "
            "[rendezvous-failed]",
            None if agent else startup,
        )
    try:
        store = _store_at(host, port, info.rank == 0 and not agent, seconds)
        if agent:
            store = (
                _serve_attempt(store, host, port)
                if info.rank == 0
                else _join_attempt(store, seconds, startup)
            )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise _rank_0_is_missing(
            f"MASTER_ADDR {host}, MASTER_PORT {port}: rank {info.rank} cannot connect ({reason}); "
            "MASTER_ADDR must be an address of rank 0's node [rendezvous-failed]",
            startup if info.rank else None,
        ) from None
    store.set_timeout(limit)
    return store


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


def _join_attempt(agent: dist.Store, seconds: float, startup: float | None) -> dist.TCPStore:
    """Rank 0's store for this attempt.

    Until rank 0 was restarted, its last address leads nowhere, to another program, or (agents
    restart their ranks at different times) to the rank 0 of the attempt before, which still runs:
    a rank joins a store once.
    """
    deadline = time.monotonic() + seconds
    while True:
        where = "rank 0's store: its address is not in torchrun's store"
        known = agent.check(["store of rank 0"])
        if known:
            address, port, token = json.loads(agent.get("store of rank 0"))
            where = f"rank 0's store at {address}, port {port}"
        if known and unreachable(address, port, 0.0) is None:
            with contextlib.suppress(dist.DistError):
                store = _store_at(address, port, False, STRANGERS_ANSWER_WITHIN)
                if store.check(["token"]) and store.get("token").decode() == token:
                    if store.add(f"rank {launcher.rank()} joined", 1) == 1:
                        return store
        if time.monotonic() > deadline:
            raise _rank_0_is_missing(
                f"{where}: no answer for {seconds:.0f} seconds; "
                "let the nodes reach each other at any port [rendezvous-failed]",
                startup,
            )
        time.sleep(RETRY_SECONDS)
