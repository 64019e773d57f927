"""Every family of Hugging Face models against transformers: import, logits, gradients, export, and
the same from a checkpoint of 2 x 2 ranks. Writes the table in docs/families.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.inference.load_model import TrainedModel, open_trained_model
from tests.forkrun import ROOT
from tests.tools.convert.hf_models import (
    IDS,
    REMOTE,
    VOCAB,
    configs,
    make,
    rewrite_on_ranks,
    same_model,
)
from tools.convert.families import FAMILIES
from tools.convert.huggingface import hf_export, hf_import
from tools.convert.links import links_of
from tools.convert.options import family_names

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.peers

HEAD = """# Hugging Face families: measured

Bounds of the largest absolute difference of the logits, and of the gradients relative to each tensor's largest value, between this suite
and transformers {version} with the same weights (float32, tiny models of transformers' default configuration of each
family, scaled to width 64 and 4 layers; cross-entropy of random token ids).

For every row the test also exports the model and requires all tensors, bit for bit, and the logits of transformers to be
the original ones: from the imported checkpoint, and from a checkpoint written by 4 ranks (tensor parallelism 2, pipeline
parallelism 2; models with experts: 8 ranks, also expert parallelism 2). internlm, internlm2 and internlm3 are remote code, which
transformers does not contain; the first two are compared with Llama models of the same weights in
tests/features/internlm/test_huggingface.py, the third with its formulas in plain torch (float64; logits, gradients, round trip, TP 2
PP 2) in tests/features/internlm/test_internlm3.py. Which exports with which features were compared:
tools/convert/verified_exports.json (`python -m tests.tools.convert.test_verified_exports`).

`pytest tests/tools/convert/test_families.py` writes this page.

| family | class | parameters | logits | gradients |
|---|---|---|---|---|
"""
PAGE = ROOT / "docs/families.md"
ROW = "| {} | {} | {:,} | < {:.0e} | < {:.0e} |\n"
KNOWN = [name for name in FAMILIES if name not in REMOTE]
OTHERS = [name for name in configs(transformers) if name not in KNOWN]
QUICK = ("gpt2", "llama", "qwen2 tied", "qwen3", "phi3", "glm")
SHARD = 40_000

Table = dict[str, tuple[str, int, float, float]]


def row(name: str, kind: str, parameters: int, logits: float, gradients: float) -> str:
    """That of one family; powers of ten, at least 1e-5, which do not depend on the machine."""
    bounds = [max(1e-5, 10.0 ** math.ceil(math.log10(value))) for value in (logits, gradients)]
    return ROW.format(name, kind, parameters, *bounds)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """The row of each family; those of all families make the page."""
    found: Table = {}
    yield found
    if found.keys() >= set(KNOWN):
        rows = "".join(row(name, *found[name]) for name in sorted(KNOWN))
        head = HEAD.format(version=transformers.__version__)
        PAGE.write_text(head + rows)


def opened(folder: Path) -> TrainedModel:
    return open_trained_model(str(folder), device="cpu")


def by_file(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model under the names of its files: in memory transformers has the experts of a
    layer in one tensor, and Mixtral's other names."""
    found = {}
    for name, value in tensors.items():
        layer, _, fused = name.partition(".mlp.experts.")
        if fused == "gate_up_proj":
            for expert, rows in enumerate(value):
                for part, half in zip(("gate", "up"), rows.chunk(2), strict=True):
                    found[f"{layer}.mlp.experts.{expert}.{part}_proj.weight"] = half
        elif fused == "down_proj":
            for expert, one in enumerate(value):
                found[f"{layer}.mlp.experts.{expert}.down_proj.weight"] = one
        else:
            found[name] = value
    return found


MIXTRAL = (("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))


def in_memory(name: str) -> str:
    """A name of Mixtral's or GPT-NeoX's files as by_file has it; other names as they are."""
    if name == "embed_out.weight":
        return "lm_head.weight"
    if ".block_sparse_moe." in name:
        for theirs, usual in MIXTRAL:
            name = name.replace(f".{theirs}.", f".{usual}.")
    return name


def gradients(trained: TrainedModel, theirs: torch.nn.Module, family: str) -> float:
    """The largest difference of their gradients, relative to each tensor's largest one, after
    carrying ours to their names."""
    labels = IDS.roll(1, 1)
    ours = trained.model.requires_grad_(True)
    ours(IDS, labels=labels).mean().backward()
    cross_entropy(theirs(IDS).logits.flatten(0, 1), labels.flatten()).backward()
    mine = {name: p.grad for name, p in ours.named_parameters()}
    found = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    found = by_file(found)
    worst = 0.0
    for link in links_of(trained.config.model, VOCAB, FAMILIES[family].names):
        whole = mine.pop(link.native_name)[: link.shape[0]]
        for name, grad in zip(link.foreign_names, link.split(whole), strict=True):
            expected = found.pop(in_memory(name))
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
def test_a_family_is_the_model_of_transformers(name, table, tmp_path):
    family = name.partition(" ")[0]
    model = make(transformers, name, tmp_path / "hf")
    hf_import(tmp_path / "hf", tmp_path / "ours", tokenizer=False)
    ours = opened(tmp_path / "ours")
    with torch.no_grad():
        expected = model(IDS).logits
        logits = (ours.model(IDS) - expected).abs().max().item()
    assert expected.std() > 0.3
    assert logits < 1e-5
    worst = gradients(ours, model, family)
    assert worst < 1e-4

    hf_export(tmp_path / "ours", tmp_path / "back", shard_bytes=SHARD)
    same_model(transformers, model, tmp_path / "back")
    rewrite_on_ranks(tmp_path / "ours", tmp_path / "ranks", tp=2, pp=2)
    with torch.no_grad():
        torch.testing.assert_close(
            opened(tmp_path / "ranks").model(IDS), expected, rtol=0, atol=1e-5
        )
    # This copy does not know where the model came from: all of config.json follows from our flags.
    hf_export(tmp_path / "ranks", tmp_path / "from_ranks", family=family, shard_bytes=SHARD)
    assert len(list((tmp_path / "from_ranks").glob("*.safetensors"))) > 5
    same_model(transformers, model, tmp_path / "from_ranks")
    count = sum(p.numel() for p in model.parameters())
    table[name] = type(model).__name__, count, logits, worst


def test_the_command_line_names_every_family():
    assert sorted(FAMILIES) == list(family_names())
