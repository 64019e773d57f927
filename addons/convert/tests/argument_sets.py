"""Arguments of Megatron-LM's and Megatron-DeepSpeed's releases, as their parsers set them, for the
converter's tests."""

from __future__ import annotations

import functools
import json
from typing import Any

from megatron.config.model import ModelConfig
from tests.forkrun import ROOT

GOLDEN = ROOT / "tests" / "golden" / "megatron_arguments.txt"
CORE_016, DEEPSPEED = "QW"


@functools.cache
def releases() -> dict[str, dict[str, Any]]:
    """By letter of the release (see the head of the file), what it saves of a command line without
    flags."""
    found: dict[str, dict] = {}
    letters = ""
    for line in GOLDEN.read_text().splitlines():
        if line[0] == "[":
            letters = line[1:-1]
        for word in [] if line[0] in "#[" else line.split():
            name, _, value = word.partition("=")
            for letter in letters:
                found.setdefault(letter, {})[name] = json.loads(value)
    return found


def arguments_of(letter: str, model: ModelConfig, **more: Any) -> dict[str, Any]:
    """What a release saves of this model's command line; `more` are other arguments."""
    known = releases()[letter]
    flags = vars(model) | {
        "num_query_groups": model.query_groups,
        "num_key_value_heads": model.query_groups,
        "use_rotary_position_embeddings": model.positions == "rope",
        "add_position_embedding": model.positions == "learned_absolute",
        "layernorm_epsilon": model.norm_epsilon,
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "rope_theta": model.rotary_base,
        "ffn_hidden_size": model.ffn,
        "kv_channels": model.head_dim,
    }
    return known | {name: value for name, value in flags.items() if name in known} | more
