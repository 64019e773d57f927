"""Processors and memory within the limits of control groups (v1, v2, nested) and of SLURM."""

import pytest

from megatron import host
from megatron.checkpoint import safetensors_file
from megatron.parallel import sharding

GIB = 1 << 30
CPU_V1 = {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}
MEMORY_V1 = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB}
MEMORY_V2 = {"memory.max": 4 * GIB, "memory.current": 3 * GIB}
CACHED = {"memory.stat": f"anon 1\ninactive_file {GIB}\n"}
NONE_V2 = {"cpu.max": "max 100000", "memory.max": "max", "memory.current": GIB}
# a quota of 2 processors and 4 GiB, of which 3 are in use, 1 of that by files in the page cache
TREES = {
    "v2, in a container": ("0::/", {"": {"cpu.max": "200000 100000", **MEMORY_V2, **CACHED}}),
    "v2, of the service above": (
        "0::/pods/pod1/run",
        {"pods": {"cpu.max": "200000 100000", **MEMORY_V2, **CACHED}, "pods/pod1/run": NONE_V2},
    ),
    "v2, the smallest of three": (
        "0::/a/b",
        {
            "": {"cpu.max": "800000 100000"},
            "a": {"cpu.max": "200000 100000", **MEMORY_V2, **CACHED},
            "a/b": {"cpu.max": "300000 100000", "memory.max": 9 * GIB, "memory.current": GIB},
        },
    ),
    "v1, in a container that does not see its name": (
        "5:memory:/docker/0a1b\n4:cpu,cpuacct:/docker/0a1b\n1:name=systemd:/",
        {
            "cpu,cpuacct": CPU_V1,
            "memory": {**MEMORY_V1, "memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n"},
        },
    ),
    "v1, nested": (
        "5:memory:/slurm/uid_1/job_2\n4:cpu:/slurm/uid_1/job_2\n0::/",
        {
            "cpu/slurm/uid_1": CPU_V1,
            "cpu/slurm/uid_1/job_2": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
            "memory/slurm/uid_1/job_2": {**MEMORY_V1, **CACHED},
            "memory": {"memory.limit_in_bytes": 1 << 63, "memory.usage_in_bytes": 5 * GIB},
        },
    ),
    "v2 beside v1": (
        "1:name=systemd:/\n0::/",
        {"unified": {"cpu.max": "200000 100000", **MEMORY_V2, **CACHED}},
    ),
    "outside of its namespace": (
        "0::/../../other",
        {"": {"cpu.max": "200000 100000", **MEMORY_V2, **CACHED}},
    ),
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 128 processors and 512 GiB; write(cgroup, folders) gives it control groups."""
    monkeypatch.setattr(host, "processors", lambda: 128)
    sizes = {"SC_PHYS_PAGES": 512 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(host.os, "sysconf", sizes.__getitem__)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 1 kB\nMemAvailable: 419430400 kB\n"
    )  # 400 GiB

    def write(cgroup, folders):
        (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
        for folder, files in folders.items():
            (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (tmp_path / "sys/fs/cgroup" / folder / name).write_text(f"{content}\n")
        return tmp_path

    return write


@pytest.mark.parametrize("cgroup, folders", TREES.values(), ids=TREES)
def test_limits_of_every_level_count(machine, cgroup, folders):
    root = machine(cgroup, folders)
    assert host.cores(root, {}) == 2
    assert host.total_memory(root, {}) == 4 * GIB
    assert host.available_memory(root, {}) == 2 * GIB


@pytest.mark.parametrize("cgroup", ["0::/", "0::/run", "5:memory:/\n4:cpu:/", "12:pids:/", ""])
def test_without_limits_it_is_the_machine(machine, cgroup):
    root = machine("0::/" if not cgroup else cgroup, {"": NONE_V2} if cgroup == "0::/run" else {})
    if not cgroup:
        (root / "proc/self/cgroup").unlink()
    assert host.cores(root, {}) == 128
    assert host.total_memory(root, {}) == 512 * GIB
    assert host.available_memory(root, {}) == 400 * GIB


def test_device_files_say_whether_there_is_a_gpu(tmp_path):
    assert not host.shows_accelerator(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()  # a driver without a card
    assert not host.shows_accelerator(tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    assert host.shows_accelerator(tmp_path)


def test_half_a_processor_is_one(machine):
    assert host.cores(machine("0::/", {"": {"cpu.max": "50000 100000"}}), {}) == 1


@pytest.mark.parametrize(
    "environ, cores, memory",
    [
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_NODE": "65536"}, 16, 64),
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_CPU": "2048"}, 16, 32),
        ({"SLURM_MEM_PER_NODE": "0"}, 128, 512),
        ({"SLURM_CPUS_ON_NODE": "256", "SLURM_MEM_PER_NODE": "all"}, 128, 512),
    ],
)
def test_a_slurm_job_has_its_share(machine, environ, cores, memory):
    root = machine("0::/", {})
    assert (host.cores(root, environ), host.total_memory(root, environ)) == (cores, memory * GIB)


def test_workers_and_threads_take_what_the_quota_gives(machine, monkeypatch):
    """Of checksums, copies and drawn initial values (tokenizing: tests/tools)."""
    root = machine(*TREES["v2, in a container"])
    monkeypatch.setattr(host.cores, "__defaults__", (root, {}))
    assert safetensors_file.thread_count() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert sharding._drawing_threads() == 2
