"""The families of Hugging Face models that are converted: names of their tensors, and config.json
<-> our flags.

One `Family` each. A model may be written as a family if reading the written config.json back
gives the same model (`config_for`), so what a family cannot express is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config import architecture
from megatron.config.model import ModelConfig
from megatron.kernels.rotary import LLAMA3_CONTEXT, LLAMA3_HIGH, LLAMA3_LOW
from tools.convert.config_keys import Keys
from tools.convert.links import FUSED_QKV, GATE_UP, QKV, SAME, TRANSPOSED, ConversionError, Names

Flags = dict[str, Any]
_LAYER = "decoder.layers.{}."
_LLAMA3 = {
    "low_freq_factor": LLAMA3_LOW,
    "high_freq_factor": LLAMA3_HIGH,
    "original_max_position_embeddings": LLAMA3_CONTEXT,
}
_WINDOW = 4096  # sliding_window of mistral, qwen2 and qwen3 where the key is missing
_FIRST_WINDOW_LAYER = 28  # and max_window_layers of qwen2 and qwen3


@dataclass(frozen=True)
class Family:
    """One family: its model_type and class in config.json, its names, and the two directions of its
    configuration.

    `buffers` are tensors that old files hold and that follow from the configuration. `optional` may
    stand before every name or be missing.
    """

    model_type: str
    architecture: str
    names: Names
    read: Callable[[Keys], Flags]
    write: Callable[[ModelConfig], dict[str, Any]]
    buffers: re.Pattern[str]
    optional: str = ""


def _llama_names(**changes: str) -> Names:
    """Llama's names, which most families have; `changes` are other names of some of our
    parameters."""
    at = "model.layers.{}."
    table = {
        "embedding.word_embeddings": "model.embed_tokens",
        _LAYER + "input_layernorm": at + "input_layernorm",
        _LAYER + "self_attention.q_layernorm": at + "self_attn.q_norm",
        _LAYER + "self_attention.k_layernorm": at + "self_attn.k_norm",
        _LAYER + "self_attention.linear_proj": at + "self_attn.o_proj",
        _LAYER + "pre_mlp_layernorm": at + "post_attention_layernorm",
        _LAYER + "mlp.linear_fc2": at + "mlp.down_proj",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
    }
    found = {ours: ((theirs,), SAME) for ours, theirs in (table | changes).items()}
    found[_LAYER + "self_attention.linear_qkv"] = (
        tuple(f"{at}self_attn.{x}_proj" for x in "qkv"),
        QKV,
    )
    found[_LAYER + "mlp.linear_fc1"] = ((at + "mlp.gate_proj", at + "mlp.up_proj"), GATE_UP)
    return found


def _internlm2_names() -> Names:
    """InternLM2 keeps queries, keys and values by query group, as we do; w1 is the gate, w3 the up
    matrix."""
    at = "model.layers.{}."
    return {
        **_llama_names(
            **{
                "embedding.word_embeddings": "model.tok_embeddings",
                "output_layer": "output",
                _LAYER + "input_layernorm": at + "attention_norm",
                _LAYER + "pre_mlp_layernorm": at + "ffn_norm",
                _LAYER + "self_attention.linear_proj": at + "attention.wo",
                _LAYER + "mlp.linear_fc2": at + "feed_forward.w2",
            }
        ),
        _LAYER + "self_attention.linear_qkv": ((at + "attention.wqkv",), SAME),
        _LAYER + "mlp.linear_fc1": ((at + "feed_forward.w1", at + "feed_forward.w3"), GATE_UP),
    }


def _gpt2_names() -> Names:
    """GPT-2's matrices are [in, out]."""
    at = "transformer.h.{}."
    return {
        "embedding.word_embeddings": (("transformer.wte",), SAME),
        "embedding.position_embeddings": (("transformer.wpe",), SAME),
        _LAYER + "input_layernorm": ((at + "ln_1",), SAME),
        _LAYER + "self_attention.linear_qkv": ((at + "attn.c_attn",), FUSED_QKV),
        _LAYER + "self_attention.linear_proj": ((at + "attn.c_proj",), TRANSPOSED),
        _LAYER + "pre_mlp_layernorm": ((at + "ln_2",), SAME),
        _LAYER + "mlp.linear_fc1": ((at + "mlp.c_fc",), TRANSPOSED),
        _LAYER + "mlp.linear_fc2": ((at + "mlp.c_proj",), TRANSPOSED),
        "decoder.final_layernorm": (("transformer.ln_f",), SAME),
        "output_layer": (("lm_head",), SAME),
    }


