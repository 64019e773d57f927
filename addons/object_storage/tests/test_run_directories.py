"""--save and --load in an object store: what lies there is what was saved, and failing stores are
waited for and told of."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from megatron.addons.object_storage import object_stores, run_directories
from megatron.addons.object_storage.run_directories import Remote
from megatron.addons.object_storage.tests.s3_server import serving
from megatron.checkpoint import reading, retention, skip_log, store
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.state import RunState
from megatron.config import load_order, run_directory
from megatron.config.checkpoint import CheckpointConfig, is_url, staged
from megatron.config.history import History
from megatron.training.checkpointing import one_history
from tests import problems
from tests.runs import SMALL, same_tensors, train, write_text

BASE = [
    *SMALL,
    "--train-iters",
    "6",
    "--split",
    "100,0,0",
    "--eval-iters",
    "0",
    "--save-interval",
    "2",
]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """An S3 server of the test's own with an empty bucket; the environment says where it is."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serving(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(run_directories, "WAITS", 0.0)
    monkeypatch.setattr(run_directories, "LOOKS", 0.05)


def checkpoint(staging: Path, iteration: int, own: History | None = None) -> None:
    """A small checkpoint in a staging directory, of the branch `own` if it names one."""
    state = RunState(iteration=iteration, history=own.dump(iteration) if own else {})
    store.save(staging, iteration, [], state, f"--seed {iteration}\n")


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_is_a_url():
    assert (
        is_url("s3://bucket/run")
        and is_url("memory://x")
        and not is_url("runs/a")
        and not is_url(None)
    )
    c = staged(
        CheckpointConfig(
            save="s3://bucket/runs/a", load="runs/b", snapshot_dir="s3://b/x", staging_dir="/disk"
        )
    )
    assert (c.save, c.load, c.snapshot_dir) == ("/disk/s3/bucket/runs/a", "runs/b", "/disk/s3/b/x")


def test_a_store_without_a_checkpoint_is_an_error_where_one_must_be_there(tmp_path):
    url = f"file://{tmp_path}/empty"
    run_directories.fetch(url, str(tmp_path / "here"))
    with pytest.raises(CheckpointError, match=r"--load file://"):
        run_directories.fetch(url, str(tmp_path / "here"), required=True)
    checkpoint(tmp_path / "here", 3)  # not uploaded yet
    run_directories.fetch(url, str(tmp_path / "here"), required=True)


@pytest.mark.peers
@pytest.mark.campaign
def test_a_store_that_fails_now_and_then_and_one_that_lies(bucket, tmp_path, monkeypatch):
    """Each file is put again until the store gives it back as it is; the tracker is not moved
    before that."""
    checkpoint(tmp_path, 1)
    remote = Remote(f"{bucket}/fails")
    files = remote.files
    puts = []
    put = files.put_file

    def failing(path, there):
        puts.append(Path(path).name)
        if len(puts) % 2:
            raise ConnectionError("reset by peer")
        put(path, there)

    monkeypatch.setattr(files, "put_file", failing)
    remote.upload(tmp_path, 1)
    assert (
        puts == ["args", "args", "state.json", "state.json", "manifest.json", "manifest.json"]
        and remote.latest() == 1
    )
    checkpoint(tmp_path, 2)
    monkeypatch.setattr(files, "put_file", lambda path, there: files.pipe_file(there, b"another"))
    with pytest.raises(
        CheckpointError,
        match=r"iter_0000002/args in s3://bucket/fails, .*\b5 times",
    ):
        remote.upload(tmp_path, 2)
    assert remote.latest() == 1


def test_a_url_that_cannot_be_used():
    with problems.raises(ValueError, "url-not-supported", "nosuch://x"):
        Remote("nosuch://x")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with problems.raises(ValueError, "package-missing", "s3://a/b", "s3fs"):
        Remote("s3://a/b")


def run(folder: Path, data: str, url: str, *more: str, hook=None):
    words = [
        *BASE,
        "--data-path",
        data,
        "--save",
        url,
        "--load",
        url,
        "--staging-dir",
        str(folder / "staging"),
        *more,
    ]
    return train(folder, words, 2, hook=hook)


