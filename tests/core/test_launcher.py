"""Ranks and meeting points from each launcher's variables, alone and inside each other, and what is
refused."""

import os

import pytest

from megatron import cluster, launcher
from megatron.config import command_line
from megatron.launcher import LaunchInfo
from tests.problems import assert_problem, raises

# What SLURM sets for a job of four tasks: in the shell of salloc, in the batch script, in the last
# task of a step.
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[01-02]"}
SBATCH = {**SALLOC, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **SALLOC,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1247215617",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {
    "PMI_RANK": "13",
    "PMI_SIZE": "24",
    "PMI_LOCAL_RANK": "1",
    "PALS_RANKID": "13",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "12",
    "PALS_NODEID": "1",
    "PBS_JOBID": "5.pbs",
    "PALS_APID": "6fd",
}
# Open MPI's process on another node of a SLURM job: its daemon there is a task of an srun step.
OMPI_REMOTE = {
    **OMPI,
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    **SALLOC,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "n02",
}


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, LaunchInfo(0, 1, 0, 1, None)),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, LaunchInfo()),
        ({"WORLD_SIZE": "1"}, LaunchInfo()),
        (TORCHRUN, LaunchInfo(3, 4, 1, 2, "1")),
        (SRUN, LaunchInfo(3, 4, 1, 2, "1")),
        # a step that is smaller than the job
        ({**SRUN, "SLURM_NTASKS": "8"}, LaunchInfo(3, 4, 1, 2, "1")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x1),3"}, LaunchInfo(3, 4, 1, 3, "1")),
        (SALLOC, LaunchInfo()),
        (SBATCH, LaunchInfo()),
        (OMPI, LaunchInfo(1, 2, 1, 2, None)),
        (HYDRA, LaunchInfo(1, 2, 1, 2, None)),
        (PALS, LaunchInfo(13, 24, 1, 12, "1")),
        # srun --mpi=pmi2
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, LaunchInfo(3, 4, 1, 2, "1")),
        # srun --mpi=pmix
        ({**SRUN, "PMIX_RANK": "3"}, LaunchInfo(3, 4, 1, 2, "1")),
        # mpirun in a batch script
        ({**SBATCH, **OMPI}, LaunchInfo(1, 2, 1, 2, None)),
        (OMPI_REMOTE, LaunchInfo(1, 2, 0, 1, None)),
        # torchrun in one
        ({**SBATCH, **TORCHRUN}, LaunchInfo(3, 4, 1, 2, "1")),
        (
            {**SRUN, **TORCHRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            LaunchInfo(3, 4, 1, 2, "1"),
        ),
        ({**TORCHRUN, "PALS_RANKID": "1"}, LaunchInfo(3, 4, 1, 2, "1")),
        # what a batch script exports for srun
        ({**SRUN, "WORLD_SIZE": "4"}, LaunchInfo(3, 4, 1, 2, "1")),
        ({**SRUN, "WORLD_SIZE": "4", "RANK": "3"}, LaunchInfo(3, 4, 1, 2, "1")),
        (
            {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "WORLD_SIZE": "4"},
            LaunchInfo(3, 4, 1, None, None),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, LaunchInfo(1, 2, None, None, None)),
    ],
)
def test_place_of_a_process(environ, expected, monkeypatch):
    """The launcher closest to the process counts; one that no launcher started is alone, in an
    allocation too."""
    assert launcher.read(environ) == (expected, [])
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI", "OMPI_", "PALS_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (launcher.rank(), launcher.world_size(), launcher.info()) == (
        expected.rank,
        expected.world_size,
        expected,
    )
    line = command_line.read(
        "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 8 --num-attention-heads 1 "
        "--seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1 "
        "--tokenizer-type NullTokenizer".split(),
        os.environ,
    )
    assert (line.rank, line.world_size) == (expected.rank, expected.world_size)


