"""Processes of pretrain_gpt.py as a user has them: started, watched, signalled, ended. Knows no
flag and no number.

`fork_program` runs the script as `__main__` in a fork of a process that has torch loaded (use it in
a function that `tests.forkrun.run_ranks` calls), which takes a tenth of a second; `spawn_program`
starts the interpreter anew.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.faults.ranks import free_port, living, surroundings
from tests.forkrun import ROOT

SCRIPT = str(ROOT / "pretrain_gpt.py")


class Program:
    """A running process, leader of a session of its own; what it prints lies in `folder`/log.NAME
    and err.NAME."""

    def __init__(self, pid: int, folder: Path, name: str):
        self.pid = pid
        self.folder = folder
        self.name = name
        self.code: int | None = None

    @property
    def out(self) -> str:
        """Its stdout so far."""
        return (self.folder / f"log.{self.name}").read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its stderr so far."""
        return (self.folder / f"err.{self.name}").read_text(errors="replace")

    def poll(self) -> int | None:
        """Its exit code (of a signal, minus its number) once it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Wait until it has printed `text`."""
        self.wait_until(lambda: text in self.out, seconds, f"{text!r} was not printed")

    def end(self, seconds: float = 60.0) -> int:
        """Wait for its end; its exit code."""
        self.wait_until(lambda: self.poll() is not None, seconds, "still running")
        return self.code

    def wait_until(self, done: Callable[[], bool], seconds: float, complaint: str) -> None:
        """Wait until `done()`; an error if it has ended before."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline or self.poll() is not None and not done():
                self.kill()
                raise AssertionError(
                    f"{complaint} (exit code {self.code})\n--- stdout\n{self.out[-3000:]}\n"
                    f"--- stderr\n{self.err[-3000:]}"
                )
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        os.kill(self.pid, number)

    def interrupt(self) -> None:
        """Ctrl-C as a terminal does it: SIGINT to the whole process group."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """End whatever is left of its session."""
        for pid in session(self.pid):
            os.kill(pid, signal.SIGKILL)

    def left_behind(self, seconds: float = 3.0) -> list[int]:
        """Processes of its session that still live `seconds` after its end; they are killed
        then."""
        deadline = time.monotonic() + seconds
        while session(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = session(self.pid)
        self.kill()
        return left


def ranks_of(launcher: Program) -> list[int]:
    """Its child processes."""
    tasks = Path(f"/proc/{launcher.pid}/task").iterdir()
    return sorted(int(word) for task in tasks for word in (task / "children").read_text().split())


def session(leader: int) -> list[int]:
    """Living processes of the session that `leader` opened."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, sid = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
            except OSError:
                continue
            if int(sid) == leader and state not in "ZX":
                found.append(int(folder.name))
    return found


def left_in(folder: Path) -> list[int]:
    """Living processes that work in `folder`."""
    time.sleep(0.5)
    return [pid for pid in living(folder) if pid != os.getpid()]


def environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    """This process's environment without any launcher's variables, one thread, and the changes."""
    return {**surroundings(), **(changes or {})}


def fork_program(
    argv: Sequence[str],
    folder: Path,
    name: str = "0",
    environ: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Program:
    """Run the script with `argv` in a forked process; `before` may change what is imported
    there."""
    folder.mkdir(exist_ok=True)
    outputs = [
        os.open(folder / f"{kind}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for kind in ("log", "err")
    ]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            for stream, output in enumerate(outputs, 1):
                os.dup2(output, stream)
            kept = environment(environ)
            os.environ.clear()
            os.environ.update(kept)
            # it may have DataLoader workers
            multiprocessing.process.current_process()._config["daemon"] = False
            sys.argv = [SCRIPT, *argv]
            if before:
                before()
            runpy.run_path(SCRIPT, run_name="__main__")
            code = 0
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for output in outputs:
        os.close(output)
    return Program(pid, folder, name)


def fork_ranks(
    argv: Sequence[str],
    folder: Path,
    world: int,
    environ: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    ranks: Sequence[int] | None = None,
) -> list[Program]:
    """As srun would: processes, each in a session of its own, that meet at a free port; `ranks` of
    `world`, else all."""
    folder.mkdir(exist_ok=True)
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **(environ or {}),
    }
    return [
        fork_program(
            argv, folder, str(rank), {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, before
        )
        for rank in (range(world) if ranks is None else ranks)
    ]


def spawn_program(
    command: Sequence[str],
    folder: Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    program: Sequence[str] = (sys.executable,),
) -> Program:
    """Start `command` in a new interpreter, or with another `program` before it."""
    folder.mkdir(exist_ok=True)
    with open(folder / "log.0", "a") as out, open(folder / "err.0", "a") as err:
        process = subprocess.Popen(
            [*program, *command],
            stdout=out,
            stderr=err,
            start_new_session=True,
            env=environment(environ),
            cwd=cwd or folder,
        )
    process.returncode = 0  # waited for by Program, not by Popen
    return Program(process.pid, folder, "0")
