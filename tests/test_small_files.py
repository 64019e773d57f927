"""Files that are read whole: what is not a regular file, too large or nested too deeply is an error
that every reader reports in one line."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron import small_files
from megatron.analysis.run_history import read_history
from megatron.arguments import Problems, read_words
from megatron.checkpoint import lock
from megatron.config.megatron_compat.deepspeed import read_deepspeed
from megatron.data.blend.blended_dataset import read_blend_file, read_split_blends
from megatron.data.tokenizers import metadata
from megatron.data.tokenizers.bpe import _special_names, _tiktoken_pieces
from megatron.data.tokenizers.gpt2_bpe import read_merges, read_vocabulary
from tools.convert.config_keys import Keys, read_json
from tools.convert.hf_files import side_files
from tools.convert.links import ConversionError
from tools.internlm.read_config import ConfigError, read_config
from tools.spikes import restart

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
    "deepspeed config": lambda path: read_deepspeed(str(path)),
    "blend": lambda path: read_blend_file(str(path)),
    "split blends": lambda path: read_split_blends(str(path)),
    "log": lambda path: read_history([str(path)]),
    "config.json": read_json,
    "InternLM config": read_config,
}
EXPECTED = (ValueError, OSError, Problems, ConversionError)


@pytest.mark.parametrize("name", READERS)
def test_pipes_devices_and_directories_are_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 8 << 30)
    (tmp_path / "directory").mkdir()
    for path in (*sorted(tmp_path.iterdir()), Path("/dev/zero"), tmp_path / "missing"):
        if name == "log" and path.is_dir():
            continue
        with pytest.raises(EXPECTED):
            READERS[name](path)


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("log", "blend")])
def test_deep_brackets_are_an_error_or_no_value(tmp_path, name):
    (tmp_path / "x").write_text(DEEP)
    try:
        READERS[name](tmp_path / "x")
    except EXPECTED as error:
        assert "\n" not in str(error)


def test_deep_brackets_next_to_a_tokenizer_a_pair_and_a_checkpoint(tmp_path):
    (tmp_path / "x").write_text(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
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
    assert keys.whole("rope_theta", 10000) == 10000
    assert len(keys.problems) == 2


@pytest.mark.parametrize("text", ['{"iteration": 1e400, "lm_loss": 1}', "[" * 200_000])
def test_metrics_that_no_number_holds_are_named(tmp_path, text):
    (tmp_path / "m.jsonl").write_text('{"iteration": 1}\n' + text + "\n")
    with pytest.raises(ValueError, match=r"m\.jsonl, line 1"):
        read_history([str(tmp_path / "m.jsonl")])


def test_an_internlm_config_that_repeats_itself_is_refused(tmp_path):
    lines = ["a = [1, 1]", *["a = [a, a]"] * 30]
    (tmp_path / "config.py").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="line 16: has more than 100000 values"):
        read_config(tmp_path / "config.py")


def test_a_tokenizer_file_that_cannot_be_read_is_not_passed_over(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConversionError, match=r"tokenizer\.json"):
        side_files(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ConversionError, match=r"tokenizer\.json"):
        side_files(tmp_path)


def test_a_directory_is_quoted_in_the_flags_of_spikes():
    class Spike:
        start = 20
        end = 22

    assert restart([Spike()], "my runs; rm x", [10]).startswith("--load 'my runs; rm x' --ckpt")


def test_a_save_directory_that_comes_back_is_still_this_jobs(tmp_path, monkeypatch):
    mine = lock.acquire(tmp_path)
    away = tmp_path / "away"
    os.rename(mine.path, away)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: os.rename(away, mine.path))
    mine.check()
    os.rename(mine.path, away)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(lock, "RETURNS_WITHIN", 0.05)
    with pytest.raises(Exception, match="save-directory-lost"):
        mine.check()
    os.rename(away, mine.path)
    mine.release()
