"""Every way to start a run: torchrun, torch.distributed.launch, srun's variables, one process;
uninstalled, by path.

Real interpreters where the start itself is the matter (seconds each; most are campaign), forked
ones elsewhere.
"""

import os
import secrets
import signal
import socket
import time
from pathlib import Path

import pytest

from bench.faults import inject
from bench.faults.inject import Fault
from megatron import cluster
from megatron.checkpoint import reading
from megatron.training.launch import rendezvous
from tests.campaigns.e2e.launched import argv, forked, rows
from tests.campaigns.e2e.programs import (
    SCRIPT,
    Program,
    fork_program,
    fork_ranks,
    free_port,
    left_in,
    ranks_of,
    spawn_program,
)
from tests.forkrun import run_ranks
from tests.runs import EXACT, SMALL, Finished, same_tensors

RUN = "-m torch.distributed.run --nproc-per-node 2 --master-port".split()
LAUNCH = (
    "-m torch.distributed.launch --nproc_per_node 2 --nnodes 1 --node_rank 0 --master_addr "
    "localhost --master_port"
)
SAYS = "interrupted: "
OURS = ("megatron/", 'pretrain_gpt.py", line')  # of a traceback's lines


def spawn(folder: Path, launcher: list[str], iterations: int, *extra: str, environ=None) -> Program:
    """In `folder`, the script by its path."""
    words = argv(iterations, *extra)
    return spawn_program([*launcher, SCRIPT, *words], folder, environ, cwd=folder)


@pytest.mark.campaign
def test_torchrun(folder, two_ranks):
    program = spawn(folder, [*RUN, str(free_port())], 4)
    assert program.end(120) == 0, program.err
    assert rows(folder) == two_ranks.series(*EXACT)
    same_tensors(Finished(folder, 1).tensors(), two_ranks.tensors())
    assert not any(
        word in program.err for word in ("Error", "Traceback", "Warning: destroy_process_group")
    )
    assert program.out.count(" training finished ") == 1


@pytest.mark.sweep
def test_torch_distributed_launch(folder, two_ranks):
    """It puts --local-rank=N before the user's flags, and says itself that it is deprecated."""
    program = spawn(folder, [*LAUNCH.split(), str(free_port())], 4)
    assert program.end(120) == 0, program.err
    assert rows(folder) == two_ranks.series(*EXACT)


def tasks(rank: int, world: int, folder: Path, environs: list[dict[str, str]]) -> list:
    os.chdir(folder)
    words = argv(4)
    programs = [
        fork_program(words, folder, str(number), environ) for number, environ in enumerate(environs)
    ]
    return [(p.end(), p.err) for p in programs]


SRUN = [
    {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "not-asked-for",
        "SLURM_STEP_ID": "0",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    }
    for rank in range(2)
]
OMPI = [
    {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    for rank in range(2)
]
HYDRA = [
    {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank)} for rank in range(2)
]


def job_number(variables: dict[str, str], name: str) -> str:
    """A number of a job whose port nobody listens on."""
    while True:
        number = str(secrets.randbelow(10**6))
        try:
            socket.create_server(("", cluster.rendezvous({**variables, name: number})[1])).close()
            return number
        except OSError:
            continue


@pytest.mark.parametrize(
    "ranks, job",
    [
        (SRUN, "SLURM_JOB_ID"),
        pytest.param(OMPI, "PMIX_NAMESPACE", marks=pytest.mark.campaign),
        pytest.param(HYDRA, None, marks=pytest.mark.campaign),
    ],
    ids=["srun", "Open MPI", "MPICH"],
)
def test_ranks_of_a_cluster(folder, two_ranks, ranks, job):
    """The meeting point is given, or made of the job's number; on one node it is this machine."""
    if job:
        common = {job: job_number(ranks[0], job)}
    else:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run_ranks(1, tasks, folder, [{**rank, **common} for rank in ranks]) == [[(0, "")] * 2]
    assert rows(folder) == two_ranks.series(*EXACT)


def impatient() -> None:
    rendezvous.CONNECT_WITHIN = 4.0


def alone(rank: int, world: int, folder: Path, environ: dict[str, str]) -> tuple:
    os.chdir(folder)
    started = time.monotonic()
    program = fork_program(
        argv(), folder, environ={"RANK": "1", "WORLD_SIZE": "2", **environ}, before=impatient
    )
    return program.end(70), program.err, time.monotonic() - started


