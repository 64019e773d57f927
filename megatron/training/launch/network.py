"""Addresses and interfaces of this machine, and whether another one answers."""

import contextlib
import ipaddress
import socket
import sys
import time
from pathlib import Path

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]  # mypy has no optional modules

ROUTES = Path("/proc/net/route")
CONNECT_SECONDS = 10.0  # for one attempt
RETRY_SECONDS = 0.2


def allow_open_files() -> None:
    """Raise this process's soft limit of open files to the hard one: rank 0 has some connections
    per rank, and the usual soft limit is 1,024."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS: more than the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(host: str, port: int) -> tuple[int, str]:
    """(family, address) of this machine on the way to `host`. Raises OSError."""
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    ):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return family, probe.getsockname()[0]
        except OSError as error:
            problem = error
    raise problem


def interface_towards(host: str) -> str | None:
    """The interface that leads to another machine, `eth0` say; None for this machine's loopback, or
    where it is not known.

    Read off Linux's table of IPv4 routes: the longest prefix counts, and then the lowest metric.
    """
    try:
        address = int.from_bytes(socket.inet_aton(socket.gethostbyname(host)), sys.byteorder)
        rows = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return None
    if socket.inet_aton("127.0.0.0")[0] == address.to_bytes(4, sys.byteorder)[0]:
        return None
    networks = []
    for name, net, _, _, _, _, metric, mask, *_ in rows:
        if address & int(mask, 16) == int(net, 16):
            networks.append((int(mask, 16).bit_count(), -int(metric), name))
    return max(networks)[2] if networks else None


def listen_problem(port: int) -> str | None:
    """Why no server can listen on this port of this machine; None if one can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def unreachable(host: str, port: int, seconds: float) -> str | None:
    """Why nobody answers at this address within so many seconds; None as soon as somebody does.

    An address that does not exist is known at once, unless the name server only fails for the
    moment.
    """
    deadline = time.monotonic() + seconds
    while True:
        remaining = deadline - time.monotonic()
        try:
            socket.create_connection(
                (host, port), max(0.1, min(remaining, CONNECT_SECONDS))
            ).close()
            return None
        except socket.gaierror as error:
            reason = error.strerror or str(error)
            if error.errno != socket.EAI_AGAIN:
                return reason
        except OSError as error:
            reason = (
                "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            )
        if time.monotonic() + RETRY_SECONDS > deadline:
            return f"{reason}, for {seconds:.0f} seconds"
        time.sleep(RETRY_SECONDS)
