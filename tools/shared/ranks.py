"""Ranks of pretrain_gpt.py on this machine, for programs that disturb them: a script that changes
what is imported before the run, launchers, what they leave behind. Needs Linux. Knows no fault."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "pretrain_gpt.py")
LAUNCHERS = ("env", "srun", "torchrun")
PLACES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_"),
)
# What launchers call a rank's number, the number of ranks, and both on its node.
NAMES = {
    "env": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": tuple(
        f"OMPI_COMM_WORLD_{one}" for one in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
}
# What a rank runs: its number is `rank`.
HEAD = f"""
import gc, os, runpy, sys
gc.disable()  # as the script does before its imports
sys.path.insert(0, {str(ROOT)!r})
from megatron import launcher
rank = launcher.info().rank
"""
TAIL = f"""
sys.argv[0] = {SCRIPT!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Launch:
    """How the ranks are started. `apart`: each is a node of its own, at `address`; `enter` has the
    words before a rank's command."""

    launcher: str
    world: int
    flags: Sequence[str]
    max_restarts: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    address: str = "127.0.0.1"
    enter: Callable[[int], list[str]] = lambda rank: []


def tiny_model(layers: int = 2, width: int = 32) -> list[str]:
    """Flags of a model that trains on CPUs in milliseconds."""
    return (
        f"--num-layers {layers} --hidden-size {width} --num-attention-heads 4 --seq-length {width} "
        f"--max-position-embeddings {width} --tokenizer-type NullTokenizer --vocab-size 211 "
        "--mock-data --micro-batch-size 1 --log-interval 1 --num-workers 0 --device cpu"
    ).split()


def write_rank(folder: Path, changes: str) -> None:
    """The ranks that start in `folder` run `changes`, the text of a program, before the script."""
    (folder / "rank.py").write_text(HEAD + changes + TAIL)


def start(launch: Launch, folder: Path) -> list[subprocess.Popen]:
    """The ranks, or torchrun; they work in `folder`, where `log` and `err` get what they print."""
    words = [sys.executable, "rank.py", *launch.flags]
    if launch.launcher == "torchrun":
        agent = "-m torch.distributed.run --standalone".split()
        agent += [f"--nproc-per-node={launch.world}", f"--max-restarts={launch.max_restarts}"]
        return [_spawn([sys.executable, *agent, *words[1:]], folder, launch.environ)]
    port = free_port()
    return [
        _spawn([*launch.enter(rank), *words], folder, variables(launch, rank, port))
        for rank in range(launch.world)
    ]


def free_port() -> int:
    """A port that nobody listens on now, and that no outgoing connection gets."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def variables(launch: Launch, rank: int, port: int) -> dict[str, str]:
    """What a launcher gives a rank."""
    place = {"MASTER_ADDR": launch.address, "MASTER_PORT": str(port), **launch.environ}
    world = launch.world
    local, size = (0, 1) if launch.apart else (rank, world)
    if launch.launcher in NAMES:
        numbers = map(str, (rank, world, local, size))
        return place | dict(zip(NAMES[launch.launcher], numbers, strict=True))
    return place | {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_LOCALID": str(local),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": str(rank - local),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{world})" if launch.apart else str(world),
    }


def _spawn(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> subprocess.Popen:
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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PLACES)}
    return kept | {"OMP_NUM_THREADS": "1"}


def living(folder: Path) -> list[int]:
    """Processes that work in `folder`, zombies aside."""
    folder = folder.resolve()
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.readlink(process / "cwd") == str(folder):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def kill(pid: int) -> None:
    """SIGKILL, if it still lives."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end(folder: Path, processes: Sequence[subprocess.Popen]) -> None:
    """Kill what still works in `folder`, and wait for these."""
    for pid in living(folder):
        kill(pid)
    for process in processes:
        process.wait()


def shared_files() -> set[str]:
    """Shared memory in /dev/shm that can be of ranks and that no living process has mapped. Other
    programs make and map such files at the same time, too. Semaphores are not counted: Python
    removes their names as soon as they are made, and a SIGKILL in between leaves 32 bytes."""
    found = {one for one in os.listdir("/dev/shm") if one.startswith(("torch", "psm_"))}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
        except OSError:
            continue
        found -= {one for one in found if f"/dev/shm/{one}" in maps}
    return found


def left_behind(before: set[str], seconds: float = 10) -> list[str]:
    """Files of `shared_files` that came since `before` and that nobody removes: Python's resource
    tracker removes those of a killed process a moment after its end."""
    until = time.monotonic() + seconds
    while (left := shared_files() - before) and time.monotonic() < until:
        time.sleep(0.2)
    return sorted(left)


def checkpoint(folder: Path, iteration: int, name: str = "saved") -> dict[str, bytes]:
    """The files of a checkpoint in `folder`/`name` that hold weights and optimizer states."""
    last = folder / name / f"iter_{iteration:07d}"
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}
