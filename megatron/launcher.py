"""What the launcher gave this process: rank, world size, local rank, node.

Launchers: torchrun, Open MPI's mpirun, mpiexec of MPICH, Intel MPI and PALS, and srun. No other
file but cluster.py reads their variables. Nothing here needs torch or opens a connection.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

Environ = Mapping[str, str]


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher; of several spellings the first that is set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()


# Innermost first: torchrun runs inside mpiexec or srun, and mpirun inside a batch script or, on
# other nodes, inside an srun of its own. srun counts with the size of its step only: an
# allocation's shell and batch script have SLURM_NTASKS and SLURM_PROCID too, and are one process.
LAUNCHERS = (
    _Launcher(
        "torchrun",
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        ("GROUP_RANK",),
    ),
    _Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "mpiexec",
        ("PMI_RANK", "PALS_RANKID", "PMIX_RANK"),
        ("PMI_SIZE",),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        ("PALS_NODEID",),
    ),
    _Launcher(
        "srun",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        (),
        ("SLURM_NODEID",),
    ),
)


@dataclass(frozen=True)
class LaunchInfo:
    """One process among those of its launcher.

    `local_rank`, `local_world_size` (ranks of this node) and `node` (the launcher's number of this
    node) are None where the launcher does not give them.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    node: str | None = None


@dataclass(frozen=True)
class _Setting:
    """The variables of one launcher that are set, as (name, text)."""

    launcher: _Launcher
    rank: tuple[str, str] | None
    world_size: tuple[str, str] | None


@dataclass(frozen=True)
class _CompleteSetting(_Setting):
    """Rank and world size are both set."""

    rank: tuple[str, str]
    world_size: tuple[str, str]


def read(environ: Environ) -> tuple[LaunchInfo, list[str]]:
    """This process's rank and world size, and problems of the variables (then it is a single
    process)."""
    settings = [setting(launcher, environ) for launcher in LAUNCHERS]
    settings = [variables for variables in settings if variables.rank or variables.world_size]
    values = [
        pair for variables in settings for pair in (variables.rank, variables.world_size) if pair
    ]
    problems = [
        f"{name}={text} in the environment: not a whole number; unset it, or use a launcher "
        "[launcher-variable-malformed]"
        for name, text in values
        if not text.isdecimal()
    ]
    if problems or not settings:
        return LaunchInfo(), problems
    complete = [variables for variables in settings if isinstance(variables, _CompleteSetting)]
    problems = _doubts(settings, complete)
    usable = complete or settings
    rank = next((variables.rank for variables in usable if variables.rank), None)
    size = next((variables.world_size for variables in usable if variables.world_size), None)
    if problems or not rank or not size:
        return LaunchInfo(), problems
    if int(rank[1]) >= int(size[1]):
        return LaunchInfo(), [
            f"{_text(rank)} in the environment: must be less than {_text(size)}; unset both, "
            "or use a launcher [launcher-variables-contradict]"
        ]
    return _launch_info(int(rank[1]), int(size[1]), settings, environ), []


def setting(launcher: _Launcher, environ: Environ) -> _Setting:
    """The variables of a launcher that are set."""
    rank, size = (_first(names, environ) for names in (launcher.rank, launcher.world_size))
    if launcher.name == "srun" and not size:
        rank = None
    return (
        _CompleteSetting(launcher, rank, size) if rank and size else _Setting(launcher, rank, size)
    )


def _first(names: tuple[str, ...], environ: Environ) -> tuple[str, str] | None:
    return next(((name, environ[name]) for name in names if environ.get(name)), None)


def _text(pair: tuple[str, str]) -> str:
    return "=".join(pair)


def _doubts(settings: list[_Setting], complete: list[_CompleteSetting]) -> list[str]:
    """Why the variables do not give rank and world size, or contradict each other."""
    ranks = [variables.rank for variables in settings if variables.rank]
    sizes = [variables.world_size for variables in settings if variables.world_size]
    if not ranks:
        return (
            [
                f"{_text(sizes[0])} in the environment, but nothing gives this process's rank: "
                f"start with torchrun, srun or mpiexec, or set RANK; unset {sizes[0][0]} for a "
                "single process [launcher-variables-incomplete]"
            ]
            if int(sizes[0][1]) > 1
            else []
        )
    if not sizes:
        return [
            f"{_text(ranks[0])} in the environment, but nothing gives the number of ranks: set "
            f"WORLD_SIZE, or unset {ranks[0][0]} for a single process "
            "[launcher-variables-incomplete]"
        ]
    if not complete:
        return []
    rank = complete[0].rank
    size = complete[0].world_size
    for variables in settings:
        partial = settings.index(variables) < settings.index(complete[0])
        if partial and variables.rank and int(variables.rank[1]) != int(rank[1]):
            return [
                f"{_text(variables.rank)} contradicts {_text(rank)} ({complete[0].launcher.name}); "
                f"unset {variables.rank[0]} [launcher-variables-contradict]"
            ]
        if partial and variables.world_size and int(variables.world_size[1]) != int(size[1]):
            return [
                f"{_text(variables.world_size)} contradicts {_text(size)} "
                f"({complete[0].launcher.name}); unset {variables.world_size[0]} "
                "[launcher-variables-contradict]"
            ]
        if isinstance(variables, _CompleteSetting) and int(size[1]) == 1 < int(
            variables.world_size[1]
        ):
            return [
                f"{_text(size)} ({complete[0].launcher.name}) inside {_text(variables.world_size)} "
                f"({variables.launcher.name}): every process would be a run of one rank; use one "
                "launcher for all ranks (unset the variables of the other) "
                "[launcher-variables-contradict]"
            ]
    return []


