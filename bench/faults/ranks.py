"""Ranks of pretrain_gpt.py on this machine: launchers, a network that can be cut, how an attempt
ends, what is left behind. Needs Linux; to cut networks root, unshare, nsenter and ip."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RANK = str(Path(__file__).with_name("inject.py"))
SITES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_"),
)


@dataclass(frozen=True)
class Launch:
    """How the ranks are started. `cut_off`: the rank whose network a fault can cut, with which each
    rank is a node of its own."""

    launcher: str
    world: int
    flags: Sequence[str]
    restarts: int = 0
    cut_off: int | None = None


def tiny_model(layers: int = 2, width: int = 32) -> list[str]:
    """Flags of a model that trains on CPUs in milliseconds."""
    return (
        f"--num-layers {layers} --hidden-size {width} --num-attention-heads 4 --seq-length {width} "
        f"--max-position-embeddings {width} --tokenizer-type NullTokenizer --vocab-size 211 "
        "--mock-data --micro-batch-size 1 --log-interval 1 --num-workers 0 --device cpu"
    ).split()


def start(launch: Launch, folder: Path, network: Network | None = None) -> list[subprocess.Popen]:
    """The ranks, or torchrun; they work in `folder`, where `log` and `err` get what they print."""
    words = [sys.executable, RANK, *launch.flags]
    port = free_port()
    if not launch.launcher.startswith("torchrun"):
        return [
            _spawn(
                [*(network.enter(rank == launch.cut_off) if network else ()), *words],
                folder,
                variables(launch, rank, port),
            )
            for rank in range(launch.world)
        ]
    words[1:1] = ["-m", "torch.distributed.run", f"--max-restarts={launch.restarts}"]
    if launch.launcher == "torchrun":
        words[3:3] = ["--standalone", f"--nproc-per-node={launch.world}"]
        return [_spawn(words, folder, {})]
    words[3:3] = (
        "--nnodes=2:3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=run "
        f"--rdzv-endpoint=127.0.0.1:{port} --rdzv-conf=last_call_timeout=1"
    ).split()
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [_spawn(words, folder, environ) for _ in range(2)]


def attempt(
    launch: Launch,
    folder: Path,
    patience: float = float("inf"),
    grace: float = float("inf"),
    watch: Callable[[Sequence[subprocess.Popen]], None] = lambda processes: None,
) -> tuple[list[int], bool]:
    """Start the ranks, and wait until none lives: (exit codes of what was started, whether all
    ended by themselves). After `patience` seconds, and `grace` after the first has failed, all are
    killed."""
    network = Network() if launch.cut_off is not None else None
    processes = start(launch, folder, network)
    latest = time.monotonic() + patience
    try:
        while any(process.poll() is None for process in processes) or living(folder):
            watch(processes)
            if any(process.poll() for process in processes):
                latest = min(latest, time.monotonic() + grace)
                grace = float("inf")
            if time.monotonic() > latest:
                return [process.poll() or 1 for process in processes], False
            time.sleep(0.05)
        return [process.wait() for process in processes], True
    finally:
        for pid in living(folder):
            kill(pid)
        for process in processes:
            process.wait()
        if network:
            network.close()


def free_port(ports: range = range(10_000, 20_000)) -> int:
    """One of `ports` that nobody listens on now, and that no outgoing connection gets."""
    while True:
        port = random.SystemRandom().choice(ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def variables(launch: Launch, rank: int, port: int) -> dict[str, str]:
    """What a launcher gives a rank."""
    world = launch.world
    address, local, size = "127.0.0.1", rank, world
    if launch.cut_off is not None:
        address, local, size = Network.ADDRESSES[launch.cut_off == 0], 0, 1
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if launch.launcher == "env":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return meeting | dict(zip(names, map(str, (rank, world, local, size)), strict=True))
    return meeting | {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_LOCALID": str(local),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": str(rank - local),
        "SLURM_STEP_TASKS_PER_NODE": str(world) if launch.cut_off is None else f"1(x{world})",
    }


def _spawn(
    command: Sequence[str], folder: Path, environ: dict[str, str]
) -> subprocess.Popen[bytes]:
    with open(folder / "err", "ab") as err, open(folder / "log", "ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=surroundings() | environ,
            stdout=log,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def surroundings() -> dict[str, str]:
    """This process's environment without what a launcher gave it; one thread."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(SITES)}
    return variables | {"OMP_NUM_THREADS": "1"}


def living(folder: Path) -> list[int]:
    """Processes that work in `folder`, zombies aside."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(folder.resolve()):
                pids.append(int(process.name))
    return pids


def kill(pid: int) -> None:
    """SIGKILL, if it still lives."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def shared_files() -> set[str]:
    """Shared memory in /dev/shm that can be of ranks and that no living process has mapped. Other
    programs make and map such files at the same time, too. Semaphores are not counted: Python
    removes their names as soon as they are made, and a SIGKILL in between leaves 32 bytes."""
    files = {file for file in os.listdir("/dev/shm") if file.startswith(("torch", "psm_"))}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            files -= {file for file in files if f"/dev/shm/{file}" in maps}
    return files


def left_behind(before: set[str], seconds: float = 10) -> list[str]:
    """Files of `shared_files` that came since `before` and that nobody removes: Python's resource
    tracker removes those of a killed process a moment after its end."""
    until = time.monotonic() + seconds
    while (remaining := shared_files() - before) and time.monotonic() < until:
        time.sleep(0.2)
    return sorted(remaining)


def checkpoint(folder: Path, iteration: int, name: str = "saved") -> dict[str, bytes]:
    """The files of a checkpoint in `folder`/`name` that hold weights and optimizer states."""
    last = folder / name / f"iter_{iteration:07d}"
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}


def can_cut_networks() -> bool:
    """Are there network namespaces for this user?"""
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "ip", "nsenter"))


class Network:
    """Two network namespaces with a link between them; the rank that can be cut off is in the
    second."""

    ADDRESSES = ("10.99.0.1", "10.99.0.2")

    def __init__(self) -> None:
        command = ["unshare", "--net", "sleep", "1000"]
        self.processes = [subprocess.Popen(command) for _ in range(2)]
        first, second = (process.pid for process in self.processes)
        outside = os.readlink("/proc/self/ns/net")
        while outside in [os.readlink(f"/proc/{pid}/ns/net") for pid in (first, second)]:
            time.sleep(0.01)
        link = f"ip link add eth0 netns {first} type veth peer eth0 netns {second}"
        subprocess.run(link.split(), check=True)
        for number, address in enumerate(self.ADDRESSES):
            for words in (
                f"ip addr add {address}/24 dev eth0",
                "ip link set eth0 up",
                "ip link set lo up",
            ):
                subprocess.run([*self.enter(bool(number)), *words.split()], check=True)

    def enter(self, is_cut_off: bool) -> list[str]:
        """The words before a command that runs in the second namespace, or in the first."""
        return ["nsenter", "--net", "-t", str(self.processes[is_cut_off].pid)]

    def close(self) -> None:
        """Both end."""
        for process in self.processes:
            process.kill()
            process.wait()
