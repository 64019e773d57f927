"""README.md of an export, read by huggingface_hub: what the checkpoint knows, and nothing else."""

from __future__ import annotations

import re

import pytest

from megatron.addons.convert.tests.hf_models import VOCAB, make
from megatron.version import VERSION
from tests.runs import SMALL, train

transformers = pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.peers


def card_of(folder) -> tuple[dict, dict[str, str]]:
    """The table of contents for the hub, and the rows of the page."""
    card = hub.ModelCard.load(folder / "README.md")
    return card.data.to_dict(), dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", card.text, re.M))


def test_a_model_that_was_trained_here(tmp_path, convert):
    more = f"--tensor-model-parallel-size 2 --train-range-to-skip 3 3 --save {tmp_path / 'run'}"
    train(tmp_path, [*SMALL, *more.split(), "--mock-data", "--train-iters", "4"], 2)
    convert("hf-export", tmp_path / "run", tmp_path / "hf")
    data, rows = card_of(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert data == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [model.config.model_type, "megatron-gpt-pretraining"],
    }
    assert rows["parameters"] == f"{model.num_parameters():,}"
    assert rows["vocabulary"] == f"{model.config.vocab_size:,} rows"
    assert rows["iteration"] == "4"  # three of them trained on 8 samples of 32 tokens
    assert re.findall(r"[\d,]*\d", rows["trained on"]) == ["24", "32", "768"]
    assert rows["tokenizer"] == "NullTokenizer" and VERSION in rows["library"]
    assert (
        "started from" not in rows and str(tmp_path) not in (tmp_path / "hf/README.md").read_text()
    )


def test_a_model_that_was_imported(tmp_path, convert):
    model = make(transformers, "llama tied", tmp_path / "hf")
    convert("hf-import", tmp_path / "hf", tmp_path / "new/folders/ours")
    convert("hf-export", tmp_path / "new/folders/ours", tmp_path / "other/back")
    data, rows = card_of(tmp_path / "other/back")
    assert data["tags"][0] == "llama" and "llama" in rows["started from"]
    assert (rows["iteration"], rows["vocabulary"]) == ("0", f"{VOCAB} rows")
    assert rows["parameters"] == f"{model.num_parameters():,}" and "trained on" not in rows


def test_a_file_where_a_folder_should_be(tmp_path, convert):
    make(transformers, "llama", tmp_path / "hf")
    (tmp_path / "file").write_text("")
    target = tmp_path / "file/ours"
    assert str(tmp_path / "file") in convert("hf-import", tmp_path / "hf", target, fails=True)