def _launch_info(rank: int, size: int, settings: list[_Setting], environ: Environ) -> LaunchInfo:
    """The rest, from the launcher that gave the rank or another one that counts the ranks alike."""
    same = [
        variables.launcher
        for variables in settings
        if not isinstance(variables, _CompleteSetting)
        or (int(variables.rank[1]), int(variables.world_size[1])) == (rank, size)
    ]
    local_rank = _number(same, "local_rank", environ)
    local_size = _number(same, "local_world_size", environ)
    if local_size is None and any(launcher.name == "srun" for launcher in same):
        local_size = _tasks_of_node(environ)
    if size == 1:
        local_rank = local_rank or 0
        local_size = 1
    nodes = [_first(launcher.node, environ) for launcher in same]
    node = next((pair[1] for pair in nodes if pair), None)
    return LaunchInfo(rank, size, local_rank, local_size, node)


def _number(launchers: list[_Launcher], field: str, environ: Environ) -> int | None:
    values = (_first(getattr(launcher, field), environ) for launcher in launchers)
    return next((int(pair[1]) for pair in values if pair and pair[1].isdecimal()), None)


def _tasks_of_node(environ: Environ) -> int | None:
    """Tasks of an srun step on this node, from SLURM_STEP_TASKS_PER_NODE, such as 2(x3),1."""
    counts = []
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def slurm_share(environ: Environ) -> tuple[int | None, int | None]:
    """(processors, bytes of memory) that a SLURM job has on this node; None where it does not say,
    or has the whole node (SLURM's 0)."""
    names = ("SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU")
    texts = (environ.get(name, "") for name in names)
    cpus, memory, each = (int(text) if text.isdecimal() else 0 for text in texts)
    memory = memory or cpus * each  # MB, which are 2^20 bytes there
    return cpus or None, memory << 20 or None


def info() -> LaunchInfo:
    """The place of this process; where the variables are wrong, that of a single process."""
    return read(os.environ)[0]


def rank() -> int:
    """Global rank of this process; 0 without a launcher."""
    return info().rank


def world_size() -> int:
    """Number of processes of this run; 1 without a launcher."""
    return info().world_size


def under_torchrun() -> bool:
    """Whether torchrun watches this process and ends the others of its node when it fails."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def attempt(environ: Environ = os.environ) -> int:
    """How often torchrun has restarted the ranks (--max-restarts); 0 without it."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def error_file(environ: Environ = os.environ) -> Path | None:
    """Where torchrun reads why a process failed; it shows the last attempt's only."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    last = attempt(environ) == int(environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    return Path(path) if path and last else None


def remove_log_folder() -> None:
    """Remove this rank's log folder of torchrun, which torchrun makes in the temporary directory
    and leaves there, with those around it that are then empty. A folder with logs or an error, or
    named by --log-dir, stays, and all do before the last attempt."""
    file = error_file()
    around = file.parents[:4] if file else []  # of the rank, attempt, run and torchrun process
    if around and around[-1].name.startswith("torchelastic_"):
        with suppress(OSError):  # not empty: the last rank removes it
            for folder in around:
                folder.rmdir()


def rendezvous_problems(environ: Environ) -> list[str]:
    """What is wrong with MASTER_PORT where there are several ranks."""
    port = environ.get("MASTER_PORT")
    if not port or read(environ)[0].world_size == 1:
        return []
    if port.isdecimal() and 0 < int(port) < 65536:
        return []
    return [
        f"MASTER_PORT={port} in the environment: must be a port that is free on rank 0's node, 1 "
        "to 65535 (with torchrun on one node: --standalone chooses one) "
        "[launcher-variable-malformed]"
    ]
