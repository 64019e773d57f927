"""Files that are read whole: what is not a regular file, too large or nested too deeply is an error
that every reader reports in one line."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron import small_files
from megatron.analysis.run_reader import read_run
from megatron.analysis.trace_file import read_memory
from megatron.args_file import read_words
from megatron.arguments import Problems
from megatron.checkpoint import lock, store
from megatron.checkpoint.filesystem import CheckpointError
from megatron.config import command_line, run_directory
from megatron.config.run_directory import vouched_file
from megatron.data.blend.blended_dataset import read_blend_file, read_split_blends
from megatron.data.chat.templates import find_template
from megatron.data.file_access import map_file
from megatron.data.index_cache import IndexCache
from megatron.data.ledger import Ledger, read_ledger
from megatron.data.tokenizers import metadata
from megatron.data.tokenizers.bpe import _special_names, _tiktoken_pieces
from megatron.data.tokenizers.gpt2_bpe import read_merges, read_vocabulary
from megatron.training.launch.control_file import ControlFileRequests
from megatron.training.result import Requests
from tests import problems
from tests.campaigns.hostile.kinds import make_hugging_face
from tests.problems import raises
from tests.runs import SMALL
from tools.convert import megatron_layout
from tools.convert.config_keys import Keys, read_json
from tools.convert.deepspeed_files.checkpoint import checkpoint_folder as deepspeed_folder
from tools.convert.hf_files import INDEX, HFFolder, _written, side_files
from tools.convert.links import ConversionError
from tools.convert.megatron_layout import TRACKER
from tools.convert.torch_files import read_file

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """End a test that waits for a pipe."""

    def late(*_: object) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _special(path: Path) -> object:
    path.rename(path.with_name("tokenizer_config.json"))
    return _special_names(path.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "vocab.json": read_vocabulary,
    "merges.txt": read_merges,
    "tiktoken": lambda path: _tiktoken_pieces(str(path), 10),
    "args file": read_words,
    "blend": lambda path: read_blend_file(str(path)),
    "split blends": lambda path: read_split_blends(str(path)),
    "log": lambda path: read_run(str(path)),
    "config.json": read_json,
    "data ledger": lambda path: read_ledger(str(path)),
    "data ledger to write": lambda path: Ledger(str(path), 32),
    "index": lambda path: map_file(str(path)),
    "chat template": lambda path: find_template(str(path), None, {}),
    "PyTorch .pt": read_file,
    "small file of a checkpoint": run_directory.read_small_file,
}
REST = ("data ledger to write", "chat template", "small file of a checkpoint")
EXPECTED = (ValueError, OSError, Problems, ConversionError, CheckpointError)


def wanted(name: str, path: Path) -> bool:
    """An index may have any size, a ledger is read in part, and one to write is made."""
    return not (
        (path.name == "huge" and name in ("index", "data ledger"))
        or (path.name == "missing" and name == "data ledger to write")
    )


@pytest.mark.parametrize("name", READERS)
def test_pipes_devices_and_directories_are_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 8 << 30)
    (tmp_path / "directory").mkdir()
    for path in (*sorted(tmp_path.iterdir()), Path("/dev/zero"), tmp_path / "missing"):
        if (name == "log" and path.is_dir()) or not wanted(name, path):
            continue
        with pytest.raises(EXPECTED):
            READERS[name](path)


@pytest.mark.parametrize(
    "name", [name for name in READERS if name not in ("log", "blend", "index", *REST)]
)
def test_deep_brackets_are_an_error_or_no_value(tmp_path, name):
    (tmp_path / "x").write_text(DEEP)
    try:
        READERS[name](tmp_path / "x")
    except EXPECTED as error:
        assert "\n" not in str(error)


def test_deep_brackets_next_to_a_tokenizer_a_pair_and_a_checkpoint(tmp_path):
    (tmp_path / "x").write_text(DEEP)
    with problems.raises(ValueError, "tokenizer-file-malformed"):
        _special(tmp_path / "x")
    (tmp_path / "pair.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"pair\.json"):
        metadata.note(str(tmp_path / "pair"))
    (tmp_path / ".lock.000001").write_text("[" * 9_000)
    assert lock._owner(tmp_path / ".lock.000001") is None


@pytest.mark.parametrize("value", ["1e400", "-1e400", "[1, 1e999]"])
def test_numbers_that_no_float_holds_are_refused(value):
    with pytest.raises(json.JSONDecodeError):
        small_files.parse_json(f'{{"rope_theta": {value}}}')


def test_a_model_configuration_without_finite_numbers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"rms_norm_eps": 1e400}')
    with pytest.raises(ConversionError, match=r"config\.json"):
        read_json(tmp_path / "config.json")
    keys = Keys({"rms_norm_eps": float("inf"), "rope_theta": float("inf")}, "config.json")
    keys.take("rms_norm_eps", 1e-6, (float, int))
    assert keys.integer("rope_theta", 10000) == 10000
    assert len(keys.problems) == 2


@pytest.mark.parametrize("text", ['{"iteration": 1e400, "lm_loss": 1}', "[" * 200_000])
def test_metrics_that_no_number_holds_are_named(tmp_path, text):
    (tmp_path / "m.jsonl").write_text('{"iteration": 1}\n' + text + "\n")
    with pytest.raises(ValueError, match=r"m\.jsonl, line 1"):
        read_run(str(tmp_path / "m.jsonl"))


def test_a_tokenizer_file_that_cannot_be_read_is_not_passed_over(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConversionError, match=r"tokenizer\.json"):
        side_files(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ConversionError, match=r"tokenizer\.json"):
        side_files(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "vocab.json"])
def test_links_out_of_a_model_are_refused_but_for_the_blobs_of_its_cache(tmp_path, name):
    folder = tmp_path / "models--a--b/snapshots/1234"
    folder.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").mkdir()
    for secret in ("secret", "models--a--b/secret", "models--a--b/blobs/real"):
        (tmp_path / secret).write_text("{}")
    (folder / "real").write_text("{}")
    for target in ("real", "../../blobs/real", str(tmp_path / "models--a--b/blobs/real")):
        (folder / name).symlink_to(target)
        assert side_files(folder) == [folder / name]
        (folder / name).unlink()
    (tmp_path / "models--a--b/blobs/link").symlink_to(tmp_path / "secret")
    for target in ("../../secret", "../../../secret", "../../blobs/link", str(tmp_path / "secret")):
        (folder / name).symlink_to(target)
        with raises(small_files.UnsafeName, "link-out-of-folder", folder / name):
            side_files(folder)
        (folder / name).unlink()
    other = tmp_path / "models--a--b/other"  # is no snapshot of the cache
    other.mkdir()
    (other / name).symlink_to("../blobs/real")
    with raises(small_files.UnsafeName, "link-out-of-folder", other / name):
        side_files(other)
    folder.rename(tmp_path / "plain")
    (tmp_path / "link").symlink_to(tmp_path / "plain")  # the folder itself is named by the user
    (tmp_path / "plain" / name).write_text("{}")
    assert side_files(tmp_path / "link") == [tmp_path / "link" / name]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_a_model_of_links_is_refused(tmp_path, name):
    make_hugging_face(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "model.safetensors"}}')
    HFFolder(tmp_path).close()
    (tmp_path / name).rename(tmp_path.with_suffix(".other"))
    (tmp_path / name).symlink_to(tmp_path.with_suffix(".other"))
    with raises(small_files.UnsafeName, "link-out-of-folder", tmp_path / name):
        HFFolder(tmp_path)


HUGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "Megatron's tracker": (TRACKER, megatron_layout.checkpoint_folder),
    "DeepSpeed's latest": ("latest", deepspeed_folder),
    "a file beside a model": ("vocab.json", lambda folder: list(_copies(folder))),
    "memory trace": ("trace", lambda folder: read_memory(folder / "trace")),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_file_is_refused(tmp_path, name):
    file, read = HUGE[name]
    (tmp_path / file).touch()
    os.truncate(tmp_path / file, 40 << 30)
    with pytest.raises(EXPECTED):
        read(tmp_path)


def _copies(folder):
    files = {"vocab.json": folder / "vocab.json"}
    return _written(folder, {}, {}, files)


@pytest.mark.parametrize("name", ["manifest.json", "args", "state.json"])
def test_a_checkpoint_with_a_huge_file_is_passed_over(tmp_path, name):
    for file in ("manifest.json", "args", "state.json"):
        (tmp_path / file).write_text("{}")
    sums = {file: {"crc32": f"{zlib.crc32(b'{}'):08x}"} for file in ("args", "state.json")}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": sums}))
    assert vouched_file(tmp_path, "args") == vouched_file(tmp_path, "state.json") == b"{}"
    os.truncate(tmp_path / name, 40 << 30)
    assert vouched_file(tmp_path, name if name != "manifest.json" else "args") is None


def test_no_more_memory_is_reserved_than_a_file_has_bytes(tmp_path):
    """A limit on the memory of a process, below the limit on the size of a file, does no harm."""
    (tmp_path / "x").write_bytes(b"x" * 100_000)
    tracemalloc.start()
    assert len(small_files.read_bytes(tmp_path / "x")) == 100_000
    assert len(run_directory.read_small_file(tmp_path / "x")) == 100_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    with pytest.raises(OSError, match="more than 99999 bytes"):
        small_files.read_bytes(tmp_path / "x", 99_999)


def test_a_lock_that_is_a_link_to_itself_is_a_lock(tmp_path):
    (tmp_path / ".lock.000001").symlink_to(tmp_path / ".lock.000001")
    with problems.raises(CheckpointError, "save-directory-in-use"):
        lock.acquire(tmp_path)


def test_ranks_that_fit_a_huge_batch_are_found_at_once(tmp_path):
    words = [*SMALL, "--mock-data", "--vocab-size", "100", "--train-iters", "9"]
    huge = ["--micro-batch-size", "2", "--global-batch-size", "9223372036854775802"]
    assert command_line.judge([*words, *huge], 5)[1]


def test_a_control_file_that_is_a_pipe_requests_nothing(tmp_path):
    os.mkfifo(tmp_path / "control")
    control = ControlFileRequests(str(tmp_path / "control"))
    assert control.request(9) is None
    control.after_iteration(9, Requests(save_now=1))


def test_a_cache_whose_description_is_a_pipe_is_built_again(tmp_path):
    cache = IndexCache(str(tmp_path))
    cache.store("Kind", "text", {"a": np.arange(5)})
    path = next(tmp_path.glob("*-description.txt"))
    path.unlink()
    os.mkfifo(path)
    assert cache.load("Kind", "text", ["a"]) is None


def test_a_template_that_is_nested_too_deeply_is_refused(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "t").write_text("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}")
    with problems.raises(ValueError, "chat-template-malformed"):
        find_template(str(tmp_path / "t"), None, {})


def test_counts_that_no_float_holds_are_no_traceback(tmp_path):
    (tmp_path / "x.log").write_text(
        " iteration 1/ 20 | consumed samples: 8 | global batch size: 1e400 | lm loss: 9.0 | "
        "number of skipped iterations: 1e400 |\n"
    )
    record = read_run(str(tmp_path / "x.log")).records[0]
    assert record.global_batch_size is None and record.skipped == 0


def test_long_lines_are_shortened_in_messages(tmp_path):
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "{" * 300_000 + "\n")
    with pytest.raises(ValueError) as error:
        read_merges(tmp_path / "merges.txt")
    assert len(str(error.value)) < 2000
    (tmp_path / "blend").write_text("{" * 300_000 + " a 0.5 b")
    with pytest.raises(ValueError) as error:
        read_blend_file(str(tmp_path / "blend"))
    assert len(str(error.value)) < 2000


def time_with(sleep: Callable[[float], object]) -> SimpleNamespace:
    """The module `time` with another sleep, for one module: other threads go on sleeping."""
    return SimpleNamespace(**{**vars(time), "sleep": sleep})


def test_a_save_directory_that_comes_back_is_still_this_jobs(tmp_path, monkeypatch):
    mine = lock.acquire(tmp_path)
    away = tmp_path / "away"
    os.rename(mine.path, away)
    monkeypatch.setattr(lock, "time", time_with(lambda seconds: os.rename(away, mine.path)))
    mine.check()
    os.rename(mine.path, away)
    monkeypatch.setattr(lock, "time", time_with(lambda seconds: None))
    monkeypatch.setattr(lock, "RETURNS_WITHIN", 0.05)
    with problems.raises(Exception, "save-directory-lost"):
        mine.check()
    os.rename(away, mine.path)
    mine.release()


def test_a_save_directory_that_was_lost_is_not_made_again(tmp_path, monkeypatch):
    """It was unmounted: there is only its mount point."""
    monkeypatch.setattr(lock, "RETURNS_WITHIN", 0.0)
    mine = lock.acquire(tmp_path / "mount/run")
    os.rename(tmp_path / "mount", tmp_path / "away")
    (tmp_path / "mount").mkdir()
    with problems.raises(Exception, "save-directory-lost"):
        store.begin(tmp_path / "mount/run", 5, fence=mine.check)
    assert not list((tmp_path / "mount").iterdir())
    mine.release()


def test_what_passes_on_network_file_systems_is_tried_again(monkeypatch):
    """And nothing else is; what stays is the last answer's error."""
    monkeypatch.setattr("time.sleep", lambda _: None)

    def answers(*numbers: int):
        left = list(numbers)

        def action() -> int:
            if left:
                raise OSError(left.pop(0), "")
            return 7

        return action, left

    action, left = answers(errno.ESTALE, errno.ESTALE)
    assert small_files.retried(action, errno.ESTALE) == 7
    action, left = answers(errno.EIO, errno.ESTALE)
    with pytest.raises(OSError):
        small_files.retried(action, errno.ESTALE)
    assert left == [errno.ESTALE]
    action, left = answers(*[errno.ESTALE] * 9)
    with pytest.raises(OSError):
        small_files.retried(action, errno.ESTALE)
    assert len(left) == 5


def test_a_directory_that_another_host_has_just_made_is_seen_a_moment_later(tmp_path, monkeypatch):
    """NFS: mkdir says that it exists, while lookups are still answered from the cache."""
    made = tmp_path / "made"
    made.mkdir()
    looks, exists, is_dir = [], os.path.lexists, os.path.isdir

    def late(path, look):
        if os.fspath(path) == str(made):
            looks.append(path)
            return len(looks) > 4 and look(path)
        return look(path)

    monkeypatch.setattr(os.path, "lexists", lambda path: late(path, exists))
    monkeypatch.setattr(os.path, "isdir", lambda path: late(path, is_dir))
    small_files.make_directories(made)
    assert len(looks) > 4
    looks.clear()
    with pytest.raises(FileExistsError):
        small_files.make_directories(made, seconds=0.0)


def test_a_file_in_the_way_of_a_directory_is_an_error_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(small_files, "time", time_with(pytest.fail))
    with pytest.raises(FileExistsError):
        small_files.make_directories(tmp_path / "file")
