"""What a launcher says beyond the place of a process: where the ranks of a run meet, the task of an
array, what restarts the ranks."""

import os
import re
import socket
import zlib

from megatron import launcher
from megatron.launcher import Environ, LaunchInfo

_FIRST_PORT = 20_000  # below the ports that Linux gives to outgoing connections
_PORTS = 12_000
# Alike for all ranks of one start, different between starts: the port is derived from it.
_JOB = ("PMIX_NAMESPACE", "PALS_APID", "PBS_JOBID", "SLURM_JOB_ID")
# ... and of the attempts of one torchrun
_RUN = (
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *_JOB,
)


def rendezvous(environ: Environ) -> tuple[str, int]:
    """(address of rank 0's node, port there), at which the ranks of this run meet.

    MASTER_ADDR and MASTER_PORT count where they are set. Otherwise the address is this machine's
    own where all ranks are on it, and in a SLURM job the first node's, never that of the host on
    which srun was typed; the port is derived from the job's number. Raises ValueError where nothing
    gives them.
    """
    launch = launcher.read(environ)[0]
    address = environ.get("MASTER_ADDR") or _first_host(environ, launch)
    port = environ.get("MASTER_PORT") or _job_port(environ)
    if address and port:
        return address, int(port)
    values = {"MASTER_ADDR": address, "MASTER_PORT": port}
    missing = [name for name, value in values.items() if not value]
    raise ValueError(
        f"{' and '.join(missing)} not set: {launch.world_size} ranks need the address of rank 0's "
        f"node and a free port there; export {'them' if len(missing) > 1 else 'it'} before the "
        "launcher, or start with torchrun [rendezvous-address-missing]"
    )


def _first_host(environ: Environ, launch: LaunchInfo) -> str | None:
    if launch.local_world_size == launch.world_size:
        return "127.0.0.1"
    nodes = environ.get("SLURM_STEP_NODELIST" if _by_srun(environ) else "SLURM_JOB_NODELIST")
    return first_of_nodelist(nodes) if nodes else None


def _by_srun(environ: Environ) -> bool:
    """Whether srun started the ranks, and not an MPI launcher inside a SLURM job."""
    *launchers, own = (launcher.setting(each, environ) for each in launcher.LAUNCHERS[1:])
    if own.rank is None:
        return False
    return all(not variables.rank or variables.rank[1] == own.rank[1] for variables in launchers)


def _job_port(environ: Environ) -> str | None:
    name = next((name for name in _JOB if environ.get(name)), None)
    if name is None:
        return None
    step = environ.get("SLURM_STEP_ID", "") if name == "SLURM_JOB_ID" and _by_srun(environ) else ""
    return str(_FIRST_PORT + zlib.crc32(f"{environ[name]}.{step}".encode()) % _PORTS)


def first_of_nodelist(text: str) -> str:
    """`node07` of SLURM's `node[07-09,12],login1`."""
    name = re.split(r"[,\[]", text, maxsplit=1)[0]
    suffix = text[len(name) :]
    while suffix.startswith("["):
        inside, _, suffix = suffix[1:].partition("]")
        tail = re.split(r"[,\[]", suffix, maxsplit=1)[0]
        name += re.split("[-,]", inside, maxsplit=1)[0] + tail
        suffix = suffix[len(tail) :]
    return name


def agent_has_store() -> bool:
    """Whether torchrun serves the key-value store at MASTER_ADDR and MASTER_PORT; else rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def array_task(environ: Environ) -> tuple[int, int]:
    """(number from 0, how many) of the task of a SLURM array that this process is.

    Raises ValueError where the variables are missing, or are of an array whose numbers do not rise
    by equal steps.
    """
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT")]
    texts = [environ.get(name, "") for name in names]
    if not all(text.isdecimal() for text in texts[:3]):
        raise ValueError(
            f"{', '.join(names[:3])} in the environment: not numbers, so this is no task of a "
            "SLURM array; start with sbatch --array=0-N [launcher-variables-incomplete]"
        )
    number, low, high, step = (int(text or 1) for text in texts[:4])
    index, remainder = divmod(number - low, max(step, 1))
    count = (high - low) // max(step, 1) + 1
    if remainder or not 0 <= index < count or texts[4] not in ("", str(count)):
        numbers = " ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
        raise ValueError(
            f"{numbers} in the environment: the numbers of the array do not rise by equal steps; "
            "give --task I/N with the task's own I and N [launcher-variables-contradict]"
        )
    return index, count


def starter() -> str:
    """What restarts the ranks automatically: torchrun's process on this node, or the SLURM job;
    empty without one."""
    if launcher.under_torchrun():
        agent = os.getppid()
        return f"torchrun {agent} on {socket.gethostname()}"
    job = os.environ.get("SLURM_JOB_ID")
    return f"SLURM job {job}" if job and os.environ.get("SLURM_RESTART_COUNT") else ""


def rank_in_same_run(environ: Environ) -> int | None:
    """The rank of a process with these variables, if it belongs to the run and the attempt of this
    process; else None."""
    launched = launcher.read(environ)[0]
    same = all(environ.get(name) == os.environ.get(name) for name in _RUN)
    return launched.rank if same and launched.world_size == launcher.world_size() > 1 else None
