"""hf-import of a name of the Hugging Face hub, and what it says at once where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.problems import assert_reported

from .. import hub, program
from ..hf_files import WANTED
from ..links import ConversionError
from .hf_models import make


def refused(capsys: pytest.CaptureFixture[str], source: str, target: Path) -> str:
    """What a wrong command line prints; torch must not be asked."""
    with pytest.raises(SystemExit) as end:
        program.main(["hf-import", source, str(target)])
    assert end.value.code == 2
    assert not target.exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "code", "named"),
    [
        ("missing", "directory-missing", "ORG/NAME"),
        ("a/b/c", "directory-missing", "a/b/c"),
        ("/org/name", "directory-missing", "ORG/NAME"),
        ("model.gguf", "not-converted", "GGUF"),
        ("org/model.gguf", "not-converted", "GGUF"),
        ("config.json", "not-converted", "config.json"),
        ("org/name", "directory-missing", "HF_HUB_OFFLINE"),
    ],
)
def test_a_source_that_is_no_folder(source, code, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: True)
    Path("config.json").write_text("{}")
    assert_reported(refused(capsys, source, tmp_path / "run"), code, source, named)


def test_a_name_without_the_package(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    assert_reported(refused(capsys, "org/name", tmp_path / "run"), "package-missing", "pip install")


def test_no_torch_is_loaded_before(tmp_path):
    code = (
        "import sys\nfrom megatron.addons.convert import program\n"
        f"try:\n    program.main(['hf-import', 'no/such/folder', {str(tmp_path / 'run')!r}])\n"
        "finally:\n    print([name for name in sys.modules if name in ('torch', 'transformers')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.splitlines()[-1] == "[]", done


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.is_name("org/name")
    Path("org/name").mkdir(parents=True)
    assert not hub.is_name("org/name") and list(hub.problems("org/name")) == []


@pytest.mark.peers
class TestHub:
    """With the package; its download is replaced, since tests have no network."""

    @pytest.fixture
    def package(self, monkeypatch):
        package = pytest.importorskip("huggingface_hub")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        return package

    def test_a_model_is_imported_from_where_it_was_put(
        self, package, tmp_path, monkeypatch, capsys
    ):
        folder = tmp_path / "cache"
        make(pytest.importorskip("transformers"), "llama", folder)
        asked = []

        def snapshot_download(name, allow_patterns):
            asked.append((name, allow_patterns))
            return str(folder)

        monkeypatch.setattr(package, "snapshot_download", snapshot_download)
        monkeypatch.chdir(tmp_path)
        words = ["hf-import", "org/name", str(tmp_path / "run"), "--no-tokenizer"]
        assert program.main([*words, "--unverified"]) == 0
        ((name, patterns),) = asked
        assert name == "org/name" and {"*.safetensors", *WANTED} == {*patterns}
        assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").exists()

    @pytest.mark.parametrize("kind", ["RepositoryNotFoundError", "GatedRepoError", "OSError"])
    def test_what_the_hub_does_not_give(self, kind, package, monkeypatch):
        from huggingface_hub import errors

        def snapshot_download(name, allow_patterns):
            error = getattr(errors, kind, OSError)
            raise error.__new__(error) if kind != "OSError" else OSError("no route\nto host")

        monkeypatch.setattr(package, "snapshot_download", snapshot_download)
        with pytest.raises(ConversionError, match=r"org/name.*hf download org/name"):
            hub.fetched("org/name", WANTED)
