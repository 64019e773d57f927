"""examples/parallel as it stands, on a small model: one machine of 4, two machines of 2, SLURM;
every way the same bytes.

Two machines are two network namespaces with an address each, so that nothing of the one is reached
over the other's loopback; where the system makes none, two loopback addresses.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.e2e.programs import Program, free_port, spawn_program
from tests.forkrun import ROOT
from tests.runs import (
    EXACT,
    NO_DROPOUT,
    SMALL,
    Finished,
    same_tensors,
    train,
    with_flags,
    write_text,
)

SCRIPTS = ROOT / "examples/parallel"
LAYOUT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer"
)
FLAGS = with_flags(
    [*SMALL, *NO_DROPOUT],
    "--train-iters",
    "6",
    "--save-interval",
    "3",
    "--eval-interval",
    "3",
    "--eval-iters",
    "1",
    "--min-lr",
    "0.0006",
    "--adam-beta2",
    "0.95",
    "--weight-decay",
    "0.1",
    "--lr-warmup-iters",
    "2",
    "--split",
    "95,5,0",
    "--position-embedding-type",
    "rope",
    "--normalization",
    "RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "data").mkdir()
    write_text(folder / "data/shakespeare_text_document", 400)
    for name in ("vocab.json", "merges.txt"):
        # named by the scripts; the NullTokenizer reads none
        (folder / "data" / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def straight(folder) -> Finished:
    """The run in one go, on forked ranks."""
    run = folder / "straight"
    data = [
        "--data-path",
        str(folder / "data/shakespeare_text_document"),
        "--save",
        str(run / "save"),
    ]
    return train(run, [*FLAGS, *LAYOUT.split(), *data], 4)


def start(
    folder: Path,
    out: str,
    script: str,
    *words: str,
    prefix: tuple[str, ...] = (),
    part: str = "0",
    **environ: str,
) -> Program:
    """A script of the folder, in the small."""
    run = folder / f"{out}-log-{part}"
    changes = {
        "PYTHON": sys.executable,
        "DATA": str(folder / "data"),
        "OUT": str(folder / out),
        "NPROC": "2",
        **environ,
    }
    command = [*prefix, "sh", str(SCRIPTS / script), *words, *FLAGS]
    return spawn_program(command, run, changes, cwd=ROOT, program=())


def finished(programs: list[Program], seconds: float = 200.0) -> None:
    for program in programs:
        assert program.end(seconds) == 0, program.err[-3000:]


def assert_same(folder: Path, out: str, straight: Finished) -> None:
    done = Finished.__new__(Finished)
    done.folder = folder / out
    done.save = folder / out / "checkpoints"
    assert done.series(*EXACT) == straight.series(*EXACT) and len(done.rows) == 6
    same_tensors(done.tensors(), straight.tensors())


@pytest.mark.campaign
def test_one_node(folder, straight, warm_python):
    program = start(folder, "one", "one_node.sh", NPROC="4", PYTHON=warm_python)
    finished([program])
    assert " layout        4 ranks = " in program.out
    assert_same(folder, "one", straight)


# --- two machines


def ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture
def machines() -> Iterator[list[tuple[tuple[str, ...], str]]]:
    """Of two machines: the words before a command there, and its address."""
    names = [f"gpt{os.getpid()}{side}" for side in "ab"]
    addresses = ["10.213.7.1", "10.213.7.2"]
    links = [f"v{name}"[-15:] for name in names]
    made = all(
        ip("netns", "add", name) and ip("-n", name, "link", "set", "lo", "up") for name in names
    )
    veth = ["type", "veth", "peer", "name", links[1], "netns", names[1]]
    made = made and ip("link", "add", links[0], "netns", names[0], *veth)
    for name, link, address in zip(names, links, addresses, strict=True):
        made = made and ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
        made = made and ip("-n", name, "link", "set", link, "up")
    yield (
        [
            (("ip", "netns", "exec", name), address)
            for name, address in zip(names, addresses, strict=True)
        ]
        if made
        else [((), "127.0.0.2"), ((), "127.0.0.3")]
    )
    for name in names:
        ip("netns", "del", name)


def on_both(folder: Path, out: str, machines) -> list[Program]:
    port = str(free_port())
    return [
        start(
            folder,
            out,
            "two_nodes.sh",
            str(node),
            machines[0][1],
            prefix=prefix,
            part=str(node),
            MASTER_PORT=port,
        )
        for node, (prefix, _) in enumerate(machines)
    ]


@pytest.mark.campaign
def test_two_nodes(folder, straight, machines):
    """Two ranks each, which share data, index cache, checkpoints and metrics file: the run of one
    machine."""
    finished(on_both(folder, "two", machines))
    files = sorted((folder / "two/checkpoints/iter_0000003").glob("weights_*"))
    assert [path.name for path in files] == [f"weights_{rank:05d}.safetensors" for rank in range(4)]
    assert_same(folder, "two", straight)


# --- SLURM


SRUN = '''#!{python}
"""As srun, on this machine: its variables, one process a task; the first code that is not 0."""
import os, subprocess, sys

words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks, nodes = int(os.environ["TASKS"]), int(os.environ["NODES"])
each = tasks // nodes
started = [subprocess.Popen(words, env={{**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % each),
                                        "SLURM_NODEID": str(task // each), "SLURM_STEP_NUM_TASKS": str(tasks),
                                        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"]}})
           for task in range(tasks)]
sys.exit(next((code for code in [process.wait() for process in started] if code), 0))
'''


@pytest.mark.parametrize(
    "script, tasks",
    [
        pytest.param("slurm_srun.sbatch", 4, marks=pytest.mark.sweep),
        pytest.param("slurm_torchrun.sbatch", 2, marks=pytest.mark.sweep),
    ],
)
def test_slurm(folder, straight, tmp_path, script, tasks):
    """The batch scripts with an srun and an scontrol of ours."""
    scontrol = "#!/bin/sh\necho 127.0.0.1\necho other\n"
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", scontrol)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = free_port(range(20_000, 32_000))  # the script's: 20000 + the job's number
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_JOB_NODELIST": "127.0.0.1,other",
        "SLURM_NTASKS": str(tasks),
        "TASKS": str(tasks),
        "NODES": "2",
    }
    finished([start(folder, script, script, **environ)])
    assert_same(folder, script, straight)


STUBS = {
    "srun": """
