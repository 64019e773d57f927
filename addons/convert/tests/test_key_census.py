"""Every key of config.json, of every family, set to other values: what transformers computes
otherwise then, we import otherwise or refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron.addons.convert.config_keys import Keys
from megatron.addons.convert.families import FAMILIES, read_config
from megatron.addons.convert.links import ConversionError
from megatron.addons.convert.tests.hf_models import IDS, REMOTE, make

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.peers, pytest.mark.campaign]
KNOWN = [name for name in FAMILIES if name not in REMOTE]
# what files of older releases have beside the keys of a configuration
OLDER = {
    "rope_theta": (777.0, 500000.0),
    "partial_rotary_factor": (0.5,),
    "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 777.0}, {}),
    "sliding_window": (4, None),
    "attention_bias": (True,),
    "head_dim": (8,),
    "hidden_act": ("relu",),
    "tie_word_embeddings": (True, False),
}


def others(key: str, value: Any) -> list[Any]:
    """Values that a key may have instead of this one."""
    match value:
        case bool():
            return [not value]
        case int():
            return [0, 1, value + 1, 2 * value, None]
        case float():
            return [0.0, 1.0, 1.5 * value + 0.1]
        case str():
            return ["relu", "gelu", "silu", "none"]
        case list():
            return [value[::-1], value[:1], []]
        case dict():
            each = [{**value, name: new} for name in value for new in others(name, value[name])]
            return [{}, *each]
        case _:
            return [1, True, 0.5, "relu"]


def logits(table: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """What transformers computes with these weights; None where it makes no such model of them."""
    try:
        config = transformers.CONFIG_MAPPING[table["model_type"]].from_dict(
            json.loads(json.dumps(table))
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            return model(IDS).logits
    except Exception:  # its configurations, layers and torch all have errors of their own
        return None


@pytest.mark.parametrize(
    "family",  # a third of them in CI
    [
        pytest.param(name, marks=[pytest.mark.sweep] * (number % 3 > 0))
        for number, name in enumerate(KNOWN)
    ],
)
def test_no_key_is_silently_read_as_something_else(family, tmp_path):
    model = make(transformers, family, tmp_path)
    base = json.loads((tmp_path / "config.json").read_text())
    weights = model.state_dict()
    arch = read_config(Keys(dict(base), "config.json"))[1]
    expected = logits(base, weights)
    assert expected is not None
    flips = [(key, value) for key in base for value in others(key, base[key])]
    flips += [(key, value) for key in OLDER for value in OLDER[key]]
    # as files of before transformers 5 have them
    older = {key: value for key, value in base.items() if key != "rope_parameters"}
    tables = [{**table, key: value} for table in (base, older) for key, value in flips]
    silent = []
    refused = 0
    for table in tables:
        try:
            read = read_config(Keys(dict(table), "config.json"))[1]
        except (ConversionError, ValueError):
            refused += 1
            continue
        computed = logits(table, weights) if read == arch else None
        if computed is not None and not torch.allclose(computed, expected, atol=1e-4):
            silent.append({key: table.get(key) for key in table if table[key] != base.get(key)})
    assert silent == []
    assert 20 < refused < len(tables)
