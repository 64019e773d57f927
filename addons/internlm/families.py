"""InternLM's families of Hugging Face models: see addons/convert/family_table.py."""

from __future__ import annotations

from collections.abc import Mapping

from ..convert.config_keys import Keys
from ..convert.dialect import Dialect, Key
from ..convert.family_table import (
    ATTENTION_BIASES,
    FC1,
    FC2,
    INPUT_NORM,
    LINEAR_QKV,
    MLP_NORM,
    PROJ,
    QKV_BIAS,
    Family,
    like_llama,
    llama_names,
)
from ..convert.links import GATE_UP, Names


def _internlm2_names() -> Names:
    """InternLM2 keeps queries, keys and values by query group, as we do; w1 is the gate, w3 the up
    matrix."""
    prefix = "model.layers.{}."
    return llama_names(
        {
            "embedding.word_embeddings": "model.tok_embeddings",
            "output_layer": "output",
            INPUT_NORM: prefix + "attention_norm",
            MLP_NORM: prefix + "ffn_norm",
            LINEAR_QKV: prefix + "attention.wqkv",
            PROJ: prefix + "attention.wo",
            FC1: ((prefix + "feed_forward.w1", prefix + "feed_forward.w3"), GATE_UP),
            FC2: prefix + "feed_forward.w2",
        }
    )


def _internlm_rotary(keys: Keys) -> None:
    rotary = keys.take("rotary", {}, dict)
    if rotary.get("type", "dynamic") not in ("dynamic", "origin"):
        keys.refuse("rotary", rotary, "the types dynamic and origin can be")
    if "base" in rotary:
        keys.table = keys.table | {"rope_theta": rotary["base"]}


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        like_llama(
            "internlm",
            "InternLMForCausalLM",
            llama_names(),
            Dialect(
                keys=(Key("bias", True, ATTENTION_BIASES),),
                first=_internlm_rotary,
                written=lambda m: {"rotary": {"base": m.rotary_base, "type": "dynamic"}},
                omitted=(
                    "head_dim num_key_value_heads rope_theta rope_scaling rope_parameters"
                ).split(),
            ),
        ),
        like_llama(
            "internlm2",
            "InternLM2ForCausalLM",
            _internlm2_names(),
            Dialect(
                keys=(Key("bias", True, ATTENTION_BIASES),),
                omitted=("head_dim", "rope_parameters"),
            ),
        ),
        like_llama(
            "internlm3",
            "InternLM3ForCausalLM",
            llama_names(),
            Dialect(
                keys=(
                    Key("qkv_bias", False, QKV_BIAS),
                    Key("bias", False, ("add_attention_output_bias", "add_mlp_bias")),
                ),
                omitted=("rope_parameters",),
            ),
        ),
    )
}