@pytest.mark.parametrize(
    "environ, code, seconds, named",
    [
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}, 2, 10, ["MASTER_PORT=0"]),
        (
            {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29555"},
            1,
            20,
            ["no-such-host.invalid", "29555"],
        ),
        (
            {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "taken"},
            1,
            20,
            ["MASTER_PORT", "in use"],
        ),
        pytest.param(
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "free"},
            1,
            20,
            ["127.0.0.1", "refused"],
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["port 0", "no such host", "port in use", "nobody answers"],
)
def test_ranks_that_cannot_meet(folder, environ, code, seconds, named):
    """One line that names the address, within the time to connect."""
    with socket.create_server(("", 0)) as other:
        ports = {"taken": str(other.getsockname()[1]), "free": str(free_port())}
        environ = {
            **environ,
            "MASTER_PORT": ports.get(environ["MASTER_PORT"], environ["MASTER_PORT"]),
        }
        [(left, text, took)] = run_ranks(1, alone, folder, environ)
    assert (
        left == code
        and took < seconds
        and text.count("\n") == 1
        and all(word in text for word in named)
    )


BLOCKER = '''"""Only torch, numpy and what they need; anything else is not installed."""
import sys

BLOCKED = {"tensorboard", "safetensors", "tiktoken", "regex", "sentencepiece", "transformers", "tokenizers", "pybind11",
           "megatron.core", "helpers_cpp", "tqdm", "requests", "pytest"}


class Block:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        blocked = name in BLOCKED or name.split(".")[0] in BLOCKED or name.endswith("helpers_cpp")
        return None if blocked else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Block(finder) for finder in sys.meta_path]
'''


