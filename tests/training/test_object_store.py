"""--save and --load in an object store: what lies there is what was saved, and failing stores are waited for and told of."""
from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from megatron.checkpoint import object_store, skip_records, store
from megatron.checkpoint.disk import CheckpointError
from megatron.checkpoint.object_store import Remote
from megatron.checkpoint.state import RunState
from megatron.config.checkpoint import CheckpointConfig, is_url, staged
from tests.forkrun import RanksFailed
from tests.runs import SMALL, same_tensors, train, write_text

BASE = [*SMALL, "--train-iters", "6", "--split", "100,0,0", "--eval-iters", "0", "--save-interval", "2"]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """An S3 server of the test's own with an empty bucket; the environment says where it is."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as output:
        server = subprocess.Popen([sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=output,
                                  stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while "Running on http://" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        address = log.read_text().partition("Running on ")[2].split()[0]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"),
                                ("AWS_DEFAULT_REGION", "us-east-1"), ("AWS_ENDPOINT_URL", address)):
                patch.setenv(name, value)
            request = urllib.request.Request(f"{address}/bucket", method="PUT")
            urllib.request.urlopen(request, timeout=30).close()
            yield "s3://bucket"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(object_store, "WAITS", 0.0)
    monkeypatch.setattr(object_store, "LOOKS", 0.05)


def checkpoint(staging: Path, iteration: int) -> None:
    """A small checkpoint in a staging directory."""
    store.save(staging, iteration, [], RunState(iteration=iteration), f"--seed {iteration}\n")


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_is_a_url():
    assert is_url("s3://bucket/run") and is_url("memory://x") and not is_url("runs/a") and not is_url(None)
    c = staged(CheckpointConfig(save="s3://bucket/runs/a", load="runs/b", staging_dir="/disk"))
    assert (c.save, c.load) == ("/disk/s3/bucket/runs/a", "runs/b")


@pytest.mark.campaign
def test_there_and_back(bucket, tmp_path):
    remote = Remote(f"{bucket}/back")
    assert remote.latest() is None
    checkpoint(tmp_path / "here", 3)
    checkpoint(tmp_path / "here", 5)
    remote.upload(tmp_path / "here", 3)
    assert remote.latest() == 3
    remote.upload(tmp_path / "here", 5)
    object_store.fetch(f"{bucket}/back", str(tmp_path / "there"))
    object_store.fetch(f"{bucket}/back", str(tmp_path / "there"), 3)
    for iteration in (3, 5):
        here, there = (store.iteration_directory(tmp_path / name, iteration) for name in ("here", "there"))
        assert files_of(here) == files_of(there) and store.load(tmp_path / "there", iteration).iteration == iteration
    with pytest.raises(CheckpointError, match="has no checkpoint of iteration 4; choose another one"):
        object_store.fetch(f"{bucket}/back", str(tmp_path / "there"), 4)


@pytest.mark.campaign
def test_a_store_that_fails_now_and_then_and_one_that_lies(bucket, tmp_path, monkeypatch):
    """Each file is put again until the store gives it back as it is; the tracker is not moved before that."""
    checkpoint(tmp_path, 1)
    remote = Remote(f"{bucket}/fails")
    files, puts = remote._files, []
    put = files.put_file

    def failing(path, there):
        puts.append(Path(path).name)
        if len(puts) % 2:
            raise ConnectionError("reset by peer")
        put(path, there)

    monkeypatch.setattr(files, "put_file", failing)
    remote.upload(tmp_path, 1)
    assert puts == ["args", "args", "state.json", "state.json", "manifest.json", "manifest.json"] and remote.latest() == 1
    checkpoint(tmp_path, 2)
    monkeypatch.setattr(files, "put_file", lambda path, there: files.pipe_file(there, b"another"))
    with pytest.raises(CheckpointError, match=r"cannot upload iter_0000002/args in s3://bucket/fails, tried 5 times: "):
        remote.upload(tmp_path, 2)
    assert remote.latest() == 1


@pytest.mark.campaign
def test_what_is_there_is_not_put_again(bucket, tmp_path, monkeypatch):
    checkpoint(tmp_path, 1)
    remote = Remote(f"{bucket}/again")
    remote.upload(tmp_path, 1)
    monkeypatch.setattr(remote._files, "put_file", None)
    remote.upload(tmp_path, 1)


def test_a_url_that_cannot_be_used():
    with pytest.raises(ValueError, match="nosuch://x: .*give a URL such as s3://bucket/path"):
        Remote("nosuch://x")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"s3://a/b: .*pip install fsspec s3fs"):
        Remote("s3://a/b")


def run(folder: Path, data: str, url: str, *more: str, hook=None):
    words = [*BASE, "--data-path", data, "--save", url, "--load", url, "--staging-dir", str(folder / "staging"), *more]
    return train(folder, words, 2, hook=hook)


@pytest.mark.campaign
def test_a_run_goes_on_from_the_store_alone(bucket, tmp_path):
    """Half a run on one machine, the rest on another one: the same as a run with directories."""
    data = write_text(tmp_path / "text", 300)
    straight = train(tmp_path / "straight", [*BASE, "--data-path", data, "--save", str(tmp_path / "straight/save")], 2)
    url = f"{bucket}/runs/a"
    run(tmp_path / "one", data, url, "--exit-interval", "4", "--async-save")
    assert Remote(url).latest() == 4
    second = run(tmp_path / "two", data, url)
    assert "fetching the checkpoint of iteration 4" in second.first_rank_log and Remote(url).latest() == 6
    object_store.fetch(url, str(tmp_path / "three/save"))
    with store.load(tmp_path / "three/save").reader() as reader:
        same_tensors({name: reader.read(name) for name in reader.names()}, straight.tensors())


def refuse_to_put() -> None:
    """A hook: nothing gets into the store."""
    object_store.WAITS = 0.0

    def refuse(self, path, there):
        raise PermissionError("access denied")

    Remote._put = refuse


@pytest.mark.campaign
def test_a_store_that_refuses_costs_the_run_its_success_and_no_checkpoint(bucket, tmp_path):
    data = write_text(tmp_path / "text", 300)
    url = f"{bucket}/runs/refused"
    with pytest.raises(RanksFailed) as failure:
        run(tmp_path / "one", data, url, hook=refuse_to_put)
    said = f"CheckpointError: --save {url}: cannot upload iter_0000006/args in {url}, tried 5 times: PermissionError: access"
    assert said in str(failure.value) and "the same command uploads it" in str(failure.value)
    assert store.latest(tmp_path / "one/staging/s3/bucket/runs/refused") == 6
    run(tmp_path / "one", data, url)                    # nothing is left to train: it uploads
    assert Remote(url).latest() == 6


@pytest.mark.campaign
def test_ranges_to_skip_survive_in_the_store(bucket, tmp_path):
    """A machine that has nothing but the store skips what another one was told to skip, and both records stay."""
    data, url = write_text(tmp_path / "text", 300), f"{bucket}/runs/skips"
    run(tmp_path / "one", data, url, "--exit-interval", "2", "--train-range-to-skip", "4", "4")
    second = run(tmp_path / "two", data, url, "--train-range-to-skip", "5", "5")
    assert [row["iteration"] for row in second.rows if row["skipped"]] == [4, 5]
    path = "staging/s3/bucket/runs/skips/skips.jsonl"
    assert Remote(url)._files.cat_file("bucket/runs/skips/skips.jsonl") == (tmp_path / "two" / path).read_bytes()
    lines = (tmp_path / "two" / path).read_text().splitlines()
    assert len(lines) == 2 and lines[:1] == (tmp_path / "one" / path).read_text().splitlines()
    mine = tmp_path / "three"
    skip_records.append(mine, ["from here"])
    Remote(url).bring_skips(mine)
    assert skip_records.read(mine)[0] == [*lines, "from here"]
    Remote(url).bring_skips(mine)
    assert skip_records.read(mine)[0] == [*lines, "from here"]
