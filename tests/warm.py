"""Programs that tests start as a user does (`python tools/x.py`, `torchrun`), without the two to five
seconds that loading torch takes.

`python()` is a stand-in of an interpreter: it hands its words, folder, environment and streams to a
process forked from the server of tests.forkrun, which forks the program; it passes signals on and
ends as the program does. The program sees the modules of this checkout (those of `elsewhere()` see
none of it, for copies), and what is installed where the stand-in lies. With options other than -c,
-m and -u an interpreter starts.

Not for tests of imports, of process groups, or of variables that are read as torch is loaded.
"""

import atexit
import builtins
import contextlib
import functools
import gc
import importlib
import io
import marshal
import multiprocessing
import os
import runpy
import select
import signal
import site
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from multiprocessing import process
from pathlib import Path
from typing import Any

from tests import forkrun

CLIENT = """#!{python} -IS
import _signal, _socket, marshal, os, sys
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
job = marshal.dumps((sys.argv, os.getcwd(), dict(os.environ)))
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
server.sendmsg([len(job).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
while job:
    job = job[server.send(job):]
pid = int.from_bytes(server.recv(4), "big")
for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM, _signal.SIGUSR1, _signal.SIGUSR2):
    if _signal.getsignal(number) != _signal.SIG_IGN:
        _signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int.from_bytes(server.recv(4), "big", signed=True)
if code < 0:
    if -code != _signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python(*modules: str) -> str:
    """The path of the stand-in whose server has these modules loaded, too, where they are
    installed."""
    return _start_server(forkrun.context(), modules, _serve)


@functools.cache
def elsewhere(*modules: str) -> str:
    """... whose server has only these modules, and none of this checkout."""
    return _start_server(multiprocessing.get_context("spawn"), modules, _serve_elsewhere)


def _start_server(context: Any, modules: tuple[str, ...], serve: Callable[..., None]) -> str:
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    atexit.register(folder.cleanup)
    address = f"{folder.name}/server"
    path = Path(folder.name, "bin", "python")
    path.parent.mkdir()
    path.write_text(CLIENT.format(python=sys.executable, address=address))
    path.chmod(0o755)
    server = context.Process(target=serve, args=(address, modules), daemon=True)
    server.start()
    while not os.path.exists(address):
        assert server.is_alive()
        time.sleep(0.01)
    return str(path)


def _serve_elsewhere(address: str, modules: tuple[str, ...]) -> None:
    """The same without what this module has loaded of the checkout."""
    own = str(forkrun.ROOT)
    for name in [name for name in sys.modules if name.split(".")[0] in ("megatron", "tests")]:
        del sys.modules[name]
    finders = [
        (each, f"{each!r} {type(each).__module__} {each.__module__}") for each in sys.meta_path
    ]
    sys.meta_path = [
        each for each, said in finders if "__editable__" not in said and "megatron" not in said
    ]
    sys.path = [each for each in sys.path if each not in ("", own) and "__editable__" not in each]
    _serve(address, modules)


def _serve(address: str, modules: tuple[str, ...]) -> None:
    """Fork a process for each program, until this one is killed."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    programs: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
    while True:
        stand_ins = {connection: pid for pid, connection in programs.values()}
        ready, _, _ = select.select([listener, *programs, *stand_ins], [], [])
        for one in ready:
            if one is listener:
                connection, _ = listener.accept()
                pid = _fork(connection)
                connection.sendall(pid.to_bytes(4, "big"))
                programs[os.pidfd_open(pid)] = pid, connection
            elif one in programs:
                pid, connection = programs.pop(one)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    connection.sendall(code.to_bytes(4, "big", signed=True))
                connection.close()
                os.close(one)
            elif one.fileno() >= 0:  # the stand-in was killed
                os.kill(stand_ins[one], signal.SIGKILL)


def _fork(connection: socket.socket) -> int:
    """The process of a program."""
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as file:
        job = file.read(int.from_bytes(size, "big"))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _run(*marshal.loads(job), streams)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    for stream in streams:
        os.close(stream)
    return pid


def _run(words: list[str], folder: str, environ: dict[str, str], streams: list[int]) -> int:
    """The exit code of a program in this process."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    process._parent_process = None
    process.current_process()._config["daemon"] = False  # it may have children
    path, *words = words
    if words and words[0][0] == "-" and words[0] not in ("-", "-c", "-m", "-u"):
        installed = Path(path).with_name("python3")
        real = str(installed) if installed.exists() else sys.executable
        os.execv(real, [real, *words])
    sys.executable = path
    unbuffered = words[:1] == ["-u"] or bool(environ.get("PYTHONUNBUFFERED"))
    _open_streams(unbuffered)
    try:
        _start(words[words[:1] == ["-u"] :])
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if isinstance(leave.code, str):
            sys.stderr.write(f"{leave.code}\n")
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _open_streams(unbuffered: bool) -> None:
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = io.TextIOWrapper(
            open(number, f"{mode}b", closefd=False),
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr",
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _start(words: list[str]) -> None:
    """What an interpreter does with the words after `python`."""
    first, *rest = words or ["-"]
    own = os.path.dirname(os.path.realpath(first))
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path = [each for each in sys.path if each]
    sys.path[:0] = ["" if first in ("-c", "-m", "-") else own, *filter(None, places)]
    sys.argv = ["-c", *rest[1:]] if first == "-c" else words[first == "-m" :]
    version = "python{}.{}".format(*sys.version_info)
    site.addsitedir(str(Path(sys.executable).parents[1] / "lib" / version / "site-packages"))
    for file in filter(Path.is_file, (Path(each, "sitecustomize.py") for each in sys.path)):
        exec(file.read_text(), {})
        break
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first in ("-c", "-"):
        source = rest[0] if first == "-c" else sys.stdin.read()
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        exec(compile(source, "<string>" if first == "-c" else "<stdin>", "exec"), vars(main))
    else:
        runpy.run_path(first, run_name="__main__")