def test_mock_data_needs_torch_and_numpy_only(tmp_path):
    """In a new interpreter in which every optional package is missing, from another directory,
    saved and resumed."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(BLOCKER)
    words = [
        SCRIPT,
        *SMALL,
        "--mock-data",
        "--train-iters",
        "4",
        "--save",
        "save",
        "--save-interval",
        "2",
    ]
    program = spawn_program(words, tmp_path / "run", {"PYTHONPATH": str(hook)})
    assert program.end(120) == 0, program.err
    assert reading.latest(tmp_path / "run/save") == 4 and program.err == ""


def ours(text: str) -> list[str]:
    """Lines of tracebacks that point into this project."""
    return [
        line
        for line in text.splitlines()
        if line.lstrip().startswith("File ") and any(o in line for o in OURS)
    ]


@pytest.mark.campaign
@pytest.mark.parametrize("seconds", [0.0, 0.6, 2.5])
def test_ctrl_c_while_it_starts(folder, seconds):
    """While torch is imported, above all: from the script's first line on there is no moment for a
    traceback."""
    program = spawn(folder, [], 100000)
    deadline = time.monotonic() + 30
    while (
        "Threads:\t1\n" in Path(f"/proc/{program.pid}/status").read_text()
        and time.monotonic() < deadline
    ):
        time.sleep(0.002)  # the second thread is the one that listens
    time.sleep(seconds)
    program.interrupt()
    assert program.end(30) == 130
    assert (
        program.err.startswith(SAYS)
        and program.err.count("\n") == 1
        and program.left_behind() == []
    )


def two_ranks_again(rank: int, world: int, folder: Path, extra: list[str]) -> list[int]:
    os.chdir(folder)
    return [program.end() for program in fork_ranks(argv(12, *extra), folder, 2)]


@pytest.mark.campaign
def test_ctrl_c_under_torchrun(folder):
    """The launcher has its own words (and exit code 1); from our ranks comes one line, and nobody
    is left."""
    extra = "--save-interval 4 --num-workers 1 --eval-interval 1 --eval-iters 9".split()
    program = spawn(folder, [*RUN, str(free_port())], 12, *extra)
    program.wait_for(" 6/12", 120)
    program.interrupt()
    program.end(60)
    assert program.err.count(SAYS) == 1 and ours(program.err) == []
    assert not left_in(folder)
    straight = forked(folder, 12, *extra, "--num-workers", "0")
    assert run_ranks(1, two_ranks_again, folder, extra) == [[0, 0]]
    assert rows(folder) == straight.series(*EXACT)
    same_tensors(Finished(folder, 1).tensors(), straight.tensors())


@pytest.mark.campaign
@pytest.mark.parametrize("to_launcher", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_request_under_torchrun(folder, to_launcher):
    """SIGTERM to the launcher, which passes it on, or to one rank: saved and left. Only the second
    way it exits with 0."""
    program = spawn(
        folder,
        [*RUN, str(free_port())],
        100000,
        "--exit-signal-handler",
        "--save-interval",
        "1000000",
    )
    program.wait_for(" iter     10/", 120)
    if to_launcher:
        program.signal(signal.SIGTERM)
    else:
        os.kill(ranks_of(program)[1], signal.SIGTERM)
    assert (program.end(60) == 0) is not to_launcher
    assert " receiving SIGTERM |" in program.out and ours(program.err) == []
    assert reading.latest(folder / "save") >= 10 and not left_in(folder)


FAILING = '''"""pretrain_gpt.py whose last rank cannot go on."""
import os, runpy
from megatron.training import loop

def wrong(*args):
    raise {error}("planted on rank " + os.environ["RANK"])

if os.environ["RANK"] in {ranks}:
    loop.train_step = wrong
runpy.run_path({script!r}, run_name="__main__")
'''


@pytest.mark.campaign
@pytest.mark.parametrize(
    "ranks, error, said",
    [  # torchrun shows it at the end of its report
        pytest.param(
            *("1", "ValueError", "rank 1: error: planted on rank 1"), marks=pytest.mark.sweep
        ),
        ("01", "KeyError", "KeyError: 'planted on rank 0'"),
    ],
)
def test_an_error_under_torchrun_is_said_once(folder, ranks, error, said):
    wrapper = folder / "wrapper.py"
    wrapper.write_text(FAILING.format(error=error, ranks=repr(ranks), script=SCRIPT))
    program = spawn_program(
        [*RUN, str(free_port()), str(wrapper), *argv()],
        folder,
        {"PYTHONPATH": str(Path(SCRIPT).parent)},
    )
    assert program.end(120) == 1
    assert program.err.count("planted on rank 0") + program.err.count(
        "planted on rank 1"
    ) == 1 and not left_in(folder)
    report = program.err.partition("Root Cause (first observed failure):")[2].rstrip("=\n")
    assert report.endswith(said) and f"rank      : {ranks[0]} (local_rank: {ranks[0]})" in report
    assert program.err.count("Traceback (most recent call last):\n    File") == (
        error == "KeyError"
    )


@pytest.mark.campaign
def test_a_rank_killed_under_torchrun(folder):
    """torchrun, its parent, knows the signal; nothing of ours stands below that or beside it."""
    program = spawn(
        folder, [*RUN, str(free_port())], 100000, "--save-interval", "1000000", "--num-workers", "1"
    )
    program.wait_for(" iter     10/", 120)
    victim = ranks_of(program)[0]
    os.kill(victim, signal.SIGKILL)
    assert (
        program.end(15) == 1 and ours(program.err) == [] and "terminated without" not in program.err
    )
    report = program.err.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 0 (local_rank: 0)" in report
    assert report.rstrip("=\n").endswith(f"traceback : Signal 9 (SIGKILL) received by PID {victim}")
    assert program.left_behind(8.0) == []


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["--master-port", "free"], marks=pytest.mark.sweep, id="port"),
        pytest.param(["--standalone"], marks=pytest.mark.campaign, id="standalone"),
        pytest.param(
            "--standalone --nnodes 1:2 --rdzv-conf last_call_timeout=2".split(),
            marks=pytest.mark.sweep,
            id="elastic",
        ),
    ],
)
def test_torchrun_restarts(folder, how, tmp_path_factory):
    """--max-restarts: a rank is killed in each of two attempts, and the third trains to the end
    from the newest checkpoint, with the weights of a run that nobody disturbed.

    The agent's store outlives the attempts, with the addresses of dead processes.
    """
    kills = [("meeting", 0, 1), ("save", 0, 2)]
    inject.write(folder, [Fault("SIGKILL", *kill) for kill in kills])
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        *(str(free_port()) if word == "free" else word for word in how),
        inject.__file__,
        *argv(14),
    ]
    program = spawn_program(words, folder)
    assert program.end(400) == 0, program.err
    assert (
        reading.latest(folder / "save") == 14
        and len(inject.injected(folder)) == len(kills)
        and not left_in(folder)
    )
    undisturbed = forked(tmp_path_factory.mktemp("undisturbed"), 14)
    same_tensors(Finished(folder, 1).tensors(), undisturbed.tensors())
