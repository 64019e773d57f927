"""A lock file that allows only one job at a time to write into a run directory.

The lock is the file `.lock.N` with the highest N; it names host, process and a secret token, and
its time of change is the heartbeat. A job whose process has ended (same machine), or whose
heartbeat is old by the clock of the file system (another machine), is dead: the next one makes
`.lock.N+1`, which only one can, and removes the dead one's. Whoever wakes up after that finds its
file missing, or a higher one, when it asks before a commit (`Lock.check`)."""

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron import log
from megatron.checkpoint.filesystem import (
    DISK,
    CheckpointError,
    explained,
)
from megatron.config.run_directory import (
    read_small_file,
)
from megatron.small_files import parse_json

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
LEAVING_SECONDS = 10.0
RETURNS_WITHIN = 30.0  # where the directory was unmounted for a moment
_NAME = re.compile(r"\.lock\.(\d{6})")


@dataclass(frozen=True)
class Owner:
    """The holder of a lock. `machine`: host, boot and PID namespace; `started`: start time of the
    process, since PIDs are reused."""

    host: str
    machine: str
    pid: int
    started: str
    token: str
    since: str


class Lock:
    """A lock that this process holds; a thread updates its heartbeat."""

    def __init__(self, path: Path, owner: Owner):
        self.path = path
        self.owner = owner
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            # a lock that is lost is said when something is to be written
            with suppress(OSError):
                os.utime(self.path)

    def check(self) -> None:
        """Raise CheckpointError unless this job still owns the directory; called before every
        commit."""
        root = self.path.parent
        newer = [path for path in _locks(root) if path.name > self.path.name]
        owner = _owner(self.path)
        deadline = time.monotonic() + RETURNS_WITHIN
        while owner is None and not newer and not self._over.is_set():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{root}: the lock file {self.path.name} of this job no longer exists: the "
                    "file system was unmounted, or the file was removed; mount it again and "
                    "resume [save-directory-lost]"
                )
            time.sleep(0.2)
            newer = [path for path in _locks(root) if path.name > self.path.name]
            owner = _owner(self.path)
        if newer or owner is None or owner.token != self.owner.token:
            # given up by another thread, which is about to end this process
            if self._over.is_set():
                time.sleep(LEAVING_SECONDS)
            holder = _owner(newer[-1] if newer else self.path)
            raise CheckpointError(
                f"{root} is no longer this job's: {_say(holder)} acquired the lock while this "
                f"process (pid {self.owner.pid} on {self.owner.host}) was suspended; it writes "
                "nothing more there [save-directory-taken-over]"
            )

    def release(self) -> None:
        """Release the directory."""
        self._over.set()
        owner = _owner(self.path)
        if owner is not None and owner.token == self.owner.token and os.getpid() == self.owner.pid:
            with suppress(OSError):
                self.path.unlink()


@contextmanager
def held(directory: str) -> Iterator[Lock]:
    """Hold the lock of `directory` within the block. Raises CheckpointError immediately if another
    job holds it."""
    lock = acquire(Path(directory))
    try:
        yield lock
    finally:
        lock.release()


def acquire(root: Path) -> Lock:
    """Acquire the lock of `root`, which is created if it is missing. Raises CheckpointError if a
    running job holds it."""
    DISK.make_root(root)
    previous = _locks(root)
    for path in previous:
        _refuse_if_alive(path)
    number = int(previous[-1].suffix[1:]) + 1 if previous else 1
    lock_file = root / f".lock.{number:06d}"
    owner = Owner(
        socket.gethostname(),
        _machine(),
        os.getpid(),
        _started(os.getpid()) or "",
        secrets.token_hex(8),
        time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    with explained("create", lock_file):
        try:
            descriptor = os.open(
                lock_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
            )
        except FileExistsError:
            raise CheckpointError(
                f"{root} is in use: another job has taken it just now; give another --save "
                "[save-directory-in-use]"
            ) from None
        with open(descriptor, "w") as file:
            json.dump(asdict(owner), file)
    rivals = [path for path in _locks(root) if path not in (lock_file, *previous)]
    # made at the same time as mine: each sees the other, at least one yields
    if rivals:
        with suppress(OSError):
            lock_file.unlink()
        raise CheckpointError(
            f"{root} is in use: {_say(_owner(rivals[-1]))} has taken it just now; give another "
            "--save [save-directory-in-use]"
        )
    for path in previous:
        log.print_rank_0(
            f"WARNING: {root}: taking over the lock of {_say(_owner(path))}, which no longer runs"
        )
        with suppress(OSError):
            path.unlink()
    return Lock(lock_file, owner)


def _locks(root: Path) -> list[Path]:
    """The lock files of a directory, ascending; none where it does not exist."""
    if not root.exists():
        return []
    with explained("list", root):
        return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))


def _owner(path: Path) -> Owner | None:
    """The holder of a lock file; None where it does not exist, is not written yet, or is not one of
    ours."""
    try:
        owner = Owner(**parse_json(read_small_file(path, 10_000)))
    except (CheckpointError, ValueError, TypeError):
        return None
    return owner if isinstance(owner.pid, int) else None


def _refuse_if_alive(path: Path) -> None:
    """Raise CheckpointError unless the holder of `path` is dead."""
    owner = _owner(path)
    try:
        age = _age(path)
    except FileNotFoundError:
        return  # released just now
    if owner and owner.machine == _machine():
        alive = _started(owner.pid) == owner.started
        proof = f"it is dead when process {owner.pid} is"
    else:
        alive = age < STALE_SECONDS
        proof = (
            f"it is taken for dead {STALE_SECONDS:.0f} s after its last heartbeat, which was "
            f"{max(0.0, age):.0f} s ago"
        )
    if alive:
        raise CheckpointError(
            f"{path.parent} is in use by {_say(owner)}: two jobs would overwrite each other's "
            f"checkpoints. End that one ({proof}; should this be wrong, remove {path}), or give "
            "another --save [save-directory-in-use]"
        )


def _say(owner: Owner | None) -> str:
    return (
        f"the job of process {owner.pid} on {owner.host} since {owner.since}"
        if owner
        else "another job"
    )


def _age(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the file system alone."""
    probe = path.with_name(f".lock-clock-{secrets.token_hex(4)}")
    with explained("create", probe):
        probe.touch()
        now = probe.stat().st_mtime
    with suppress(OSError):
        probe.unlink()
    return now - path.lstat().st_mtime


def _machine() -> str:
    """Equal for two processes that see each other's PIDs."""
    identifiers = [socket.gethostname()]
    with suppress(OSError):
        identifiers.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        identifiers.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(identifiers)


def _started(pid: int) -> str | None:
    """When a process of this machine was started (Linux: in clock ticks since boot); None for one
    that has exited."""
    try:
        state, *columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else columns[18]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)  # signal 0: is it there?
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "running"