# --- config.json -> flags


def _read_gpt2(keys: Keys) -> Flags:
    activations = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
    activation = keys.take("activation_function", "gelu_new", str)
    if activation not in activations:
        keys.refuse("activation_function", activation, f"one of {', '.join(activations)} is")
    keys.must_be(
        "scale_attn_weights", True, why="scores are always divided by the root of the head's width"
    )
    keys.must_be(
        "scale_attn_by_inverse_layer_idx", False, why="scores are not divided by the layer's number"
    )
    keys.must_be("add_cross_attention", False, why="there is no encoder")
    width = keys.take("n_embd")
    positions = keys.take("n_positions")
    hidden_dropout = keys.take("resid_pdrop", 0.1, (float, int))
    embedding_dropout = keys.take("embd_pdrop", 0.1, (float, int))
    if embedding_dropout != hidden_dropout:
        keys.notes.append(
            f"embd_pdrop {embedding_dropout} is not used: --hidden-dropout {hidden_dropout} "
            "(resid_pdrop) applies to the embedding too"
        )
    return {
        "num_layers": keys.take("n_layer"),
        "hidden_size": width,
        "num_attention_heads": keys.take("n_head"),
        "ffn_hidden_size": keys.take("n_inner", 4 * width),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "norm_epsilon": keys.take("layer_norm_epsilon", 1e-5, (float, int)),
        "bias_gelu_fusion": activations.get(activation, True),
        "untie_embeddings_and_output_weights": not keys.take("tie_word_embeddings", True, bool),
        "attention_dropout": keys.take("attn_pdrop", 0.1, (float, int)),
        "hidden_dropout": hidden_dropout,
    }


def _read_llama_like(keys: Keys, kv_heads: int | None = None, head_dim: int | None = None) -> Flags:
    """What Llama and its kin share. `kv_heads`, `head_dim`: this family's default where the key is
    missing (null means num_attention_heads and hidden_size / num_attention_heads in every
    family)."""
    keys.must_be("hidden_act", "silu", why="gated MLPs have SiLU (--swiglu)")
    heads = keys.take("num_attention_heads")
    width = keys.take("hidden_size")
    groups = keys.take("num_key_value_heads", heads, absent=kv_heads or heads)
    positions = keys.take("max_position_embeddings")
    if heads and heads % groups:
        keys.problems.append(
            f"{keys.source}: num_attention_heads {heads} is no multiple of its {groups} groups"
        )
    usual = width // heads if heads else 0
    head = keys.take("head_dim", usual, absent=head_dim or usual)
    return {
        "num_layers": keys.take("num_hidden_layers"),
        "hidden_size": width,
        "num_attention_heads": heads,
        "ffn_hidden_size": keys.take("intermediate_size"),
        "kv_channels": None if head * heads == width else head,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "seq_length": positions,
        "max_position_embeddings": positions,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": keys.take("rms_norm_eps", 1e-6, (float, int)),
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not keys.take("tie_word_embeddings", False, bool),
        "attention_dropout": keys.take("attention_dropout", 0.0, (float, int)),
        **_read_rotary(keys),
    }


