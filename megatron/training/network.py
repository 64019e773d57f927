"""Which address and which interface of this machine lead to another one. Knows no torch, no rank and sends nothing."""
from __future__ import annotations

import socket
import sys
from pathlib import Path

ROUTES = Path("/proc/net/route")


def address_towards(host: str, port: int) -> tuple[int, str]:
    """(family, address) of this machine on the way to `host`. Raises OSError."""
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, there in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(there)
                return family, probe.getsockname()[0]
        except OSError as error:
            problem = error
    raise problem


def interface_towards(host: str) -> str | None:
    """The interface that leads to another machine, `eth0` say; None for this machine's loopback, or where it is not known.

    Read off Linux's table of IPv4 routes: the longest prefix counts, and then the lowest metric.
    """
    try:
        there = int.from_bytes(socket.inet_aton(socket.gethostbyname(host)), sys.byteorder)
        rows = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return None
    if socket.inet_aton("127.0.0.0")[0] == there.to_bytes(4, sys.byteorder)[0]:
        return None
    found = []
    for name, net, _, _, _, _, metric, mask, *_ in rows:
        if there & int(mask, 16) == int(net, 16):
            found.append((int(mask, 16).bit_count(), -int(metric), name))
    return max(found)[2] if found else None
