"""How idle CPU threads wait: spinning where each has a free core, sleeping elsewhere; the
environment wins."""

import subprocess
import sys
import time

import pytest

from megatron import host, threads
from megatron.threads import Usage


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(host, "cores", lambda: 4)
    monkeypatch.setattr(host, "processors", lambda: 4)
    monkeypatch.setattr(threads, "usage", lambda: Usage(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    "environ, spins",
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "4"}, True),
        ({"OMP_NUM_THREADS": "5"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, False),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "2",
            },
            True,
        ),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}, False),
    ],
)
def test_threads_spin_where_each_has_a_core(four_cores, environ, spins):
    environ = dict(environ)
    threads.set_waiting(environ=environ)
    assert environ.get("OMP_WAIT_POLICY") == (None if spins else "passive")
    assert "GOMP_SPINCOUNT" not in environ


@pytest.mark.parametrize(
    "environ, threads_of_torch",
    [
        ({}, "2"),
        ({"OMP_NUM_THREADS": "3"}, "3"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "1"),
    ],
)
def test_a_quota_bounds_the_threads_of_all_ranks(monkeypatch, environ, threads_of_torch):
    monkeypatch.setattr(host, "cores", lambda: 2)
    monkeypatch.setattr(host, "processors", lambda: 128)
    environ = dict(environ)
    threads.set_waiting(environ=environ)
    assert environ["OMP_NUM_THREADS"] == threads_of_torch


def test_a_busy_core_is_not_free(four_cores, monkeypatch):
    environ = {}
    monkeypatch.setattr(threads, "usage", lambda: Usage(2.0, 2.4, 1.5))  # 0.9 s of others in 1 s
    threads.set_waiting(Usage(1.0, 1.0, 1.0), environ)
    assert environ == {"OMP_WAIT_POLICY": "passive"}


def test_ranks_that_start_as_well_do_not_count_as_busy():
    before = Usage(0.0, 0.0, 0.0)
    after = Usage(1.0, 4.0, 1.0)
    assert threads.busy_cores(before, after, 1) == 3
    assert threads.busy_cores(before, after, 4) == 0
    assert threads.busy_cores(before, Usage(0.05, 4.0, 1.0), 1) == 0  # too short to say
    assert threads.busy_cores(None, after, 1) == 0


@pytest.mark.parametrize("name", threads.OWN)
def test_the_environment_wins(four_cores, name):
    environ = {name: "active"}
    threads.set_waiting(environ=environ)
    assert environ == {name: "active"}


def test_usage_counts_what_others_compute():
    before = threads.usage()
    if before is None:
        pytest.skip("needs /proc/stat")
    command = [
        sys.executable,
        "-c",
        "import time\nend = time.time() + 0.6\nwhile time.time() < end: pass",
    ]
    subprocess.run(command, check=True)
    time.sleep(0.1)
    after = threads.usage()
    assert after.everybody - before.everybody - (after.own - before.own) > 0.3
    assert host.cores() >= 1
