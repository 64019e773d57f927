"""Exports of every family, with all pairs of features that it can express, against transformers in
float32. `python -m megatron.addons.convert.tests.test_verified_exports [NAME ...]` writes what agrees
to addons/convert/verified_exports.json."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.addons.convert.config_keys import Keys
from megatron.addons.convert.families import (
    FAMILIES,
    PLAIN,
    VERIFIED,
    config_for,
    features,
    read_config,
)
from megatron.addons.convert.family_table import Family
from megatron.addons.convert.links import ConversionError, links_of
from megatron.addons.convert.tests.corners import ROWS
from megatron.addons.convert.tests.hf_models import (
    IDS,
    REMOTE,
    VOCAB,
    as_known,
    config_of,
)
from megatron.config.model import ModelConfig
from tests.core.model.tiny import tiny_model

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.peers

Flags = dict[str, Any]
BIASES = ("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias")
# What a family may have instead of its default configuration, one of each at a time.
CHOICES: tuple[Sequence[Flags], ...] = (
    [
        {"rotary_seq_len_interpolation_factor": 4},
        {"use_rope_scaling": True, "rope_scaling_factor": 4.0},
        {"use_rope_scaling": False},
        {
            "use_rope_scaling": False,
            "rope_type": "yarn",
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    [{"rotary_percent": share} for share in (0.5, 1.0)],
    [{"no_rope_freq": "2"}],
    [
        {"window_size": (4, 0)},
        {"window_size": (4, 0), "window_attn_skip_freq": "2"},
        {"window_size": (4, 0), "window_attn_skip_freq": "2", "no_rope_freq": "2"},
        {"window_size": (4, 0), "window_attn_skip_freq": "2", "window_rotary_base": 50},
    ],
    [{"attn_logit_softcapping": cap} for cap in (None, 0.5)],
    [{"final_logit_softcapping": cap} for cap in (None, 0.5)],
    [{"rotary_interleaved": choice} for choice in (False, True)],
    [{"position_embedding_type": kind} for kind in ("rope", "none")],
    [{"group_query_attention": groups != 4, "num_query_groups": groups} for groups in (1, 2, 4)],
    [{"kv_channels": width} for width in (None, 24)],
    [dict(zip(BIASES, on, strict=True)) for on in itertools.product((False, True), repeat=3)],
    [{"untie_embeddings_and_output_weights": choice} for choice in (False, True)],
    [{"use_parallel_residual": choice} for choice in (False, True)],
    [{"normalization": kind} for kind in ("LayerNorm", "RMSNorm")],
    [{"apply_layernorm_1p": choice} for choice in (False, True)],
    [
        {"qk_layernorm": one, "qk_layernorm_all_heads": whole}
        for one, whole in ((False, False), (True, False), (True, True))
    ],
    [
        {"swiglu": True},
        {"geglu": True},
        {"squared_relu": True},
        {"openai_gelu": True},
        {"bias_gelu_fusion": False},
    ],
    [{"moe_layer_freq": pattern} for pattern in ("1", "[1,0,1]")],
    [{"moe_router_pre_softmax": choice} for choice in (False, True)],
    [{"moe_router_topk": number} for number in (1, 2)],
    [{"moe_shared_expert_intermediate_size": size} for size in (None, 48)],
    [{"moe_shared_expert_gate": choice} for choice in (False, True)],
    [{"moe_router_topk_scaling_factor": 2.0}],
    [{"moe_router_normalization": choice} for choice in ("always", "never")],
    [
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_group_score_topk": n}
        for n in (1, 2)
    ],
    [{"rotary_ntk_alpha": 3.0}],
    [{"qk_layernorm_after_rope": choice} for choice in (False, True)],
    [{"linear_attention_freq": "[1,1,1]"}],
)
# Numbers, of which any other than the default shows that it is read.
NUMBERS = (
    {"rotary_base": 777},
    {"norm_epsilon": 3e-3},
    {"embedding_multiplier": 3.0},
    {"residual_multiplier": 0.5},
    {"softmax_scale": 0.2},
    {"logits_scaling": 0.7},
    {"activation_func_clamp_value": 0.5},
)
ACTIVATIONS = {"swiglu": False, "geglu": False, "squared_relu": False, "openai_gelu": False}
# of REMOTE families: InternLM's own code knows other types of rope_scaling
NOT_REMOTE = {"rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_type"}
# what Ling 2 may have and GLM-4.5, as which transformers computes it, not; in test_ling.py it is
NOT_OF_GLM = (
    {"add_attention_output_bias": True}.items(),
    {"moe_shared_expert_intermediate_size": None}.items(),
)
IDS_OF_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
TOLERANCE = 1e-4  # of the largest logit
TABLE = json.loads(VERIFIED.read_text(encoding="utf-8"))


def expressed(family: Family, model: ModelConfig) -> dict[str, Any] | None:
    """config.json, if the family has it."""
    try:
        return config_for(family, model, VOCAB, IDS_OF_TOKENS)
    except ConversionError:
        return None


def with_flags(model: ModelConfig, flags: Flags) -> ModelConfig:
    if flags.keys() & ACTIVATIONS.keys():
        flags = ACTIVATIONS | flags
    return replace(model, **flags)


def base_of(name: str) -> ModelConfig:
    """A model of the family with 3 layers, and with other numbers than the defaults."""
    if name in REMOTE:
        sizes = dict(num_layers=3, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96)
        model = ModelConfig(**sizes, seq_length=32, max_position_embeddings=32, **ROWS[name].flags)
    else:
        config = config_of(name).to_diff_dict()
        config["architectures"] = [FAMILIES[name].architecture]
        model = read_config(Keys(config, "config.json"))[1]
        model = replace(model, num_layers=3, moe_layer_freq="1", no_rope_freq=None)
        model = replace(model, window_size=None, window_attn_skip_freq=None)
        model = replace(model, window_rotary_base=None)
        if model.linear_attention_freq:
            model = replace(model, linear_attention_freq="2")
    for flags in NUMBERS:
        changed = with_flags(model, flags)
        if expressed(FAMILIES[name], changed):
            model = changed
    return model


def pairs_of(model: ModelConfig) -> set[tuple]:
    """All pairs of its features, in the order of their names."""
    found = [(name, json.dumps(value)) for name, value in sorted(features(model).items())]
    return set(itertools.combinations(found, 2))


@torch.no_grad()
def gap(name: str, model: ModelConfig, folder: Path) -> float:
    """The largest difference of the logits of this model and of transformers' of its export, as a
    share of the largest."""
    family = FAMILIES[name]
    ours = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **vars(model)).eval()
    tensors = {p.sharding.name: p for p in ours.parameters()}
    state = {
        theirs: part.contiguous()
        for link in links_of(model, VOCAB, family.names)
        for theirs, part in zip(
            link.foreign_names, link.split(tensors[link.native_name]), strict=True
        )
    } | {theirs: torch.tensor(value) for theirs, value in family.constant_names(model).items()}
    config = config_for(family, model, VOCAB, IDS_OF_TOKENS)
    if name in REMOTE:
        config, state = as_known(config, state)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs, report = load(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    logits = theirs.eval()(IDS, use_cache=False).logits
    assert logits.std() > 0.3
    return ((ours(IDS) - logits).abs().max() / logits.abs().max()).item()


def loads(name: str, model: ModelConfig, folder: Path) -> bool:
    """Can the family, and transformers' own checks, express it?"""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        return expressed(FAMILIES[name], model) is not None and gap(name, model, folder) >= 0
    except AssertionError:
        raise
    except Exception:  # transformers' validators have errors of their own
        return False


