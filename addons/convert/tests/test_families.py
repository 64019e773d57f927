"""Every family of Hugging Face models against transformers: import, logits, gradients, export, and
the same from a checkpoint of 2 x 2 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.addons.convert.config_keys import Keys
from megatron.addons.convert.families import FAMILIES, read_config
from megatron.addons.convert.huggingface import hf_export, hf_import
from megatron.addons.convert.links import links_of
from megatron.addons.convert.tests.corners import ROWS
from megatron.addons.convert.tests.hf_models import (
    IDS,
    POSITIONS,
    REMOTE,
    VOCAB,
    as_compared,
    config_of,
    make,
    rewrite_on_ranks,
    same_model,
)
from megatron.config.model import ModelConfig
from megatron.inference.load_model import TrainedModel, open_trained_model

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.peers

KNOWN = [name for name in FAMILIES if name not in REMOTE]
OTHERS = [f"{name} {variant}" for name, row in ROWS.items() for variant in row.variants]
QUICK = ("gpt2", "llama", "qwen2 tied", "qwen3", "phi3", "glm")
SHARD = 40_000
LOGITS, GRADIENTS = 1e-5, 1e-4  # as docs/families.md says


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_has_its_own_context_and_window(name):
    table = config_of(name).to_dict()
    refused = dict(ROWS[name].refused) if name in ROWS else {}
    windows = "sliding_window" in table and "sliding_window" not in refused
    if windows:
        table |= {"sliding_window": POSITIONS // 2, "use_sliding_window": True}
        table["max_window_layers"] = 2
    if "sliding_attention" not in (table.get("layer_types") or ()):
        table.pop("layer_types", None)
    table["architectures"] = None
    keys = Keys(table, "config.json", ignored=("use_sliding_window",))
    _, model, _ = read_config(keys)
    assert model.seq_length == POSITIONS and (not windows or model.window == POSITIONS // 2)


def opened(folder: Path) -> TrainedModel:
    return open_trained_model(str(folder), device="cpu")


def by_file(theirs: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients under the names of its files: transformers saves them as it saves the weights, which
    it has under other names in memory, experts of a layer as one tensor."""
    grads = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    theirs.save_pretrained(folder, state_dict=grads)
    return safetensors.load_file(folder / "model.safetensors")


def gradients(
    ours: torch.nn.Module, model: ModelConfig, theirs: torch.nn.Module, family: str, folder: Path
) -> float:
    """The largest difference of their gradients, relative to each tensor's largest one, after
    carrying ours to their names. Writes `folder`."""
    labels = IDS.roll(1, 1)
    ours.requires_grad_(True)
    ours(IDS, labels=labels).mean().backward()
    cross_entropy(theirs(IDS).logits.flatten(0, 1), labels.flatten()).backward()
    mine = {name: p.grad for name, p in ours.named_parameters()}
    found = by_file(theirs, folder)
    worst = 0.0
    for link in links_of(model, VOCAB, FAMILIES[family].names):
        grad = mine.pop(link.native_name)
        if link.native_name.endswith("router.expert_bias"):
            assert grad is None
            continue
        whole = grad[: link.shape[0]]
        for name, grad in zip(link.foreign_names, link.split(whole), strict=True):
            expected = found.pop(name)
            if expected.abs().max() < 1e-7:  # of a router of one expert: 0 but for rounding
                assert grad.abs().max() < 1e-7
                continue
            largest = expected.abs().max().clamp(min=1e-6)
            worst = max(worst, ((grad - expected).abs().max() / largest).item())
    assert not mine and not found
    return worst


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.campaign)
        for name in (*KNOWN, *OTHERS)
    ],
)
def test_a_family_is_the_model_of_transformers(name, tmp_path):
    family = name.partition(" ")[0]
    model = make(transformers, name, tmp_path / "hf")
    hf_import(tmp_path / "hf", tmp_path / "ours", tokenizer=False)
    ours = opened(tmp_path / "ours")
    with as_compared(family, ours.model, model) as (mine, theirs):
        with torch.no_grad():
            expected = theirs(IDS).logits
            logits = (mine(IDS) - expected).abs().max().item()
        worst = gradients(mine, ours.config.model, theirs, family, tmp_path / "gradients")
    assert expected.std() > 0.3
    assert logits < LOGITS
    assert worst < GRADIENTS

    hf_export(tmp_path / "ours", tmp_path / "back", shard_bytes=SHARD)
    same_model(transformers, model, tmp_path / "back")
    rewrite_on_ranks(tmp_path / "ours", tmp_path / "ranks", tp=2, pp=2)
    with as_compared(family, opened(tmp_path / "ranks").model, model) as (mine, _):
        with torch.no_grad():
            torch.testing.assert_close(mine(IDS), expected, rtol=0, atol=LOGITS)
    # This copy does not know where the model came from: all of config.json follows from our flags.
    hf_export(tmp_path / "ranks", tmp_path / "from_ranks", family=family, shard_bytes=SHARD)
    assert len(list((tmp_path / "from_ranks").glob("*.safetensors"))) > 5
    same_model(transformers, model, tmp_path / "from_ranks")
