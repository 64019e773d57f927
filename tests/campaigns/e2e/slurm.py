"""A SLURM cluster of two nodes and a login node for tests: Debian's daemons in network namespaces,
gone at the end.

Needs root, and munged, slurmctld, slurmd, srun, unshare, nsenter and ip. Nothing leaves the
namespaces; all files are in the given folder.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare", "nsenter", "ip")
LOGIN = "login"
NODES = ("node1", "node2")
ADDRESSES = {LOGIN: "10.77.0.10", "node1": "10.77.0.1", "node2": "10.77.0.2"}
CONF = """ClusterName=test
SlurmctldHost=login({address})
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SlurmdTimeout=60
UnkillableStepTimeout=30
NodeName=node1 NodeAddr=10.77.0.1 CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
NodeName=node2 NodeAddr=10.77.0.2 CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES State=UP OverSubscribe=FORCE
"""


def missing() -> str | None:
    """What this machine lacks for a cluster; None if it has everything."""
    if os.geteuid():
        return "root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return next((name for name in PROGRAMS if not shutil.which(name, path=path)), None)


class Cluster:
    """A running cluster; `enter` makes a command run on one of its machines."""

    def __init__(self, folder: Path, machines: Mapping[str, int]):
        self.folder = folder
        self.machines = machines
        self.environ = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }

    def enter(self, machine: str) -> list[str]:
        """The words before a command that is to run on `machine`."""
        return ["nsenter", "-t", str(self.machines[machine]), "--net", "--uts", "--mount", "--wd=."]

    def call(self, *command: str, machine: str = LOGIN) -> str:
        """What a short command on `machine` prints."""
        done = subprocess.run(
            [*self.enter(machine), *command],
            env={**os.environ, **self.environ},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        return done.stdout


def _run(*command: str) -> None:
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}")


def _machine(name: str, hosts: Path) -> subprocess.Popen[bytes]:
    """A process that holds a machine's namespaces, of network, host name and mounts."""
    script = (
        f"mount --bind {hosts} /etc/hosts && hostname {name} && ip link set lo up && echo "
        "ready && exec sleep 3600"
    )
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", script],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    if holder.stdout.readline() != b"ready\n":
        holder.kill()
        raise RuntimeError(f"no namespaces for {name}")
    return holder


def _connect(machines: Mapping[str, int]) -> None:
    """A bridge on the login node, to which every node has a cable."""
    login = ["nsenter", "-t", str(machines[LOGIN]), "--net"]
    _run(*login, "ip", "link", "add", "br0", "type", "bridge")
    _run(*login, "ip", "addr", "add", f"{ADDRESSES[LOGIN]}/24", "dev", "br0")
    _run(*login, "ip", "link", "set", "br0", "up")
    for name in NODES:
        node = ["nsenter", "-t", str(machines[name]), "--net"]
        _run(
            *login,
            "ip",
            "link",
            "add",
            f"to-{name}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(machines[name]),
        )
        _run(*login, "ip", "link", "set", f"to-{name}", "master", "br0", "up")
        _run(*node, "ip", "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        _run(*node, "ip", "link", "set", "eth0", "up")


def _start(cluster: Cluster, machine: str, *command: str) -> subprocess.Popen[bytes]:
    log = open(cluster.folder / f"{command[0]}.{machine}.out", "wb")
    with log:
        return subprocess.Popen(
            [*cluster.enter(machine), *command],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **cluster.environ},
            start_new_session=True,
        )


def _prepare(folder: Path) -> Path:
    """Files of the cluster; the table of host names."""
    for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, address=ADDRESSES[LOGIN]))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    hosts = folder / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items())
    )
    return hosts


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster whose nodes are idle; its daemons and jobs are killed at the end."""
    hosts = _prepare(folder)
    holders: list[subprocess.Popen[bytes]] = []
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        machines = {}
        for name in ADDRESSES:
            holders.append(_machine(name, hosts))
            machines[name] = holders[-1].pid
        _connect(machines)
        cluster = Cluster(folder, machines)
        daemons.append(
            _start(
                cluster,
                LOGIN,
                "munged",
                "--foreground",
                "--force",
                f"--key-file={folder}/munge.key",
                f"--socket={folder}/munge/socket",
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log",
                f"--seed-file={folder}/munged.seed",
            )
        )
        wait_until(lambda: (folder / "munge/socket").exists(), folder)
        daemons.append(_start(cluster, LOGIN, "slurmctld", "-D"))
        daemons += [_start(cluster, name, "slurmd", "-D") for name in NODES]
        wait_until(
            lambda: cluster.call("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"],
            folder,
        )
        yield cluster
        cluster.call("scancel", "--user=root")
        wait_until(lambda: not cluster.call("squeue", "-h").strip(), folder)
    finally:
        for daemon in reversed(daemons):
            _stop(daemon)
        for holder in holders:
            _stop(holder, signal.SIGKILL)
            holder.stdout.close()


def wait_until(done, folder: Path, seconds: float = 30.0) -> None:
    """Wait until `done` is true; `folder`: of the cluster."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            said = "".join(
                f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}"
                for file in [*folder.glob("*.out"), *folder.glob("*.log")]
            )
            raise RuntimeError(f"the cluster is not ready\n{said}")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """End a process of ours and what it started, asked first."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_job(cluster: Cluster, job: str, seconds: float = 120.0) -> str:
    """The state in which a batch job ended."""
    states: Sequence[str] = ()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        words = cluster.call("scontrol", "show", "job", job).split()
        states = [word.partition("=")[2] for word in words if word.startswith("JobState=")]
        if states and states[0] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            return states[0]
        time.sleep(0.3)
    raise AssertionError(f"job {job} is still {states}")
