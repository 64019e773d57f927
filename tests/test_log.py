"""Who speaks: ranks from each launcher's variables, lines of the first and last rank, things said once, failing."""
from __future__ import annotations

import pytest

from megatron import log

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


@pytest.fixture
def place(monkeypatch):
    """Sets exactly these of the launchers' variables."""
    def set_place(**values: object) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    set_place()
    return set_place


@pytest.mark.parametrize("environ, expected", [
    ({}, (0, 1, 0)),
    ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1}, (3, 4, 1)),
    ({"SLURM_PROCID": 5, "SLURM_NTASKS": 8, "SLURM_LOCALID": 1}, (5, 8, 1)),
    ({"SLURM_PROCID": 1, "SLURM_NTASKS": 8, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": 1}, (1, 2, 1)),
    ({"SLURM_NTASKS": 8}, (0, 1, 0)),                                         # a shell in an allocation
    ({"SLURM_PROCID": 0, "SLURM_NTASKS": 1}, (0, 1, 0)),
    ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "SLURM_PROCID": 1, "SLURM_NTASKS": 4, "SLURM_LOCALID": 1},
     (0, 2, 0)),
    ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, (0, 1, 0))])
def test_place_of_a_process(place, environ, expected):
    """torchrun's variables come before srun's: torchrun may run inside of srun."""
    place(**environ)
    assert (log.rank(), log.world_size(), log.local_rank()) == expected


@pytest.mark.parametrize("rank, said", [(0, "first\nINFO:a.b:text\nWARNING: careful\n"), (1, ""), (2, "last\n")])
def test_first_and_last_rank(place, capsys, rank, said):
    place(RANK=rank, WORLD_SIZE=3)
    log.print_rank_0("first")
    log.print_rank_last("last")
    log.info("a.b", "text")
    log._SAID.discard("careful")
    log.warn_once("careful")
    log.warn_once("careful")
    assert capsys.readouterr().out == said


def test_a_single_process_is_first_and_last(place, capsys):
    log.print_rank_0("first")
    log.print_rank_last("last")
    assert capsys.readouterr().out == "first\nlast\n"


def test_said_once(place, capsys):
    log._SAID.discard("news of test_log")
    for _ in range(3):
        log.say_once("news of test_log")
    assert capsys.readouterr().out == "news of test_log\n"


@pytest.mark.parametrize("rank, said", [(0, "error: one\nerror: two\n"), (1, "")])
def test_fail(place, capsys, rank, said):
    place(RANK=rank, WORLD_SIZE=2)
    with pytest.raises(SystemExit) as leave:
        log.fail(["one", "two"])
    assert leave.value.code == 2 and capsys.readouterr() == ("", said)
    with pytest.raises(SystemExit) as leave:
        log.fail("one", 3)
    assert leave.value.code == 3