@pytest.mark.peers
@pytest.mark.campaign
def test_a_run_goes_on_from_the_store_alone(bucket, tmp_path):
    """Half a run on one machine, the rest on another one: the same as a run with directories."""
    data = write_text(tmp_path / "text", 300)
    straight = train(
        tmp_path / "straight",
        [*BASE, "--data-path", data, "--save", str(tmp_path / "straight/save")],
        2,
    )
    url = f"{bucket}/runs/a"
    run(tmp_path / "one", data, url, "--exit-interval", "4", "--async-save")
    assert Remote(url).latest() == 4
    second = run(tmp_path / "two", data, url)
    assert second.rows[0]["iteration"] == 5 and Remote(url).latest() == 6
    run_directories.fetch(url, str(tmp_path / "three/save"))
    with reading.load(tmp_path / "three/save").reader() as reader:
        same_tensors({name: reader.read(name) for name in reader.names()}, straight.tensors())


@pytest.mark.peers
@pytest.mark.campaign
def test_ranges_to_skip_survive_in_the_store(bucket, tmp_path):
    """A machine that has nothing but the store skips what another one was told to skip, and both
    records stay."""
    data = write_text(tmp_path / "text", 300)
    url = f"{bucket}/runs/skips"
    run(tmp_path / "one", data, url, "--exit-interval", "2", "--train-range-to-skip", "4", "4")
    second = run(tmp_path / "two", data, url, "--train-range-to-skip", "5", "5")
    assert [row["iteration"] for row in second.rows if row["skipped"]] == [4, 5]
    path = "staging/s3/bucket/runs/skips/skips.jsonl"
    assert (
        Remote(url).files.cat_file("bucket/runs/skips/skips.jsonl")
        == (tmp_path / "two" / path).read_bytes()
    )
    lines = (tmp_path / "two" / path).read_text().splitlines()
    assert len(lines) == 2 and lines[:1] == (tmp_path / "one" / path).read_text().splitlines()
    mine = tmp_path / "three"
    skip_log.write(mine, ["from here"])
    Remote(url).bring_skips(mine)
    assert skip_log.read(mine)[0] == [*lines, "from here"]
    Remote(url).bring_skips(mine)
    assert skip_log.read(mine)[0] == [*lines, "from here"]


# --- snapshots: in a store of plain files, which needs no package of its own


@pytest.fixture
def files_as_store(monkeypatch):
    """file:// makes directories, as stores need none."""
    monkeypatch.setitem(fsspec.config.conf, "file", {"auto_mkdir": True})


def eventually(what) -> None:
    """Wait until the uploading process has done it."""
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def held(url: str) -> list[int | None]:
    """Iterations of the two snapshots in a store. A file, other than what a store holds, is seen
    half-written."""
    for _ in range(100):
        try:
            return [Remote(f"{url}/{slot}").latest() for slot in run_directory.SLOTS]
        except CheckpointError:
            time.sleep(0.02)
    raise AssertionError(f"{url} holds damaged trackers")


def snapshot(folder: Path, iteration: int) -> None:
    """What a run does at --snapshot-interval."""
    checkpoint(retention.free_slot(run_directory.slots(folder), iteration), iteration)


@pytest.mark.parametrize("save_in_store", [False, True])
def test_snapshots_are_uploaded_to_their_slots_and_fetched_where_they_are_newer(
    save_in_store, files_as_store, tmp_path
):
    url = f"file://{tmp_path}/store/snap"
    save = tmp_path / "save"
    snapshots = tmp_path / "snapshots"
    save_url = f"file://{tmp_path}/store/run" if save_in_store else None
    places = run_directories.upload_targets(str(save), save_url, str(snapshots), url)
    assert len(places) == 2 + save_in_store
    checkpoint(save, 1)
    with run_directories.uploading(places):
        for iteration in (2, 4, 6):
            snapshot(snapshots, iteration)
            eventually(lambda iteration=iteration: iteration in held(url))
    assert held(url) == [6, 4]
    for slot, iteration in (("0", 6), ("1", 4)):  # the older one of a slot is gone
        assert [path.name for path in (tmp_path / "store/snap" / slot).glob("iter_*")] == [
            f"iter_{iteration:07d}"
        ]
    run_directories.fetch_snapshot(url, str(tmp_path / "elsewhere"), str(save))
    fetched = run_directory.slots(tmp_path / "elsewhere")
    assert [retention.newest_in(slot) for slot in fetched] == [6, 4]
    assert files_of(tmp_path / "elsewhere/0/iter_0000006") == files_of(snapshots / "0/iter_0000006")
    checkpoint(save, 7)  # newer than both of them
    run_directories.fetch_snapshot(url, str(tmp_path / "nothing"), str(save))
    assert not (tmp_path / "nothing").exists()