echo "$*" | grep -o -e "--exclude [^ ]*" >> excluded || echo none >> excluded
while [ "${1#--}" != "$1" ]; do
    case $1 in --kill*) shift ;; *) shift 2 ;; esac
done
exec "$@"
""",
    "scontrol": 'echo "$*" >> scontrol.log\n',
    "scancel": 'echo "$*" >> scancel.log; touch stop\n',
    # a run: the ledger gets the failure of the next host in the file `hosts`, none for `-`
    "python": """
case $1 in tools/*) cd "$REPOSITORY"; exec "$REAL_PYTHON" "$@" ;; esac
host=$(head -n 1 hosts); sed -i 1d hosts
ledger=$OUT/checkpoints/run_events.jsonl
mkdir -p "$OUT/checkpoints"
echo '{"event": "start", "time": 1, "process_start": 1, "iteration": 0, "starter": ""}' >> "$ledger"
[ "$host" != wait ] || { touch running; while [ ! -e stop ]; do sleep 0.02; done; exit 0; }
[ "$host" ] || exit 0
failure='{"event": "failure", "time": 2, "iteration": 1, "rank": 0, "code": 1, "reason": "", "host":'
[ "$host" = - ] || echo "$failure \\"$host\\"}" >> "$ledger"
exit 5
""",
}


@pytest.mark.parametrize(
    "hosts, code, excluded, queued",
    [
        ("a b b c", 0, ["none"] * 3 + ["--exclude b"] * 2, False),
        ("a a b b", 0, ["none"] * 2 + ["--exclude a"] * 2 + ["--exclude a,b"], False),
        ("a - b", 0, ["none"] * 4, False),
        ("- -", 5, ["none"] * 2, False),
        ("a wait", 0, ["none"] * 2, True),
    ],
)
def test_slurm_restart(tmp_path, hosts, code, excluded, queued):
    """With an srun, scontrol, scancel and training of ours: which hosts are excluded, when it ends,
    and that the job is queued again when its time is over."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hosts").write_text("".join(f"{host}\n" for host in hosts.split()))
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    environ = {"SLURM_JOB_ID": "7", "OUT": str(tmp_path / "out"), "REPOSITORY": str(ROOT)}
    environ |= {"REAL_PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = subprocess.Popen(
        ["sh", str(ROOT / "examples/parallel/slurm_restart.sbatch")],
        cwd=tmp_path,
        env={**os.environ, **environ},
    )
    while queued and not (tmp_path / "running").exists():
        time.sleep(0.01)
    if queued:
        script.send_signal(signal.SIGUSR1)
    assert script.wait(60) == code
    assert (tmp_path / "excluded").read_text().splitlines() == excluded
    asked = [tmp_path / name for name in ("scontrol.log", "scancel.log")]
    assert [one.read_text() if one.exists() else None for one in asked] == (
        ["requeue 7\n", "--signal TERM 7\n"] if queued else [None, None]
    )