def models_of(name: str, folder: Path) -> Iterator[ModelConfig]:
    """Models that the family can express, until every pair of features was there. Each choice alone
    is tried in `folder` first."""
    base = base_of(name)
    family = FAMILIES[name]
    choices = []
    for dimension in CHOICES:
        alone = {json.dumps(features(base)): {}}
        for flags in dimension:
            model = with_flags(base, flags)
            if name in REMOTE and flags.keys() & NOT_REMOTE:
                continue
            if name.startswith("bailing") and any(flags.items() >= each for each in NOT_OF_GLM):
                continue
            if loads(name, model, folder / "alone"):
                alone.setdefault(json.dumps(features(model)), flags)
        choices.append(list(alone.values()))
    everything = list(itertools.product(*choices))
    random.Random(1).shuffle(everything)
    covered: set[tuple] = set()
    for combination in everything:
        model = base
        for flags in combination:
            model = with_flags(model, flags)
        pairs = pairs_of(model)
        if not pairs <= covered and expressed(family, model):
            covered |= pairs
            yield model


def entry_of(models: Sequence[ModelConfig]) -> dict[str, Any]:
    """What the table says of a family with these models."""
    found = [features(model) for model in models]
    values = {name: sorted({json.dumps(one[name]) for one in found}) for name in sorted(found[0])}
    covered = set().union(*map(pairs_of, models))
    several = [(name, value) for name in values for value in values[name]]
    apart = [
        (a, json.loads(x), b, json.loads(y))
        for (a, x), (b, y) in itertools.combinations(several, 2)
        if a != b and ((a, x), (b, y)) not in covered
    ]
    listed = {name: [json.loads(value) for value in values[name]] for name in values}
    return {
        "features": {name: of for name, of in listed.items() if of != [PLAIN[name]]},
        "apart": [list(pair) for pair in apart],
    }


def compared(name: str, folder: Path) -> dict[str, Any]:
    """The entry of a family, all of whose models were compared."""
    models = list(models_of(name, folder))
    for number, model in enumerate(models):
        assert gap(name, model, folder / str(number)) < TOLERANCE, features(model)
    return entry_of(models)


MARKS = {"gpt_neox": (), "qwen3_moe": pytest.mark.campaign, "gemma2": pytest.mark.campaign}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.sweep)) for name in FAMILIES],
)
def test_the_exports_of_the_table_agree_with_transformers(name, tmp_path):
    assert compared(name, tmp_path) == TABLE["families"][name]


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "olmoe"])
def test_sinkhorn_is_the_unnormalized_top_k(name, tmp_path):
    router = dict(moe_router_pre_softmax=False, moe_router_load_balancing_type=("sinkhorn",))
    assert gap(name, replace(base_of(name), **router), tmp_path / "hf") < TOLERANCE


def test_the_table_has_every_family():
    assert TABLE["transformers"] == transformers.__version__
    assert TABLE["families"].keys() >= FAMILIES.keys()


def write(names: Sequence[str]) -> None:
    """The entries of these families, or of all, one feature a line."""
    if not names:
        TABLE.update(transformers=transformers.__version__, families={})
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or list(FAMILIES):
            (Path(scratch) / name).mkdir()
            TABLE["families"][name] = compared(name, Path(scratch) / name)
    text = re.sub(r"\[[^][]*\]", lambda m: " ".join(m[0].split()), json.dumps(TABLE, indent=1))
    VERIFIED.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
