"""Who speaks: lines of the first and last rank, things said once, failing."""

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron import log

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


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


@pytest.mark.parametrize(
    "rank, said", [(0, "first\nINFO:a.b:text\nWARNING: careful\n"), (1, ""), (2, "last\n")]
)
def test_first_and_last_rank(place, capsys, rank, said):
    place(RANK=rank, WORLD_SIZE=3)
    log.print_rank_0("first")
    log.print_rank_last("last")
    log.info("a.b", "text")
    log._PRINTED.discard("careful")
    log.warn_once("careful")
    log.warn_once("careful")
    assert capsys.readouterr().out == said


def test_a_single_process_is_first_and_last(place, capsys):
    log.print_rank_0("first")
    log.print_rank_last("last")
    assert capsys.readouterr().out == "first\nlast\n"


def test_said_once(place, capsys):
    log._PRINTED.discard("news of test_log")
    for _ in range(3):
        log.warn_once("news of test_log")
    assert capsys.readouterr().out == "WARNING: news of test_log\n"


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
    assert (
        capsys.readouterr() == ("", "")
        and str(ChildFailedError("x", {0: shown})).count("traceback : one\n  two\n") == 1
    )
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere/error.json"))
    log.last_words("cannot be written\n")
    assert capsys.readouterr() == ("", "cannot be written\n")


def test_lines_of_a_run_act_on_no_terminal_and_show_no_credentials(place, capsys):
    place()
    log.print_rank_0("a\x1b[2Jb\tc\r\udcff s3://me:SEC/RET@bucket/x http://host:80/@a")
    log.last_words("error: a\x1b[2Jb\n")
    out, err = capsys.readouterr()
    assert out == "a\\x1b[2Jb\tc\\r\\udcff s3://...@bucket/x http://host:80/@a\n"
    assert err == "error: a\\x1b[2Jb\n"