def _read_rotary(keys: Keys) -> Flags:
    """Rotary positions, as transformers 5 (rope_parameters) or older ones (rope_theta,
    rope_scaling) write them.

    Where a file has several of them, rope_scaling replaces rope_parameters, and what stands in it
    counts more than the top-level key of the same name: transformers' own order.
    """
    new = keys.take("rope_parameters", {}, dict)
    old = keys.take("rope_scaling", {}, dict)
    key, scaling = ("rope_scaling", old) if old else ("rope_parameters", new)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in scaling:
            keys.table = keys.table | {name: scaling[name]}
    partial = keys.take("partial_rotary_factor", 1.0, (float, int))
    if partial != 1:
        keys.refuse(
            "partial_rotary_factor",
            partial,
            f"{keys.table.get('model_type')} models rotate whole heads, and transformers does not "
            "read this key for them; remove it if the model was trained that way",
        )
    if keys.table.get("rope_theta", 0) is None:
        keys.refuse("rope_theta", None, "there is no base then; 10000.0 is the usual one")
    keys.must_be("rope_interleaved", False, why="these families rotate the two halves of a head")
    flags = {"rotary_base": keys.whole("rope_theta", 10000)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor", 1.0)
    # Dynamic NTK changes nothing within max_position_embeddings, and longer sequences are refused
    # here.
    if kind == "linear" and isinstance(factor, (int, float)) and factor == int(factor) >= 1:
        flags["rotary_seq_len_interpolation_factor"] = int(factor) if factor > 1 else None
    elif kind == "llama3" and all(scaling.get(name) == value for name, value in _LLAMA3.items()):
        flags |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    elif kind not in ("default", "dynamic", None):
        keys.refuse(
            key,
            scaling,
            "the types default, dynamic, linear with a whole factor, and llama3 with its own "
            "numbers can be",
        )
    return flags


def _no_window(keys: Keys, flags: Flags, used: bool = True, first: int = 0) -> Flags:
    """Refuse a sliding window shorter than the longest sequence, in any layer from `first` on
    (layer_types counts more); a missing one is 4096 in these families, and null is none."""
    window = keys.take("sliding_window", None, int, absent=_WINDOW)
    window = window if used else None
    types = keys.take("layer_types", [], list)
    positions = flags["max_position_embeddings"]
    layers = flags["num_layers"]
    slides = (
        any(kind != "full_attention" for kind in types)
        if types
        else window is not None and first < layers
    )
    if slides and window is None:
        keys.refuse("layer_types", sorted(set(types)), "every layer has full attention")
    elif slides and window < positions:
        keys.refuse(
            "sliding_window",
            window,
            f"attention reaches over all {positions} positions; up to {window} the model "
            f"is the same: give --max-position-embeddings {window}",
        )
    return flags


def _qwen_window(keys: Keys, flags: Flags) -> Flags:
    """As transformers: layers from max_window_layers on have the window, if use_sliding_window says
    so."""
    used = keys.take("use_sliding_window", False, bool)
    return _no_window(
        keys, flags, used, keys.take("max_window_layers", _FIRST_WINDOW_LAYER, (int,))
    )


def _read_llama(keys: Keys) -> Flags:
    bias = keys.take("attention_bias", False, bool)
    return _read_llama_like(keys) | {
        "add_qkv_bias": bias,
        "add_attention_output_bias": bias,
        "add_mlp_bias": keys.take("mlp_bias", False, bool),
    }


def _read_mistral(keys: Keys) -> Flags:
    return _no_window(keys, _read_llama_like(keys, kv_heads=8))


def _read_qwen2(keys: Keys) -> Flags:
    keys.must_be("use_mrope", False, why="positions are one number")
    return _qwen_window(keys, _read_llama_like(keys, kv_heads=32)) | {"add_qkv_bias": True}


def _read_qwen3(keys: Keys) -> Flags:
    bias = keys.take("attention_bias", False, bool)
    return _qwen_window(keys, _read_llama_like(keys, kv_heads=32, head_dim=128)) | {
        "qk_layernorm": True,
        "add_qkv_bias": bias,
        "add_attention_output_bias": bias,
    }


def _read_internlm(keys: Keys) -> Flags:
    rotary = keys.take("rotary", {}, dict)
    if rotary.get("type", "dynamic") not in ("dynamic", "origin"):
        keys.refuse("rotary", rotary, "the types dynamic and origin can be")
    if "base" in rotary:
        keys.table = keys.table | {"rope_theta": rotary["base"]}
    bias = keys.take("bias", True, bool)
    return _read_llama_like(keys) | {"add_qkv_bias": bias, "add_attention_output_bias": bias}


def _read_internlm2(keys: Keys) -> Flags:
    bias = keys.take("bias", True, bool)
    return _read_llama_like(keys) | {"add_qkv_bias": bias, "add_attention_output_bias": bias}


# --- flags -> config.json


def _write_gpt2(m: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": m.num_layers,
        "n_embd": m.hidden_size,
        "n_head": m.num_attention_heads,
        "n_inner": m.ffn,
        "n_positions": m.max_position_embeddings or m.seq_length,
        "layer_norm_epsilon": m.norm_epsilon,
        "activation_function": "gelu" if m.activation == "gelu (erf)" else "gelu_new",
        "tie_word_embeddings": m.tied,
        "initializer_range": m.init_method_std,
        "attn_pdrop": m.attention_dropout,
        "resid_pdrop": m.hidden_dropout,
        "embd_pdrop": m.hidden_dropout,
    }


def _write_llama_like(m: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": float(m.rotary_base), "rope_type": "default"}
    factor = m.rotary_seq_len_interpolation_factor
    if factor and factor > 1:
        rope |= {"rope_type": "linear", "factor": float(factor)}
    if m.use_rope_scaling:
        rope |= {"rope_type": "llama3", "factor": m.rope_scaling_factor, **_LLAMA3}
    old = {name: value for name, value in rope.items() if name != "rope_theta"}
    if rope["rope_type"] == "default":
        old = None
    return {
        "num_hidden_layers": m.num_layers,
        "hidden_size": m.hidden_size,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.query_groups,
        "head_dim": m.head_dim,
        "intermediate_size": m.ffn,
        "max_position_embeddings": m.max_position_embeddings or m.seq_length,
        "rms_norm_eps": m.norm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": m.tied,
        "rope_theta": float(m.rotary_base),
        "rope_scaling": old,
        "rope_parameters": rope,
        "initializer_range": m.init_method_std,
        "attention_dropout": m.attention_dropout,
    }


def _write_llama(m: ModelConfig) -> dict[str, Any]:
    return _write_llama_like(m) | {"attention_bias": m.qkv_bias, "mlp_bias": m.mlp_bias}


def _write_mistral(m: ModelConfig) -> dict[str, Any]:
    return _write_llama_like(m) | {"sliding_window": None}


def _write_qwen2(m: ModelConfig) -> dict[str, Any]:
    return _write_llama_like(m) | {"use_sliding_window": False, "sliding_window": None}


def _write_qwen3(m: ModelConfig) -> dict[str, Any]:
    return _write_qwen2(m) | {"attention_bias": m.qkv_bias}


def _write_internlm(m: ModelConfig) -> dict[str, Any]:
    common = _write_llama_like(m)
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "rope_parameters"):
        del common[key]
    return common | {"bias": m.qkv_bias, "rotary": {"base": m.rotary_base, "type": "dynamic"}}


def _write_internlm2(m: ModelConfig) -> dict[str, Any]:
    common = _write_llama_like(m)
    for key in ("head_dim", "rope_parameters"):
        del common[key]
    return common | {"bias": m.qkv_bias}


_ROTARY = re.compile(
    r"model\.layers\.\d+\.(self_attn|attention)\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)
_MASKS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            _gpt2_names(),
            _read_gpt2,
            _write_gpt2,
            _MASKS,
            "transformer.",
        ),
        Family("llama", "LlamaForCausalLM", _llama_names(), _read_llama, _write_llama, _ROTARY),
        Family("qwen2", "Qwen2ForCausalLM", _llama_names(), _read_qwen2, _write_qwen2, _ROTARY),
        Family("qwen3", "Qwen3ForCausalLM", _llama_names(), _read_qwen3, _write_qwen3, _ROTARY),
        Family(
            "mistral", "MistralForCausalLM", _llama_names(), _read_mistral, _write_mistral, _ROTARY
        ),
        Family(
            "internlm",
            "InternLMForCausalLM",
            _llama_names(),
            _read_internlm,
            _write_internlm,
            _ROTARY,
        ),
        Family(
            "internlm2",
            "InternLM2ForCausalLM",
            _internlm2_names(),
            _read_internlm2,
            _write_internlm2,
            _ROTARY,
        ),
    )
}


