"""Runs started by the launchers themselves: SLURM's srun and sbatch, Open MPI's mpirun, MPICH's
mpiexec, torchrun in srun.

SLURM is a cluster of this test's own: two nodes and a login node in network namespaces
(tests/campaigns/e2e/slurm.py).
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.checkpoint import reading
from tests.campaigns.e2e import slurm
from tests.campaigns.e2e.launched import argv, rows
from tests.campaigns.e2e.programs import SCRIPT, Program, free_port, left_in, spawn_program
from tests.runs import EXACT

pytestmark = pytest.mark.campaign

MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
# the only network that the namespaces have
NODES_ONLY = ["--mca", "oob_tcp_if_include", "eth0"]
TORCHRUN = (
    "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d "
    "--rdzv-endpoint node1:29400"
).split()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[slurm.Cluster]:
    if missing := slurm.missing():
        pytest.skip(f"needs SLURM installed: no {missing}")
    with slurm.running(tmp_path_factory.mktemp("slurm") / "c") as found:
        yield found


def on_login_node(cluster: slurm.Cluster, folder: Path, *command: str) -> Program:
    """A command that somebody types on the login node, in `folder`."""
    return spawn_program(command, folder, cluster.environ, program=cluster.enter(slurm.LOGIN))


def batch(cluster: slurm.Cluster, folder: Path, command: list[str], *options: str) -> str:
    """The number of a batch job that runs `command` in `folder`; its output goes to log.0 and err.0
    there."""
    script = folder / "job.sh"
    script.write_text("#!/bin/sh\nexport OMP_NUM_THREADS=1\n" + " ".join(command) + "\n")
    said = cluster.call(
        "sbatch",
        f"--chdir={folder}",
        f"--output={folder}/log.0",
        f"--error={folder}/err.0",
        *options,
        str(script),
    )
    return said.split()[-1]


def wait_for(folder: Path, text: str, seconds: float = 60.0) -> None:
    """Wait until a job has printed `text`."""
    deadline = time.monotonic() + seconds
    while text not in (folder / "log.0").read_text() if (folder / "log.0").exists() else True:
        said = (folder / "err.0").read_text() if (folder / "err.0").exists() else "nothing"
        assert time.monotonic() < deadline, f"{text!r} was not printed: {said}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(["-N1", "-n2"], id="one node", marks=pytest.mark.sweep),
        pytest.param(["-N2", "-n2"], id="two nodes"),
    ],
)
def test_srun_from_a_login_node(cluster, folder, two_ranks, nodes):
    """The ranks meet on rank 0's node: what the login node's address leads to, no rank listens
    on."""
    program = on_login_node(cluster, folder, "srun", *nodes, sys.executable, SCRIPT, *argv())
    assert program.end(120) == 0, program.err
    assert rows(folder) == two_ranks.series(*EXACT) and not left_in(folder)


@pytest.mark.parametrize(
    "launcher, options",
    [
        (["srun", sys.executable], ["-N2", "-n2"]),
        pytest.param([*MPIRUN, "-n", "2", sys.executable], ["-N1", "-n2"], marks=pytest.mark.sweep),
        ([*MPIRUN, *NODES_ONLY, "-n", "2", "--map-by", "node", sys.executable], ["-N2", "-n2"]),
    ],
    ids=["srun", "mpirun", "mpirun on two nodes"],
)
def test_batch_job(cluster, folder, two_ranks, launcher, options):
    if "mpirun" in launcher[0] and not shutil.which(launcher[0]):
        pytest.skip("needs Open MPI installed")
    job = batch(cluster, folder, [*launcher, SCRIPT, *argv()], *options)
    assert slurm.wait_for_job(cluster, job) == "COMPLETED", (folder / "err.0").read_text()
    assert rows(folder) == two_ranks.series(*EXACT) and not left_in(folder)


def test_torchrun_in_srun(cluster, folder, two_ranks):
    """One torchrun on each node."""
    program = on_login_node(
        cluster, folder, "srun", "-N2", "-n2", sys.executable, *TORCHRUN, SCRIPT, *argv()
    )
    assert program.end(150) == 0, program.err
    assert rows(folder) == two_ranks.series(*EXACT) and not left_in(folder)


@pytest.mark.parametrize(
    "how, state", [([], "CANCELLED"), (["--signal=USR1"], "COMPLETED")], ids=["scancel", "USR1"]
)
def test_a_request_of_the_scheduler(cluster, folder, how, state):
    """scancel, and what sbatch --signal sends before the time limit: every rank saves and
    leaves."""
    words = argv(
        100000, "--exit-signal-handler", "--save-interval", "1000000", "--log-interval", "1"
    )
    job = batch(cluster, folder, ["srun", sys.executable, SCRIPT, *words], "-N2", "-n2")
    wait_for(folder, " iter     10/")
    cluster.call("scancel", *how, job)
    assert slurm.wait_for_job(cluster, job) == state
    assert (
        f" stopped after receiving SIG{'USR1' if how else 'TERM'} |"
        in (folder / "log.0").read_text()
    )
    assert reading.latest(folder / "save") >= 10 and not left_in(folder)


def test_a_killed_rank(cluster, folder):
    """The others end by themselves; srun exits with an error, and the one line says which rank it
    was."""
    words = argv(100000, "--save-interval", "1000000", "--log-interval", "1")
    program = on_login_node(cluster, folder, "srun", "-N2", "-n2", sys.executable, SCRIPT, *words)
    program.wait_for(" iter     10/")
    victim = next(
        pid
        for pid in left_in(folder)
        if b"SLURM_PROCID=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        and b"pretrain_gpt" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(victim, signal.SIGKILL)
    assert (
        program.end(20) != 0
        and f"rank 1 (process {victim} on node2)" in program.err
        and not left_in(folder)
    )


@pytest.mark.parametrize(
    "launcher, name, environ",
    [
        ([*MPIRUN, "-n", "2"], "Open MPI", {}),
        (["mpiexec.hydra", "-n", "2"], "MPICH", {"MASTER_PORT": "free"}),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_mpi_on_one_machine(folder, two_ranks, launcher, name, environ):
    if not shutil.which(launcher[0]):
        pytest.skip(f"needs {name} installed")
    environ = {key: str(free_port()) for key in environ}
    program = spawn_program(
        [*launcher, sys.executable, SCRIPT, *argv()], folder, environ, program=()
    )
    assert program.end(120) == 0, program.err
    assert rows(folder) == two_ranks.series(*EXACT) and not left_in(folder)
