"""--restart-forkserver: a process of each node that has imported what a rank imports. torchrun's
restarts fork their ranks from it instead of importing torch again.

A rank that torchrun starts hands its command line, environment and standard streams over, and stays
as a small process that passes signals on and ends as the forked one does. The server ends with
torchrun. Needs Linux, and only the standard library until it imports the modules of its job.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megatron import launcher, threads

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
SERVER = "from megatron.training.launch import forkserver; forkserver.serve()"
_SUPPORTED = hasattr(os, "pidfd_open") and sys.platform == "linux"
_NUMBER = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")


# --- in the process that torchrun starts


def enter() -> None:
    """To be called before slow imports. If torchrun has a forkserver here, the program runs there
    and this process exits as it does; returns where there is none, and in a forked process."""
    main = sys.modules["__main__"]
    is_script = hasattr(main, "__file__") and main.__spec__ is None
    forked = launcher.FORKED in os.environ
    if forked or not (_SUPPORTED and launcher.under_torchrun() and is_script):
        return
    server = socket.socket(socket.AF_UNIX)
    alive, keep_alive = os.pipe()
    try:
        server.connect(_address(os.getppid()))
        pid = _request(server, main.__file__, alive) if _is_mine(server) else None
    except OSError:
        pid = None  # there is none, or it has just ended
    os.close(alive)
    if pid is None:
        os.close(keep_alive)  # which ends a process that was forked all the same
        server.close()
        return
    for name in PASSED_ON:
        signal.signal(getattr(signal, name), lambda number, frame: _pass_on(pid, number))
    _exit_like(_receive_number(server))


def _request(server: socket.socket, script: str, alive: int) -> int | None:
    """Ask for a process that runs the script with all that this one has; its number, None if the
    server ends before it says it."""
    request = {
        "script": script,
        "argv": sys.argv,
        "environ": dict(os.environ) | {launcher.FORKED: str(os.getppid())},
        "cwd": os.getcwd(),
        "cores": list(os.sched_getaffinity(0)),
    }
    text = json.dumps(request).encode()
    socket.send_fds(server, [_NUMBER.pack(len(text))], [0, 1, 2, alive])
    server.sendall(text)
    return _receive_number(server)


def _pass_on(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _exit_like(status: int | None) -> NoReturn:
    """End as a process with this wait status; None where the server has gone. The kernel then kills
    the forked process, whose pipe ends here."""
    if status is None:
        os._exit(1)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the forked process wrote one, if any
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _address(agent: int) -> str:
    """The abstract socket of the forkserver of torchrun's process `agent`."""
    started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"\0megatron-forkserver-{os.stat('/proc/self/ns/pid').st_ino}-{agent}-{started}"


def _is_mine(peer: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] == os.getuid()


def _receive_number(connection: socket.socket) -> int | None:
    """None at the end of the connection."""
    with suppress(ConnectionError):
        data = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        return _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else None
    return None


# --- in a rank


def start() -> None:
    """Start this node's server, which imports the modules of torch and this suite that are imported
    now; nothing happens on other ranks than the node's first, and in forked ranks."""
    if not (_SUPPORTED and launcher.under_torchrun() and launcher.info().local_rank == 0):
        return
    if launcher.FORKED in os.environ:
        return
    names = [name for name in sys.modules if name.partition(".")[0] in ("torch", "megatron")]
    job = {"modules": names, "path": sys.path, "agent": os.getppid()}
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    with open(os.devnull, "wb") as null:
        server = subprocess.Popen(
            [sys.executable, *options, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=null,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    with suppress(BrokenPipeError), server.stdin as pipe:
        pipe.write(json.dumps(job).encode())


# --- in the server


def serve() -> None:
    """Import, and fork a process for each request, until torchrun ends. Forked processes return
    from here when their program has ended."""
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    try:
        agent = os.pidfd_open(job["agent"])
        address = _address(job["agent"])
    except OSError:
        return  # torchrun has ended
    for name in job["modules"]:
        with suppress(Exception):  # what the rank needs it imports again
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or a collection would copy these pages in each rank
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError:
            return  # there is one
        listener.listen(1024)
        connection = _fork_ranks(listener, agent)
    if connection is not None:
        request = _take_over(connection)
        sys.argv[:] = request["argv"]
        runpy.run_path(request["script"], run_name="__main__")


def _fork_ranks(listener: socket.socket, agent: int) -> socket.socket | None:
    """In a forked process the connection to the one that asked for it; None when torchrun has
    ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(agent, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == agent:
                    return None
                if key.fileobj is not listener:
                    selector.unregister(key.fileobj)
                    _tell_end(key.fd, *key.data)
                    continue
                connection, _ = listener.accept()
                if not _is_mine(connection):
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    _close(selector)
                    return connection
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
                _tell(connection, pid)


def _close(selector: selectors.BaseSelector) -> None:
    """What the server waits for, in a forked process: whoever asked for another one must see it
    end with the server."""
    for key in selector.get_map().values():
        if isinstance(key.fileobj, int):  # of a process
            os.close(key.fd)
        if key.data:
            key.data[1].close()


def _tell_end(descriptor: int, pid: int, connection: socket.socket) -> None:
    os.close(descriptor)
    _tell(connection, os.waitpid(pid, 0)[1])
    connection.close()


def _tell(connection: socket.socket, number: int) -> None:
    with suppress(ConnectionError):  # the rank has been killed
        connection.sendall(_NUMBER.pack(number))


def _take_over(connection: socket.socket) -> dict[str, Any]:
    """Become the process that asked for this one; returns its request."""
    os.setsid()
    head, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, 4)
    if not descriptors:
        os._exit(1)  # nobody asks any more
    _end_with(descriptors.pop())
    size = _NUMBER.unpack(head)[0]
    text = connection.recv(size, socket.MSG_WAITALL)
    connection.close()
    if len(text) < size:
        os._exit(1)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    request = json.loads(text)
    # OpenMP has read these of the server
    waiting = {name: os.environ[name] for name in threads.OWN if name in os.environ}
    os.environ.clear()
    os.environ.update(request["environ"] | waiting)
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cores"])
    return request


def _end_with(alive: int) -> None:
    """From now on the kernel kills this process when the other end of a pipe is closed."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(alive, 0)
    if poll.poll(0):  # it was closed before
        os._exit(1)