def command(load: Path, save: Path, url: str, **more) -> SimpleNamespace:
    """The line of a run that loads from a directory and saves to a store."""
    c = CheckpointConfig(load=str(load), save=str(save), **more)
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint=c, training=SimpleNamespace(skip_train=False)),
        load_url=None,
        save_url=url,
        snapshot_url=None,
    )


def test_a_store_has_one_history(files_as_store, tmp_path, capsys):
    """Another one's is refused, or renamed with its records of skipped iterations."""
    url = f"file://{tmp_path}/store/run"
    for name in ("other", "there"):
        own = History().branch()
        for iteration in (5, 10):
            checkpoint(tmp_path / name, iteration, own)
    for iteration in (5, 10):
        Remote(url).upload(tmp_path / "there", iteration)
    skip_log.write(tmp_path / "there", ["{}"])
    Remote(url).upload_skips(tmp_path / "there")
    before = sorted(path.name for path in (tmp_path / "store/run").iterdir())
    with pytest.raises(SystemExit) as leave:
        one_history.make_room(command(tmp_path / "other", tmp_path / "empty", url))
    assert leave.value.code == 2
    error = capsys.readouterr().err
    problems.assert_reported(error, "save-holds-checkpoints", url, "iteration 10")
    one_history.make_room(command(tmp_path / "there", tmp_path / "empty", url))
    assert before == sorted(path.name for path in (tmp_path / "store/run").iterdir())
    one_history.make_room(
        command(tmp_path / "other", tmp_path / "empty", url, overwrite_newer_checkpoints=True)
    )
    assert Remote(url).latest() is None and Remote(url).newest() is None
    left = sorted(path.name for path in (tmp_path / "store/run").iterdir())
    assert left == [f"{name}.other-history" for name in ("iter_0000005", "iter_0000010")] + [
        "skips.jsonl.other-history"
    ]
    one_history.make_room(command(tmp_path / "other", tmp_path / "empty", url))


def test_a_fetch_follows_the_branch_that_the_store_is_on(files_as_store, tmp_path):
    """Without its tracker, too; a later iteration in the staging directory counts if it continues
    from what the store has."""
    url = f"file://{tmp_path}/store/run"
    first = History().branch()
    for iteration in (4, 6, 8):
        checkpoint(tmp_path / "here", iteration, first)
        Remote(url).upload(tmp_path / "here", iteration)
    second = History(((first.branches[0][0], 4),), 1).branch()
    checkpoint(tmp_path / "there", 6, second)
    Remote(url).upload(tmp_path / "there", 6)
    run_directories.fetch(url, str(tmp_path / "here"))  # which has 6 and 8 of the first branch
    assert reading.latest(tmp_path / "here") == 6
    assert History.parse(reading.load(tmp_path / "here").state.history).number == 2
    checkpoint(tmp_path / "here", 7, second)
    run_directories.fetch(url, str(tmp_path / "here"))
    assert reading.latest(tmp_path / "here") == 7
    (tmp_path / "store/run" / store.TRACKER).unlink()
    run_directories.fetch(url, str(tmp_path / "new"))
    assert reading.latest(tmp_path / "new") == 6