def read_config(keys: Keys, max_positions: int | None = None) -> tuple[Family, ModelConfig, int]:
    """(family, architecture, rows of the vocabulary) that a config.json says. Raises
    ConversionError.

    `max_positions` shortens the context (--max-position-embeddings).
    """
    model_type = keys.take("model_type", "", str)
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConversionError(
            f"{keys.source}: model_type {model_type!r} is not converted; these are: "
            f"{', '.join(FAMILIES)}"
        )
    named = keys.take("architectures", [family.architecture], list)
    if named != [family.architecture]:
        keys.refuse("architectures", named, f"{family.architecture} is converted")
    keys.must_be("quantization_config", why="give the model in full precision")
    if max_positions is not None:
        _shorten(keys, max_positions)
    flags = family.read(keys)
    rows = keys.take("vocab_size")
    flags = {
        "init_method_std": keys.take("initializer_range", 0.02, (float, int)),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    } | flags
    keys.done()
    return family, ModelConfig(**flags), rows


def _shorten(keys: Keys, max_positions: int) -> None:
    there = keys.table.get("max_position_embeddings")
    if not isinstance(there, int) or not 0 < max_positions <= there:
        keys.problems.append(
            f"--max-position-embeddings {max_positions}: can only shorten the context of a model "
            f"with rotary positions; {keys.source} has "
            f"{there if there else 'a table of positions'}"
        )
    else:
        keys.table = keys.table | {"max_position_embeddings": max_positions}


