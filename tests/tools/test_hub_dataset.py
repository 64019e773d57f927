"""preprocess_data.py --input hf://ORG/NAME: streamed at a revision, which PREFIX.json keeps; what is
refused."""

import json
from types import SimpleNamespace

import pytest

from tests.load_tool import exit_code, load_tool
from tests.problems import codes_of

ROWS = [{"text": "Who is there?", "id": 1}, {"text": "Stand and unfold yourself.", "id": 2}]
SHA = "0123456789abcdef0123456789abcdef01234567"


def words(prefix, name="hf://org/name"):
    return ["--input", name, "--output-prefix", prefix, "--tokenizer-type", "ByteTokenizer"]


def test_a_wrong_name(tmp_path, capfd):
    main = load_tool("preprocess_data").main
    assert exit_code(main, *words(tmp_path / "x", "hf://name")) == 2
    assert codes_of(capfd.readouterr().err.splitlines())[0] == "value-malformed"


def test_without_the_library(tmp_path, capfd, monkeypatch):
    tool = load_tool("preprocess_data")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert exit_code(tool.main, *words(tmp_path / "x")) == 2
    assert codes_of(capfd.readouterr().err.splitlines()) == ["package-missing"]


@pytest.mark.peers
def test_rows_are_streamed_and_the_revision_is_kept(tmp_path, monkeypatch, capfd):
    """A table of the library `datasets` stands for the hub's."""
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def load_dataset(*names, **more):
        asked.append((names, more))
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda *a, **b: SimpleNamespace(sha=SHA))
    main = load_tool("preprocess_data").main
    for more in ((), ("--overwrite",)):
        assert (
            exit_code(main, *words(tmp_path / "x", "hf://org/name:en@main/validation"), *more) == 0
        )
    wanted = {"split": "validation", "revision": SHA, "streaming": True}
    assert asked == [(("org/name", "en"), wanted)]  # the second time the file is there
    table = json.loads((tmp_path / "x_text_document.json").read_text())
    assert table["hub"] == [f"org/name:en@{SHA}/validation"] and table["documents"] == 2
    assert table["text_bytes"] == sum(len(row["text"]) for row in ROWS)

    def refuse(*a, **b):
        raise OSError("offline")

    monkeypatch.setattr(hub.HfApi, "dataset_info", refuse)
    assert exit_code(main, *words(tmp_path / "y")) == 1
    assert codes_of(capfd.readouterr().err.splitlines()[-1:]) == ["file-not-readable"]
    assert not list(tmp_path.glob("y*"))