def test_a_snapshot_of_a_branch_that_was_left_hides_none_of_this_one(files_as_store, tmp_path):
    """A machine without the snapshots of the first one goes back to iteration 2, saves 4 and a
    snapshot of 5; a third one has the store alone."""
    url = f"file://{tmp_path}/store/snap"
    save = tmp_path / "save"
    left = History().branch()
    own = History(((left.branches[0][0], 2),), 1).branch()
    checkpoint(save, 2, left)
    for slot, iteration, history in ((0, 3, left), (1, 6, left), (0, 5, own)):
        checkpoint(tmp_path / str(iteration), iteration, history)
        Remote(f"{url}/{slot}").upload(tmp_path / str(iteration), iteration)
    checkpoint(save, 4, own)
    run_directories.fetch_snapshot(url, str(tmp_path / "there"), str(save))
    tries, _ = load_order.tries(save, None, run_directory.slots(tmp_path / "there"))
    assert [each.step for each in tries] == [5, 4, 2]


def test_a_snapshot_that_the_store_refuses_is_a_warning_and_a_checkpoint_a_failure(
    files_as_store, tmp_path, capfd, monkeypatch
):
    save = tmp_path / "save"
    snapshots = tmp_path / "snapshots"
    places = run_directories.upload_targets(
        str(save), f"file://{tmp_path}/run", str(snapshots), f"file://{tmp_path}/snap"
    )
    put = Remote.put

    def refuse(self, path, there):
        if self.url.endswith(refused):
            raise PermissionError("access denied")
        put(self, path, there)

    monkeypatch.setattr(Remote, "put", refuse)
    checkpoint(save, 1)
    snapshot(snapshots, 2)
    refused = "/snap/0"
    with run_directories.uploading(places):
        pass
    assert (
        "WARNING: --snapshot-dir" in capfd.readouterr().err
        and Remote(f"file://{tmp_path}/run").latest() == 1
    )
    refused = "/run"
    checkpoint(save, 3)
    with (
        pytest.raises(CheckpointError, match="--save file://"),
        run_directories.uploading(places),
    ):
        pass


def test_a_bucket_that_is_not_there_is_a_failure_and_no_silence(tmp_path):
    """file:// without directories says what s3 says of a missing bucket: FileNotFoundError."""
    checkpoint(tmp_path / "save", 1)
    places = run_directories.upload_targets(
        str(tmp_path / "save"), f"file://{tmp_path}/nowhere/run", None, None
    )
    with (
        pytest.raises(CheckpointError, match="--save file://"),
        run_directories.uploading(places),
    ):
        pass


def test_what_will_not_pass_is_tried_once():
    """By the errors that s3fs and botocore raise themselves."""
    exceptions = pytest.importorskip("botocore.exceptions")
    errors = pytest.importorskip("s3fs.errors")

    def answer(code: str, status: int) -> Exception:
        told = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        return errors.translate_boto_error(exceptions.ClientError(told, "GetObject"))

    lasting = [
        exceptions.NoCredentialsError(),
        exceptions.ParamValidationError(report="Invalid bucket name"),
        PermissionError("Access Denied"),
        *(answer(code, 403) for code in ("AccessDenied", "InvalidAccessKeyId", "403")),
        answer("InvalidBucketName", 400),
        answer("InvalidToken", 400),
    ]
    passing = [answer("SlowDown", 503), answer("RequestTimeout", 400), OSError("reset")]
    for error in lasting + passing:
        calls: list[int] = []

        def fail(error=error, calls=calls) -> None:
            calls.append(1)
            raise error

        with pytest.raises(object_stores.StoreFailed):
            object_stores.patiently(fail, [0.0, 0.0])
        assert len(calls) == (1 if error in lasting else 3), repr(error)


@pytest.mark.parametrize("url", ["s3://AKIA:SECRET@bucket/run", "s3://AKIA:SEC/RET@bucket/run"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    for action in (Remote, object_stores.client):
        with pytest.raises(ValueError) as caught:
            action(url)
        problems.assert_problem(str(caught.value), "url-has-credentials", "bucket/run")
        assert "AKIA" not in str(caught.value) and "RET@" not in str(caught.value)
    # ... nor where a library repeats them, of an endpoint or a proxy
    failed = object_stores.StoreFailed(1, OSError("cannot connect to http://me:SECRET@proxy:80/x"))
    assert "SECRET" not in str(failed) and "proxy:80" in str(failed)