@pytest.mark.parametrize(
    "environ, code, named",
    [
        # which of them?
        ({"WORLD_SIZE": "2"}, "launcher-variables-incomplete", ["WORLD_SIZE=2", "RANK"]),
        ({"PMI_SIZE": "2"}, "launcher-variables-incomplete", ["PMI_SIZE=2", "RANK"]),
        ({"RANK": "0"}, "launcher-variables-incomplete", ["RANK=0", "WORLD_SIZE"]),
        ({"PMIX_RANK": "1"}, "launcher-variables-incomplete", ["PMIX_RANK=1", "WORLD_SIZE"]),
        ({"PALS_RANKID": "1"}, "launcher-variables-incomplete", ["PALS_RANKID=1", "WORLD_SIZE"]),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "launcher-variables-contradict",
            ["RANK=2", "WORLD_SIZE=2"],
        ),
        (
            {**OMPI, "OMPI_COMM_WORLD_SIZE": "two"},
            "launcher-variable-malformed",
            ["OMPI_COMM_WORLD_SIZE=two"],
        ),
        (
            {**SRUN, "WORLD_SIZE": "8"},
            "launcher-variables-contradict",
            ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"],
        ),
        ({**SRUN, "RANK": "0"}, "launcher-variables-contradict", ["RANK=0", "SLURM_PROCID=3"]),
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},
            "launcher-variables-contradict",
            ["WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=4"],
        ),
        (
            {**OMPI, "RANK": "0", "WORLD_SIZE": "1"},
            "launcher-variables-contradict",
            ["WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=2"],
        ),
    ],
)
def test_never_several_runs_of_one_rank(environ, code, named):
    """Where tasks were started together and the ranks are not known: one error that names the
    variables."""
    found, problems = launcher.read(environ)
    assert found == LaunchInfo() and len(problems) == 1
    assert_problem(problems[0], code, *named)


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({**TORCHRUN, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ("a", 1)),
        ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ("a", 1)),
        # not the login node, 10.0.0.99
        ({**SRUN, "MASTER_PORT": "1"}, ("n01", 1)),
        (
            {
                **SRUN,
                "SLURM_STEP_NODELIST": "n02",
                "SLURM_STEP_TASKS_PER_NODE": "4",
                "SLURM_NODEID": "0",
                "MASTER_PORT": "1",
            },
            ("127.0.0.1", 1),
        ),
        # the job's first node, not its daemon's
        ({**OMPI_REMOTE, "MASTER_PORT": "1"}, ("n01", 1)),
        ({**OMPI, "MASTER_PORT": "1"}, ("127.0.0.1", 1)),
        ({**HYDRA, "MASTER_PORT": "1"}, ("127.0.0.1", 1)),
        ({**PALS, "MASTER_ADDR": "x1", "MASTER_PORT": "1"}, ("x1", 1)),
    ],
)
def test_where_the_ranks_meet(environ, expected):
    assert cluster.rendezvous(environ) == expected


@pytest.mark.parametrize(
    "environ, missing",
    [
        (PALS, "MASTER_ADDR"),
        (HYDRA, "MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_no_meeting_point(environ, missing):
    with raises(ValueError, "rendezvous-address-missing", missing):
        cluster.rendezvous(environ)


def test_ports_differ_between_starts_and_agree_within_one():
    """Two runs on a host do not collide: jobs, steps of a job, and mpiruns in a job."""
    first = [cluster.rendezvous({**SRUN, "SLURM_PROCID": str(rank)})[1] for rank in range(4)]
    assert len(set(first)) == 1 and 20000 <= first[0] < 32000
    others = [
        {**SRUN, "SLURM_STEP_ID": "1"},
        {**SRUN, "SLURM_JOB_ID": "8"},
        {**SRUN, **OMPI},
        {**SRUN, **OMPI, "PMIX_NAMESPACE": "1247215618"},
    ]
    assert len({first[0], *(cluster.rendezvous(environ)[1] for environ in others)}) == 5


@pytest.mark.parametrize(
    "port, bad",
    [("0", True), ("65536", True), ("x", True), ("-1", True), ("29500", False), ("", False)],
)
def test_a_port_that_cannot_be(port, bad):
    """0 would be another port on every rank: all would wait for each other."""
    assert bool(launcher.rendezvous_problems({**TORCHRUN, "MASTER_PORT": port})) is bad
    # one process meets nobody
    assert launcher.rendezvous_problems({"MASTER_PORT": port}) == []


@pytest.mark.parametrize(
    "text, first",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3]", "n1"),
        ("n[007-009,12]", "n007"),
        ("n[3,5]", "n3"),
        ("a[1-2],b7", "a1"),
        ("r[2-3]c[04-05]", "r2c04"),
        ("x-1.cluster[5]-ib,y", "x-1.cluster5-ib"),
    ],
)
def test_first_of_a_nodelist(text, first):
    """As `scontrol show hostnames` expands it."""
    assert cluster.first_of_nodelist(text) == first


def folders_of(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_the_last_rank_removes_the_log_folder_that_torchrun_made(tmp_path, monkeypatch):
    """In the order of torchrun: it makes the folders of all ranks before it starts one."""
    run = tmp_path / "torchelastic_a/b/attempt_0"
    for rank in (0, 1):
        (run / str(rank)).mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(run / "1/error.json"))
    launcher.remove_log_folder()
    assert folders_of(run) == ["0"]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(run / "0/error.json"))
    launcher.remove_log_folder()
    assert tmp_path.is_dir() and not folders_of(tmp_path)
    launcher.remove_log_folder()


@pytest.mark.parametrize(
    "name, more",
    [
        ("torchelastic_a/b/attempt_0/0/stdout.log", {}),
        ("logs/b/attempt_0/0/", {}),
        ("torchelastic_a/b/attempt_0/0/", {"TORCHELASTIC_MAX_RESTARTS": "1"}),
    ],
)
def test_a_log_folder_stays(name, more, tmp_path, monkeypatch):
    """With logs, named by the user, and as long as torchrun may start the ranks again."""
    folder = (tmp_path / name).parent if name.endswith("log") else tmp_path / name
    folder.mkdir(parents=True)
    if name.endswith("log"):
        (tmp_path / name).touch()
    before = folders_of(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    for variable, value in more.items():
        monkeypatch.setenv(variable, value)
    launcher.remove_log_folder()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    launcher.remove_log_folder()
    assert folders_of(tmp_path) == before
