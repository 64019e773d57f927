"""Bounds of the server's connections: how many there are, and how long a request may take to
arrive. uvicorn has neither."""

from __future__ import annotations

import asyncio
import resource
import socket
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 30.0  # in which a request must be complete, from its connection or the last answer on
SPARE = 1000  # connections beyond the answers that the server takes
QUEUE = 2048  # connections that the kernel holds until they are accepted


@dataclass
class Connections:
    """`most` at a time. `waiting`: those without a complete request, oldest first, and the timers
    that will close them."""

    most: int
    waiting: dict[Connection, asyncio.TimerHandle] = field(default_factory=dict)
    warned: bool = False


def most_connections(capacity: int) -> int:
    """Where the server takes so many answers. The other half of the file descriptors that
    `ulimit -n` allows is for the rest of the process and for connections that come in one burst."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = capacity + SPARE
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 2))


class Server(uvicorn.Server):
    """Keeps the kernel's queue long. uvicorn's `backlog` is also how many connections asyncio
    accepts before it looks at the first of them, each with a descriptor."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve these sockets."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)


class Connection(H11Protocol):
    """uvicorn's protocol. A connection is closed if a request is not complete in time; beyond the
    most, the one that has waited longest for a request gives way to the new one, so that
    connections without a request never keep others out."""

    def __init__(self, shared: Connections, **options: Any):
        super().__init__(**options)
        self._shared = shared

    def connection_made(self, transport: asyncio.Transport) -> None:
        """There is a new connection."""
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self._shared.most:
            if not self._shared.warned:
                self._shared.warned = True
                self.logger.warning(
                    "%d connections are open, the most here (half of ulimit -n at most): those "
                    "without a request are closed, oldest first",
                    self._shared.most,
                )
            oldest = next(iter(self._shared.waiting))
            oldest._forget()
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """A part of a request has come, or more than one request."""
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Something is no HTTP; where that is in the body of a request that is being answered, the
        rest of its answer is dropped."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # there is an answer already
            self.transport.close()

    def on_response_complete(self) -> None:
        """The next request has its own time."""
        super().on_response_complete()
        self._forget()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Set a timer unless there is one, or none while a complete request is being answered."""
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._forget()
        elif self not in self._shared.waiting:
            self._shared.waiting[self] = self.loop.call_later(SECONDS, self.transport.close)

    def _forget(self) -> None:
        if (timer := self._shared.waiting.pop(self, None)) is not None:
            timer.cancel()
