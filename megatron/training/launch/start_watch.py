"""What a rank watches from before its imports on: torchrun, its parent, and without torchrun the
other ranks of this machine until they have joined."""

import os
import threading
import time
from collections.abc import Callable, Collection

from megatron import launcher
from megatron.training.launch import hang
from megatron.training.launch.process import Failure, ProcessId

LOOKS = 0.5  # seconds
# ... in which all ranks refuse a command line that one refused, or a restarted rank is there again
GONE_COUNTS_AFTER = 6.0
GONE = "ended before it had joined the others: killed, or its own output says why"


class StartWatch:
    """A thread that ends this process: by `leave` where torchrun, its parent, was killed and so
    does not end it (torchrun's successor would find the run locked), by `leave_for` where another
    rank of this machine ends while this one waits for it."""

    def __init__(self, leave: Callable[[int, str], object], leave_for: Callable[[Failure], object]):
        self._leave = leave
        self._leave_for = leave_for
        self._parent = os.getppid()
        self._processes: dict[int, ProcessId] = {}
        self._gone_at: dict[int, float] = {}
        self.joined = False  # then the rank monitor watches the others
        target = self._watch_parent if launcher.under_torchrun() else self._watch_ranks
        threading.Thread(target=target, name="start watch", daemon=True).start()

    def _watch_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(LOOKS)
        self._leave(
            1,
            f"error: rank {launcher.rank()}: torchrun, which started it, was killed; start it "
            "again [launcher-killed]\n",
        )

    def _watch_ranks(self) -> None:
        awaited = set(range(launcher.world_size())) - {launcher.rank()}
        while awaited and not self.joined:
            if (process := self.gone(awaited)) and not self.joined:
                self._leave_for(Failure(process, GONE, silent=True))
            time.sleep(LOOKS)

    def gone(self, ranks: Collection[int]) -> ProcessId | None:
        """The process of one of these ranks that was seen on this machine and has ended. To be
        called again and again."""
        if launcher.under_torchrun():
            return None
        present = hang.find(ranks, prepared_only=True)
        self._processes.update(present)
        now = time.monotonic()
        for rank in self._processes.keys() & set(ranks):
            since = now if rank in present else self._gone_at.get(rank, now)
            self._gone_at[rank] = since
            if now - since > GONE_COUNTS_AFTER:
                return self._processes[rank]
        return None
