"""Files of other programs' checkpoints that are read whole: what is not a regular file, too large or
nested too deeply is an error; so is a link out of a model's folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron import small_files
from megatron.addons.convert import megatron_layout
from megatron.addons.convert.config_keys import Keys, read_json
from megatron.addons.convert.deepspeed_files.checkpoint import checkpoint_folder as deepspeed_folder
from megatron.addons.convert.hf_files import INDEX, HFFolder, _written, side_files
from megatron.addons.convert.links import ConversionError
from megatron.addons.convert.megatron_layout import TRACKER
from megatron.addons.convert.tests.hostile_kinds import make_hugging_face
from megatron.addons.convert.torch_files import read_file
from tests.problems import raises

READERS: dict[str, Callable[[Path], object]] = {"config.json": read_json, "PyTorch .pt": read_file}
EXPECTED = (ValueError, OSError, ConversionError)


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


@pytest.mark.parametrize("name", READERS)
def test_pipes_devices_and_directories_are_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 8 << 30)
    (tmp_path / "directory").mkdir()
    for path in (*sorted(tmp_path.iterdir()), Path("/dev/zero"), tmp_path / "missing"):
        with pytest.raises(EXPECTED):
            READERS[name](path)


@pytest.mark.parametrize("name", READERS)
def test_deep_brackets_are_one_error(tmp_path, name):
    (tmp_path / "x").write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(EXPECTED) as caught:
        READERS[name](tmp_path / "x")
    assert "\n" not in str(caught.value)


def test_a_model_configuration_without_finite_numbers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"rms_norm_eps": 1e400}')
    with pytest.raises(ConversionError, match=r"config\.json"):
        read_json(tmp_path / "config.json")
    keys = Keys({"rms_norm_eps": float("inf"), "rope_theta": float("inf")}, "config.json")
    keys.take("rms_norm_eps", 1e-6, (float, int))
    assert keys.integer("rope_theta", 10000) == 10000
    assert len(keys.problems) == 2


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
