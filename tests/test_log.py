"""Who speaks: ranks from each launcher's variables, lines of the first and last rank, things said once, failing."""
from __future__ import annotations

import os

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron import log
from megatron.config import command_line

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID",
         "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
# What SLURM sets for a job of four tasks: in the shell of salloc, in the batch script, in the last task of a step.
SALLOC = {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4}
SBATCH = {**SALLOC, "SLURM_PROCID": 0, "SLURM_LOCALID": 0}
SRUN = {**SALLOC, "SLURM_PROCID": 3, "SLURM_LOCALID": 1, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4}


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
    (SRUN, (3, 4, 1)),
    ({**SRUN, "SLURM_NTASKS": 8}, (3, 4, 1)),                                 # a step that is smaller than the job
    (SALLOC, (0, 1, 0)),
    (SBATCH, (0, 1, 0)),
    ({**SBATCH, "SLURM_STEP_NUM_TASKS": 1}, (0, 1, 0)),
    ({**SBATCH, "RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}, (1, 2, 1)),      # torchrun in the batch script
    ({**SRUN, "RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, (0, 2, 0)),        # torchrun in a step
    ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, (0, 1, 0))])
def test_place_of_a_process(place, environ, expected):
    """torchrun's variables come before srun's; a process that no launcher started is alone, in an allocation too.

    The command line says the same.
    """
    place(**environ)
    assert (log.rank(), log.world_size(), log.local_rank()) == expected
    line = command_line.read("--mock-data --vocab-size 64 --num-layers 1 --hidden-size 8 --num-attention-heads 1 "
                             "--seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1 "
                             "--tokenizer-type NullTokenizer".split(), os.environ)
    assert (line.rank, line.world_size) == expected[:2]


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


def test_last_words_go_to_stderr_or_where_torchrun_shows_them(monkeypatch, capsys, tmp_path):
    log.last_words("one\ntwo\n")
    assert capsys.readouterr() == ("", "one\ntwo\n")
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    log.last_words("not the last attempt\n")
    assert capsys.readouterr() == ("", "not the last attempt\n") and not file.exists()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    log.last_words("one\ntwo\n")
    shown = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert capsys.readouterr() == ("", "") and str(ChildFailedError("x", {0: shown})).count("traceback : one\n  two\n") == 1
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere/error.json"))
    log.last_words("cannot be written\n")
    assert capsys.readouterr() == ("", "cannot be written\n")
