"""How the ranks of a check wait for one another: by torch's key-value store and not by collectives,
so that a rank that does not come is named."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist  # noqa: TID251

from megatron import cluster, launcher
from megatron.problems import error_lines
from megatron.training.launch.rendezvous import open_store

LINGER = 3.0  # seconds that rank 0 stays for the others to hear it


class Meeting:
    """This rank among all. A phase that not all ranks have reached within `limit` seconds ends the
    program: rank 0 names those who are missing.

    Threads watch, for a rank may stand in a call that never returns. Raises ValueError if rank 0
    does not answer at the start.
    """

    def __init__(self, limit: float, host: str):
        self.rank, self.size = launcher.rank(), launcher.world_size()
        self.limit = limit
        self.store: dist.Store = open_store(
            *cluster.rendezvous(os.environ), timedelta(seconds=limit)
        )
        self._watching = self.again()  # a call of the other one may be waiting
        self._number = 0
        self._name = "start"
        self._deadline = time.monotonic() + 2 * limit
        self._over = threading.Event()
        self._ending = threading.Lock()
        self.store.set(f"host/{self.rank}", host)
        for thread in (self._watch, self._listen):
            threading.Thread(target=thread, daemon=True).start()

    def again(self) -> dist.Store:
        """The store by a connection of its own."""
        store: dist.Store = self.store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        return store

    def phase(self, name: str) -> None:
        """Wait until all ranks are here; `name` is what comes next."""
        self._number += 1
        self._deadline = time.monotonic() + self.limit
        try:
            self.store.set(f"{self._number}/{self.rank}", "")
            count = self.store.add(f"{self._number}", 1)
            while count < self.size:
                time.sleep(0.005 + self.size * 1e-4)
                if time.monotonic() > self._deadline and self.rank == 0:
                    self._give_up()
                count = self.store.add(f"{self._number}", 0)
        except dist.DistError:
            self._give_up()
        self._name = name
        self._deadline = time.monotonic() + 2 * self.limit

    def share(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0; nothing elsewhere."""
        self.store.set(f"{name} of {self.rank}", json.dumps(value))
        self.phase(name)
        if self.rank:
            return []
        return [json.loads(self.store.get(f"{name} of {rank}")) for rank in range(self.size)]

    def tell(self, name: str, value: bool) -> bool:
        """What rank 0 says."""
        if self.rank == 0:
            self.store.set(name, str(int(value)))
        self.phase(name)
        return bool(int(self.store.get(name)))

    def close(self) -> None:
        """All phases are over; rank 0, which has the store, leaves last."""
        self._over.set()
        self.store.add("left", 1)
        leaving = time.monotonic() + self.limit
        while self.rank == 0 and self.store.add("left", 0) < self.size:
            if time.monotonic() > leaving:
                return
            time.sleep(0.01)

    def _watch(self) -> None:
        """End this process if its main thread does not, rank 0 a little earlier than others."""
        while not self._over.wait(0.2):
            if time.monotonic() > self._deadline + (self.limit if self.rank else 0.0):
                self._give_up()

    def _listen(self) -> None:
        """End this process when rank 0 has said why."""
        while self.rank and not self._over.wait(0.5):
            try:
                if self._watching.check(["said"]):
                    os._exit(1)
            except dist.DistError:
                time.sleep(LINGER)
                if not self._over.is_set():
                    self._give_up()

    def _give_up(self) -> NoReturn:
        """Name the ranks that have not come, and end the process."""
        with self._ending:  # neither thread returns
            if self.rank:
                problems = [f"rank {self.rank}: rank 0 does not answer [rank-cut]"]
            else:
                problems = self._missing()
            print(error_lines(problems), end="", flush=True)
            if self.rank == 0:
                self._watching.set("said", "")
                time.sleep(LINGER)
            os._exit(1)

    def _missing(self) -> list[str]:
        """A line for each rank that others wait for."""
        store = self._watching
        for number in (self._number + 1, self._number):
            here = [store.check([f"{number}/{rank}"]) for rank in range(self.size)]
            if any(here) and not all(here):
                hosts = [
                    f" on {store.get(f'host/{rank}').decode()}"
                    if store.check([f"host/{rank}"])
                    else ""
                    for rank in range(self.size)
                ]
                return [
                    f"rank {rank}{hosts[rank]}: does not answer since {self._name!r}, others do "
                    f"(--timeout-seconds {self.limit:g}) [rank-cut]"
                    for rank in range(self.size)
                    if not here[rank]
                ]
        return [f"no rank has ended {self._name!r} within {2 * self.limit:g} seconds [rank-cut]"]