def config_for(
    family: Family, model: ModelConfig, vocab_size: int, base: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of our model as a member of `family`; keys that say nothing about the
    architecture come from `base`.

    Raises ConversionError naming everything about the model that this family cannot express.
    """
    if base and _says(base, family, model):
        return {**base, "vocab_size": vocab_size}
    config = {
        **base,
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **family.write(model),
        "vocab_size": vocab_size,
    }
    _, back, _ = read_config(Keys(dict(config), "config.json", ignored=base))
    differ = architecture.differences(model, back)
    if differ:
        differences = "; ".join(
            f"{one.name} is {one.saved}, there it is {one.now}" for one in differ
        )
        raise ConversionError(f"a {family.model_type} model cannot express this one: {differences}")
    return config


def _says(base: Mapping[str, Any], family: Family, model: ModelConfig) -> bool:
    """Is `base` this very model already, with this length of context?"""
    try:
        found, back, _ = read_config(Keys(dict(base), "config.json", ignored=base))
    except ConversionError:
        return False
    same_length = (back.max_position_embeddings or back.seq_length) == (
        model.max_position_embeddings or model.seq_length
    )
    same_dropout = not _other_dropout(model, back)
    return (
        found is family
        and same_length
        and same_dropout
        and not architecture.differences(model, back)
    )


def _other_dropout(model: ModelConfig, back: ModelConfig) -> list[str]:
    """Names of the dropouts in which they differ."""
    return [
        name
        for name in ("attention_dropout", "hidden_dropout")
        if getattr(model, name) != getattr(back, name)
    ]


def notes_on(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """What a written config.json cannot say of our model, though its weights compute the same."""
    _, back, _ = read_config(Keys(dict(config), "config.json", ignored=config))
    return [
        f"--{name.replace('_', '-')} {getattr(model, name)} is not in config.json: "
        f"{config['model_type']} models have no such dropout (it changes training alone)"
        for name in _other_dropout(model, back)
    ]


def fitting(model: ModelConfig) -> Family:
    """The first family that can express the model. Raises ConversionError, saying for each why it
    cannot."""
    reasons = []
    for family in FAMILIES.values():
        try:
            config_for(family, model, 1, {})
            return family
        except ConversionError as error:
            reasons.append(str(error))
    raise ConversionError("no family of Hugging Face models fits; " + "\n".join(reasons))
