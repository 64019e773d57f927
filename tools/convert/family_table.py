"""The families of Hugging Face models that are converted, one entry each: names of tensors, and
config.json <-> flags.

docs/convert.md explains how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.model import ModelConfig
from tools.convert.config_keys import Keys
from tools.convert.dialect import (
    GEGLU,
    GELU_ERF,
    GELU_TANH,
    LLAMA3,
    RELU2,
    Dialect,
    Flags,
    Key,
    read_dropout,
    yarn_keys,
)
from tools.convert.links import (
    EXPERTS,
    EXPERTS_GATE_UP,
    FUSED_GATE_UP,
    FUSED_QKV,
    FUSED_QKV_ROWS,
    GATE_UP,
    QKV,
    SAME,
    TRANSPOSED,
    Names,
    Transform,
)

# Our parameters of a layer.
_LAYER = "decoder.layers.{}."
_ATTENTION = _LAYER + "self_attention."
INPUT_NORM = _LAYER + "input_layernorm"
LINEAR_QKV = _ATTENTION + "linear_qkv"
PROJ = _ATTENTION + "linear_proj"
MLP_NORM = _LAYER + "pre_mlp_layernorm"
FC1 = _LAYER + "mlp.linear_fc1"
FC2 = _LAYER + "mlp.linear_fc2"
_FINAL_NORM = "decoder.final_layernorm"
_WINDOW = 4096  # sliding_window of mistral, qwen2 and qwen3 where the key is missing
_FIRST_WINDOW_LAYER = 28  # and max_window_layers of qwen2 and qwen3


@dataclass(frozen=True)
class Family:
    """One family: its model_type and class in config.json, its names, and the two directions of its
    configuration.

    `buffers` are tensors that old files hold and that follow from the configuration. `constants`
    are scalars of each layer that files must hold, with their values. `optional` may stand before
    every name or be missing.
    """

    model_type: str
    architecture: str
    names: Names
    read: Callable[[Keys], Flags]
    write: Callable[[ModelConfig], dict[str, Any]]
    buffers: re.Pattern[str]
    optional: str = ""
    constants: Mapping[str, float] = field(default_factory=dict)

    def constant_names(self, model: ModelConfig) -> dict[str, float]:
        """The constants of all layers."""
        return {
            name.format(layer): value
            for layer in range(model.num_layers)
            for name, value in self.constants.items()
        }


Sources = Mapping[str, str | tuple[tuple[str, ...], Transform]]  # a plain name: the same tensor


def llama_names(changes: Sources | None = None, *, gated: bool = True) -> Names:
    """Llama's names, which most families have; `changes` are other names of some of our
    parameters. Without `gated` the MLP has an up and a down matrix."""
    layer = "model.layers.{}."
    qkv = tuple(f"{layer}self_attn.{x}_proj" for x in "qkv")
    gate_up = ((layer + "mlp.gate_proj", layer + "mlp.up_proj"), GATE_UP)
    table: Sources = {
        "embedding.word_embeddings": "model.embed_tokens",
        INPUT_NORM: layer + "input_layernorm",
        LINEAR_QKV: (qkv, QKV),
        _ATTENTION + "q_layernorm": layer + "self_attn.q_norm",
        _ATTENTION + "k_layernorm": layer + "self_attn.k_norm",
        PROJ: layer + "self_attn.o_proj",
        MLP_NORM: layer + "post_attention_layernorm",
        FC1: gate_up if gated else layer + "mlp.up_proj",
        FC2: layer + "mlp.down_proj",
        _FINAL_NORM: "model.norm",
        "output_layer": "lm_head",
        **(changes or {}),
    }
    return {
        native_name: ((hf_name,), SAME) if isinstance(hf_name, str) else hf_name
        for native_name, hf_name in table.items()
    }


def _moe_names(block: str, gate: str, up: str, down: str) -> Names:
    """Llama's names, and those of router, experts and (Qwen2-MoE) the shared expert."""
    layer = "model.layers.{}."
    expert = layer + block + ".experts.{expert}."
    shared = layer + "mlp.shared_expert."
    mlp = _LAYER + "mlp."
    return llama_names(
        {
            mlp + "router": f"{layer}{block}.gate",
            mlp + "experts.linear_fc1": ((expert + gate, expert + up), EXPERTS_GATE_UP),
            mlp + "experts.linear_fc2": ((expert + down,), EXPERTS),
            mlp + "shared_experts.linear_fc1": (
                (shared + "gate_proj", shared + "up_proj"),
                GATE_UP,
            ),
            mlp + "shared_experts.linear_fc2": shared + "down_proj",
            mlp + "shared_experts.gate_weight": layer + "mlp.shared_expert_gate",
        }
    )


def _neox_names(base: str, attention: str, final_norm: str) -> Names:
    """GPT-NeoX keeps queries, keys and values of each head together, as we do."""
    layer = base + "layers.{}."
    return llama_names(
        {
            INPUT_NORM: layer + "input_layernorm",
            LINEAR_QKV: f"{layer}{attention}.query_key_value",
            PROJ: f"{layer}{attention}.dense",
            _ATTENTION + "q_layernorm": f"{layer}{attention}.q_layernorm",
            _ATTENTION + "k_layernorm": f"{layer}{attention}.k_layernorm",
            MLP_NORM: layer + "post_attention_layernorm",
            FC1: layer + "mlp.dense_h_to_4h",
            FC2: layer + "mlp.dense_4h_to_h",
            _FINAL_NORM: base + final_norm,
        }
    )


def _gpt2_names(qkv: Transform = FUSED_QKV, matrix: Transform = TRANSPOSED) -> Names:
    """GPT-2's matrices are [in, out]."""
    layer = "transformer.h.{}."
    return {
        "embedding.word_embeddings": (("transformer.wte",), SAME),
        "embedding.position_embeddings": (("transformer.wpe",), SAME),
        INPUT_NORM: ((layer + "ln_1",), SAME),
        LINEAR_QKV: ((layer + "attn.c_attn",), qkv),
        PROJ: ((layer + "attn.c_proj",), matrix),
        MLP_NORM: ((layer + "ln_2",), SAME),
        FC1: ((layer + "mlp.c_fc",), matrix),
        FC2: ((layer + "mlp.c_proj",), matrix),
        _FINAL_NORM: (("transformer.ln_f",), SAME),
        "output_layer": (("lm_head",), SAME),
    }


# --- config.json -> flags


def _read_gpt2(keys: Keys, usual: str = "gelu_new") -> Flags:
    """`usual`: the activation where the key is missing."""
    activations = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
    activation = keys.take("activation_function", usual, str)
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
        "hidden_dropout": read_dropout(keys, ("resid_pdrop", "embd_pdrop"), 0.1),
    }


def _read_bigcode(keys: Keys) -> Flags:
    """GPT-2 with one head of keys and values (multi_query), or as many as heads; in both its rows
    of queries, keys and values are in our order."""
    flags = _read_gpt2(keys, "gelu_pytorch_tanh")
    heads = flags["num_attention_heads"]
    groups = 1 if keys.take("multi_query", True, bool) else heads
    keys.must_be("num_key_value_heads", groups, why="multi_query determines it")
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        keys.take(name, True, bool)
    return flags | {"group_query_attention": groups != heads, "num_query_groups": groups}


def _layer_types(keys: Keys, layers: int) -> list[str]:
    """layer_types: the kind of attention of each layer, or nothing."""
    types = keys.take("layer_types", [], list)
    kinds = ("full_attention", "sliding_attention")
    if types and (len(types) != layers or any(kind not in kinds for kind in types)):
        keys.refuse(
            "layer_types", types, f"it must name {layers} layers, each {' or '.join(kinds)}"
        )
        return []
    return types


def _no_window(
    keys: Keys,
    flags: Flags,
    used: bool = True,
    first: int = 0,
    absent: int | None = _WINDOW,
    typed: bool = True,
) -> Flags:
    """Refuse a sliding window shorter than the longest sequence, in any layer from `first` on
    (layer_types counts more, if the family is `typed`: reads it); a missing one is `absent`, and
    null is none."""
    windows = _window(keys, flags, used, first, absent, typed)
    if windows.get("window_size"):
        window = windows["window_size"][0] + 1
        keys.refuse(
            "sliding_window",
            window,
            f"attention reaches over all {flags['max_position_embeddings']} positions; up to "
            f"{window} the model is the same: give --max-position-embeddings {window}",
        )
    return flags


def _window(
    keys: Keys,
    flags: Flags,
    used: bool = True,
    first: int = 0,
    absent: int | None = _WINDOW,
    typed: bool = True,
    long: bool = False,
) -> Flags:
    """The flags with a sliding window, of the arguments of `_no_window`; one as long as the longest
    sequence is none, if not `long`. It counts the token itself, --window-size does not."""
    window = keys.take("sliding_window", None, int, absent=absent)
    window = window if used else None
    layers = flags["num_layers"]
    types = _layer_types(keys, layers) if typed else []
    usual = [window is not None and layer >= first for layer in range(layers)]
    slides = [kind != "full_attention" for kind in types] or usual
    if any(slides) and window is None:
        keys.refuse("layer_types", sorted(set(types)), "every layer has full attention")
    elif window and any(slides) and (long or window < flags["max_position_embeddings"]):
        pattern = None if all(slides) else f"[{','.join(str(int(each)) for each in slides)}]"
        return flags | {"window_size": (window - 1, 0), "window_attn_skip_freq": pattern}
    return flags


def _optional_window(keys: Keys, flags: Flags) -> Flags:
    return _window(keys, flags, absent=None, typed=False)


def _mistral_window(keys: Keys, flags: Flags) -> Flags:
    """transformers has the window in every layer, whatever layer_types says."""
    return _window(keys, flags, typed=False)


def _phi3_window(keys: Keys, flags: Flags) -> Flags:
    """original_max_position_embeddings matters to the scaling type longrope alone, which is
    refused."""
    keys.take("original_max_position_embeddings", 1)
    return _optional_window(keys, flags)


def _qwen_window(keys: Keys, flags: Flags) -> Flags:
    """As transformers: layers from max_window_layers on have the window, if use_sliding_window says
    so."""
    used = keys.take("use_sliding_window", False, bool)
    first = keys.take("max_window_layers", _FIRST_WINDOW_LAYER, (int,))
    return _window(keys, flags, used, first)


def _ignore_aux_loss(keys: Keys) -> None:
    """The coefficient of the auxiliary loss is a choice of each training."""
    keys.take("output_router_logits", False, bool)
    keys.take("router_aux_loss_coef", 0.0, (float, int))


def _read_mixtral(keys: Keys, flags: Flags) -> Flags:
    _ignore_aux_loss(keys)
    noise = keys.take("router_jitter_noise", 0.0, (float, int))
    if noise:
        keys.notes.append(
            f"router_jitter_noise {noise} is not used: --moe-input-jitter-eps changes the input of "
            "routers, not that of experts"
        )
    return _optional_window(keys, flags)


def _read_qwen_moe(keys: Keys, flags: Flags) -> Flags:
    """Which layers have experts, and how these are selected."""
    _ignore_aux_loss(keys)
    used = keys.take("use_sliding_window", False, bool)
    if not used:  # files of transformers 5 say 0
        keys.table = keys.table | {"sliding_window": None}
    typed = keys.table.get("model_type") == "qwen2_moe"
    flags = _no_window(keys, flags, used, typed=typed)
    step = keys.take("decoder_sparse_step", 1)
    dense = keys.take("mlp_only_layers", [], list)
    if any(type(layer) is not int for layer in dense):
        keys.refuse("mlp_only_layers", dense, "it must be numbers of layers")
        dense = []
    pattern = [
        int((layer + 1) % step == 0 and layer not in dense) for layer in range(flags["num_layers"])
    ]
    if not any(pattern):
        keys.refuse("mlp_only_layers", dense, "no layer has experts")
    return flags | {
        "moe_layer_freq": "1" if all(pattern) else str(pattern),
        "moe_router_pre_softmax": not keys.take("norm_topk_prob", False, bool),
    }


def _read_olmoe(keys: Keys, flags: Flags) -> Flags:
    _ignore_aux_loss(keys)
    flags = flags | {"moe_router_pre_softmax": not keys.take("norm_topk_prob", False, bool)}
    return _no_window(keys, flags, absent=None, typed=False)


def _smollm3_layers(keys: Keys, flags: Flags) -> Flags:
    """Layers without rotary positions are 0 in no_rope_layers; where that is missing every 4th
    layer (no_rope_layer_interval) is."""
    layers = flags["num_layers"]
    interval = keys.take("no_rope_layer_interval", 4)
    rotated = keys.take("no_rope_layers", [], list)
    if not rotated:
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(rotated) != layers or any(number not in (0, 1) for number in rotated):
        keys.refuse("no_rope_layers", rotated, f"it must have {layers} numbers, 0 or 1")
    elif not all(rotated):
        pattern = ",".join(str(1 - number) for number in rotated)
        flags = flags | {"no_rope_freq": f"[{pattern}]"}
    used = keys.take("use_sliding_window", False, bool)
    return _no_window(keys, flags, used, absent=None)


def _fixed_rotary(keys: Keys, key: str, value: float, why: str) -> None:
    """transformers does not read the top-level `key`: the model has `value`, but where the
    dict with the scaling says otherwise."""
    scaling = keys.table.get("rope_scaling") or keys.table.get("rope_parameters") or {}
    if key not in scaling and keys.table.get(key) not in (None, value):
        keys.refuse(key, keys.table[key], f"transformers has {value} there, {why}")
    keys.table = keys.table | {key: value}


def _neox_rotary(keys: Keys) -> None:
    """Base and share have names of their own."""
    for key, neox_key, usual in (
        ("rope_theta", "rotary_emb_base", 10000),
        ("partial_rotary_factor", "rotary_pct", 0.25),
    ):
        value = keys.take(neox_key, usual, (int, float))
        _fixed_rotary(keys, key, value, f"and reads {neox_key} alone; make both the same")


def _apertus_rotary(keys: Keys) -> None:
    """Without other rotary settings those of Llama 3.1, with a base of their own."""
    if keys.table.get("rope_parameters") is None and not keys.table.get("rope_scaling"):
        why = "unless rope_parameters or rope_scaling is given; add it"
        _fixed_rotary(keys, "rope_theta", 12000000, why)
        keys.table = keys.table | {
            "rope_parameters": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}
        }


def _exaone4_layers(keys: Keys, flags: Flags) -> Flags:
    """Where some layers have a sliding window, the other ones have no rotary positions."""
    keys.take("sliding_window_pattern", 0, (int, str))
    types = _layer_types(keys, flags["num_layers"])
    if keys.take("sliding_window", None, int, absent=_WINDOW) is None:
        return _window(keys, flags, absent=None)
    if not types:
        keys.refuse("layer_types", types, f"it must name the {flags['num_layers']} layers")
    if "full_attention" in types:
        pattern = ",".join(str(int(kind == "full_attention")) for kind in types)
        flags = flags | {"no_rope_freq": f"[{pattern}]"}
    return _window(keys, flags)


_SLIDING = "sliding_attention"
_WINDOW_BASE = "rope_parameters.sliding_attention.rope_theta"
_OLMO3_BASE = 500000.0  # transformers' default of rope_theta


def _olmo3_rotary(keys: Keys) -> None:
    """transformers 5 writes rope_parameters of each kind of layer; an older rope_scaling and a
    top-level rope_theta are those of layers without a window alone. Three of four layers have the
    window where layer_types is missing."""
    layers = keys.table.get("num_hidden_layers")
    if keys.table.get("layer_types") is None and isinstance(layers, int):
        kinds = ["full_attention" if layer % 4 == 3 else _SLIDING for layer in range(layers)]
        keys.table = keys.table | {"layer_types": kinds}
    by_kind = keys.take("rope_parameters", {}, dict)
    if by_kind and not by_kind.keys() & {"full_attention", "sliding_attention"}:
        keys.refuse("rope_parameters", by_kind, "transformers reads it by kind of layer alone")
    full, window = (
        by_kind.get(kind) or {"rope_type": "default"}
        for kind in ("full_attention", "sliding_attention")
    )
    if not (isinstance(full, dict) and isinstance(window, dict)):
        keys.refuse("rope_parameters", by_kind, "it must be a table for each kind of layer")
        return
    scaling = keys.take("rope_scaling", {}, dict)
    written = keys.table.get("rope_parameters") is not None
    if scaling and written and not by_kind.get("full_attention"):
        keys.refuse("rope_scaling", scaling, "transformers adds it to those of full_attention")
    full = full | scaling
    full = {"rope_theta": keys.table.get("rope_theta", _OLMO3_BASE)} | full
    window = {"rope_theta": _OLMO3_BASE} | window
    types = keys.table.get("layer_types")
    base = window["rope_theta"]
    plain = window == {"rope_theta": base, "rope_type": "default"} and type(base) in (int, float)
    if full != window and _SLIDING in (types or [_SLIDING]) and not (plain and base == int(base)):
        why = "layers with a window have rotary positions of a base that is a whole number alone"
        keys.refuse("rope_parameters", by_kind, why)
    if full.get("truncate", True) is not True:
        keys.refuse("rope_parameters", by_kind, "transformers' OLMo 3 does not read truncate")
    keys.table = keys.table | {"rope_parameters": full, "rope_scaling": None}
    if full != window:
        keys.table = keys.table | {_WINDOW_BASE: base}


def _olmo3_window(keys: Keys, flags: Flags) -> Flags:
    """Layers with a window have their base however long it is."""
    base = keys.take(_WINDOW_BASE, None, (int, float))
    flags = _window(keys, flags, long=base is not None)
    if flags.get("window_size") and base is not None:
        flags |= {"window_rotary_base": int(base)}
    return flags


def _gemma_embedding(keys: Keys, flags: Flags) -> Flags:
    return flags | {"embedding_multiplier": flags["hidden_size"] ** 0.5}


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


def _write_bigcode(m: ModelConfig) -> dict[str, Any]:
    """The MLP's tanh GELU is gelu_pytorch_tanh there."""
    config = _write_gpt2(m) | {"multi_query": m.query_groups == 1}
    if config["activation_function"] == "gelu_new":
        config["activation_function"] = "gelu_pytorch_tanh"
    return config


# --- the families

_RMS_NORM: Flags = {"normalization": "RMSNorm"}
_LAYER_NORM: Flags = {"normalization": "LayerNorm"}
_INTERLEAVED: Flags = {"rotary_interleaved": True}
QKV_BIAS = ("add_qkv_bias",)
ATTENTION_BIASES = (*QKV_BIAS, "add_attention_output_bias")
_ALL_BIASES = (*ATTENTION_BIASES, "add_mlp_bias")
_ATTENTION_BIAS = Key("attention_bias", False, ATTENTION_BIASES)
_MLP_BIAS = Key("mlp_bias", False, ("add_mlp_bias",))
_NO_PARALLEL = (False, "attention and MLP run one behind the other")
_POST_NORMS: Flags = _RMS_NORM | {
    "no_pre_layernorm": True,
    "post_self_attn_layernorm": True,
    "post_mlp_layernorm": True,
    "qk_layernorm": True,
}
_POST_NORM_NAMES = llama_names(
    {
        _LAYER + "post_self_attn_layernorm": "model.layers.{}.post_attention_layernorm",
        _LAYER + "post_mlp_layernorm": "model.layers.{}.post_feedforward_layernorm",
    }
)
_OLMO: dict[str, Any] = {
    "flags": _POST_NORMS | {"qk_layernorm_all_heads": True},
    "keys": (_ATTENTION_BIAS,),
    "epsilon": ("rms_norm_eps", 1e-5),
}
_GATE_UP_ROWS = (("model.layers.{}.mlp.gate_up_proj",), FUSED_GATE_UP)
_ROTARY = re.compile(
    r"model\.layers\.\d+\.(self_attn|attention)\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)
_MASKS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")


_NEOX_BUFFERS = re.compile(
    r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
)
_NEOX_ENDS: Names = {
    "embedding.word_embeddings": (("gpt_neox.embed_in",), SAME),
    "output_layer": (("embed_out",), SAME),
}


def like_llama(
    model_type: str,
    architecture: str,
    names: Names,
    dialect: Dialect,
    buffers: re.Pattern[str] = _ROTARY,
    constants: Mapping[str, float] | None = None,
) -> Family:
    return Family(
        model_type,
        architecture,
        names,
        dialect.read,
        dialect.write,
        buffers,
        constants=constants or {},
    )


def _windows(m: ModelConfig) -> dict[str, Any]:
    """transformers makes masks with the window also where no layer has it, so there must be one."""
    full = (m.window_of(layer) is None for layer in range(m.num_layers))
    return {
        "sliding_window": m.window or m.max_position_embeddings or m.seq_length,
        "layer_types": ["full_attention" if each else _SLIDING for each in full],
    }


def _one_window(m: ModelConfig) -> dict[str, Any]:
    """Of all layers."""
    return {"sliding_window": m.window}


def _phi3_keys(m: ModelConfig) -> dict[str, Any]:
    """Of the types of rope_scaling transformers' Phi-3 has longrope alone."""
    rope = {"rope_type": "default", "rope_theta": float(m.rotary_base)}
    partial = {"partial_rotary_factor": m.rotary_percent}
    return _one_window(m) | {"rope_scaling": None, "rope_parameters": rope | partial}


def _olmo3_keys(m: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(m.rotary_base)}
    full = rope | yarn_keys(m) if m.yarn else rope
    window = full if m.window_base is None else rope | {"rope_theta": float(m.window_base)}
    return _windows(m) | {"rope_parameters": {"full_attention": full, _SLIDING: window}}


def _exaone4_keys(m: ModelConfig) -> dict[str, Any]:
    rotated = [m.rope(layer) is not None for layer in range(m.num_layers)]
    if m.window is None and not all(rotated):
        kinds = [_SLIDING if each else "full_attention" for each in rotated]
        return _windows(m) | {"layer_types": kinds}
    return _windows(m) | ({"sliding_window": None} if m.window is None else {})


def _qwen_windows(m: ModelConfig) -> dict[str, Any]:
    return _no_window_used(m) if m.window is None else _windows(m) | {"use_sliding_window": True}


def _no_window_used(m: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None}


def _normalization(m: ModelConfig) -> dict[str, Any]:
    """Do the probabilities of the selected experts add up to 1?"""
    return {"norm_topk_prob": m.router_probabilities == "softmax over the selected experts"}


def _qwen_moe(m: ModelConfig) -> dict[str, Any]:
    dense = [layer for layer in range(m.num_layers) if not m.is_moe_layer(layer)]
    return _no_window_used(m) | {
        **_normalization(m),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _topk(default: int) -> Key:
    return Key("num_experts_per_tok", default, ("moe_router_topk",))


_QWEN_EXPERTS = _moe_names("mlp", "gate_proj", "up_proj", "down_proj")
_EXPERT_WIDTH = ("moe_ffn_hidden_size",)


def _smollm3_keys(m: ModelConfig) -> dict[str, Any]:
    rotated = [int(m.rope(layer) is not None) for layer in range(m.num_layers)]
    return {"no_rope_layers": rotated, "use_sliding_window": False, "sliding_window": None}


_QWEN_FIXED = {"use_mrope": (False, "positions are one number")}

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
        like_llama(
            "llama",
            "LlamaForCausalLM",
            llama_names(),
            Dialect(keys=(_ATTENTION_BIAS, _MLP_BIAS)),
        ),
        like_llama(
            "qwen2",
            "Qwen2ForCausalLM",
            llama_names(),
            Dialect(
                flags=_RMS_NORM | {"add_qkv_bias": True},
                kv_heads=32,
                fixed=_QWEN_FIXED,
                last=_qwen_window,
                written=_qwen_windows,
            ),
        ),
        like_llama(
            "qwen3",
            "Qwen3ForCausalLM",
            llama_names(),
            Dialect(
                flags=_RMS_NORM | {"qk_layernorm": True},
                keys=(_ATTENTION_BIAS,),
                kv_heads=32,
                head_dim=128,
                last=_qwen_window,
                written=_qwen_windows,
            ),
        ),
        like_llama(
            "mistral",
            "MistralForCausalLM",
            llama_names(),
            Dialect(kv_heads=8, last=_mistral_window, written=_one_window),
        ),
        like_llama(
            "phi3",
            "Phi3ForCausalLM",
            llama_names(
                {
                    LINEAR_QKV: (("model.layers.{}.self_attn.qkv_proj",), FUSED_QKV_ROWS),
                    FC1: _GATE_UP_ROWS,
                }
            ),
            Dialect(
                epsilon=("rms_norm_eps", 1e-5),
                own_head_dim=False,
                partial=1.0,
                dropouts=("resid_pdrop", "embd_pdrop"),
                last=_phi3_window,
                written=_phi3_keys,
            ),
        ),
        like_llama(
            "seed_oss",
            "SeedOssForCausalLM",
            llama_names(),
            Dialect(
                keys=(
                    Key("attention_bias", True, QKV_BIAS),
                    Key("attention_out_bias", False, ("add_attention_output_bias",)),
                    _MLP_BIAS,
                ),
                kv_heads=8,
                head_dim=128,
                dropouts=("residual_dropout",),
            ),
        ),
        like_llama(
            "starcoder2",
            "Starcoder2ForCausalLM",
            llama_names(
                {
                    FC1: "model.layers.{}.mlp.c_fc",
                    FC2: "model.layers.{}.mlp.c_proj",
                },
                gated=False,
            ),
            Dialect(
                flags=_LAYER_NORM,
                keys=(Key("use_bias", True, _ALL_BIASES),),
                activations=GELU_TANH | GELU_ERF,
                epsilon=("norm_epsilon", 1e-5),
                kv_heads=2,
                tied=True,
                dropouts=("residual_dropout", "embedding_dropout"),
                last=_optional_window,
                written=_one_window,
            ),
        ),
        like_llama(
            "nemotron",
            "NemotronForCausalLM",
            llama_names(gated=False),
            Dialect(
                flags=_LAYER_NORM | {"apply_layernorm_1p": True},
                keys=(_ATTENTION_BIAS, _MLP_BIAS),
                activations=RELU2,
                epsilon=("norm_eps", 1e-5),
                partial=0.5,
            ),
        ),
        like_llama(
            "stablelm",
            "StableLmForCausalLM",
            llama_names(),
            Dialect(
                flags=_LAYER_NORM,
                keys=(Key("use_qkv_bias", False, QKV_BIAS),),
                fixed={
                    "use_parallel_residual": _NO_PARALLEL,
                    "qk_layernorm": (False, "each head has norm weights of its own there"),
                },
                epsilon=("layer_norm_eps", 1e-5),
                kv_heads=32,
                own_head_dim=False,
                partial=0.25,
                dropouts=("hidden_dropout",),
            ),
        ),
        like_llama(
            "glm",
            "GlmForCausalLM",
            llama_names({FC1: _GATE_UP_ROWS}),
            Dialect(
                flags=_RMS_NORM | _INTERLEAVED,
                keys=(Key("attention_bias", False, QKV_BIAS),),
                epsilon=("rms_norm_eps", 1.5625e-07),
                kv_heads=2,
                head_dim=128,
                partial=0.5,
            ),
        ),
        like_llama(
            "helium",
            "HeliumForCausalLM",
            llama_names(),
            Dialect(
                flags=_RMS_NORM | _INTERLEAVED,
                keys=(Key("attention_bias", False, QKV_BIAS), _MLP_BIAS),
                epsilon=("rms_norm_eps", 1e-8),
                kv_heads=20,
                head_dim=128,
                theta=100000,
            ),
        ),
        like_llama(
            "ernie4_5",
            "Ernie4_5ForCausalLM",
            llama_names(),
            Dialect(
                flags=_RMS_NORM | _INTERLEAVED,
                keys=(Key("use_bias", False, _ALL_BIASES),),
                epsilon=("rms_norm_eps", 1e-5),
                kv_heads=2,
                head_dim=128,
                theta=500000,
                tied=True,
            ),
        ),
        like_llama(
            "ministral",
            "MinistralForCausalLM",
            llama_names(),
            Dialect(kv_heads=8, last=_window, written=_windows),
        ),
        like_llama(
            "arcee",
            "ArceeForCausalLM",
            llama_names(gated=False),
            Dialect(
                keys=(_ATTENTION_BIAS, _MLP_BIAS),
                activations=RELU2,
                epsilon=("rms_norm_eps", 1e-5),
            ),
        ),
        like_llama(
            "jais2",
            "Jais2ForCausalLM",
            llama_names(gated=False),
            Dialect(
                flags=_LAYER_NORM,
                keys=(
                    Key("attention_bias", True, ATTENTION_BIASES),
                    Key("mlp_bias", True, ("add_mlp_bias",)),
                ),
                activations=RELU2,
                epsilon=("layer_norm_eps", 1e-5),
            ),
        ),
        like_llama(
            "persimmon",
            "PersimmonForCausalLM",
            _neox_names("model.", "self_attn", "final_layernorm"),
            Dialect(
                flags=_LAYER_NORM | dict.fromkeys(_ALL_BIASES, True),
                keys=(Key("qk_layernorm", True, ("qk_layernorm",)),),
                activations=RELU2,
                epsilon=("layer_norm_eps", 1e-5),
                grouped=False,
                own_head_dim=False,
                partial=0.5,
                dropouts=("hidden_dropout",),
            ),
        ),
        like_llama(
            "mixtral",
            "MixtralForCausalLM",
            _moe_names("block_sparse_moe", "w1", "w3", "w2"),
            Dialect(
                keys=(Key("num_local_experts", 8, ("num_experts",)), _topk(2)),
                epsilon=("rms_norm_eps", 1e-5),
                kv_heads=8,
                theta=1000000,
                last=_read_mixtral,
                written=lambda m: _one_window(m) | {"intermediate_size": m.expert_ffn},
            ),
        ),
        like_llama(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            _QWEN_EXPERTS,
            Dialect(
                flags=_RMS_NORM | {"moe_shared_expert_gate": True},
                keys=(
                    Key("qkv_bias", True, QKV_BIAS),
                    Key("num_experts", 60, ("num_experts",)),
                    _topk(4),
                    Key("moe_intermediate_size", 1408, _EXPERT_WIDTH),
                    Key(
                        "shared_expert_intermediate_size",
                        5632,
                        ("moe_shared_expert_intermediate_size",),
                    ),
                ),
                kv_heads=16,
                last=_read_qwen_moe,
                written=_qwen_moe,
            ),
        ),
        like_llama(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _QWEN_EXPERTS,
            Dialect(
                flags=_RMS_NORM | {"qk_layernorm": True},
                keys=(
                    _ATTENTION_BIAS,
                    Key("num_experts", 128, ("num_experts",)),
                    _topk(8),
                    Key("moe_intermediate_size", 768, _EXPERT_WIDTH),
                ),
                kv_heads=4,
                renamed={"num_local_experts": "num_experts"},
                last=_read_qwen_moe,
                written=_qwen_moe,
            ),
        ),
        like_llama(
            "olmoe",
            "OlmoeForCausalLM",
            _QWEN_EXPERTS,
            Dialect(
                flags=_RMS_NORM | {"qk_layernorm": True, "qk_layernorm_all_heads": True},
                keys=(_ATTENTION_BIAS, Key("num_experts", 64, ("num_experts",)), _topk(8)),
                fixed={"clip_qkv": (None, "queries, keys and values are not clipped")},
                epsilon=("rms_norm_eps", 1e-5),
                own_head_dim=False,
                renamed={"num_local_experts": "num_experts"},
                last=_read_olmoe,
                written=lambda m: _normalization(m) | {"intermediate_size": m.expert_ffn},
            ),
        ),
        like_llama(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            {**_neox_names("gpt_neox.", "attention", "final_layer_norm"), **_NEOX_ENDS},
            Dialect(
                flags=_LAYER_NORM | {"add_mlp_bias": True},
                keys=(
                    Key("use_parallel_residual", True, ("use_parallel_residual",)),
                    Key("attention_bias", True, ATTENTION_BIASES),
                ),
                activations=GELU_ERF | GELU_TANH | {"gelu_fast": "gelu (tanh)"},
                epsilon=("layer_norm_eps", 1e-5),
                grouped=False,
                own_head_dim=False,
                partial=0.25,
                dropouts=("hidden_dropout",),
                first=_neox_rotary,
                # where there is a rope_scaling, transformers takes base and share from these alone
                written=lambda m: {
                    "rotary_pct": m.rotary_percent,
                    "rotary_emb_base": m.rotary_base,
                },
                omitted=("rope_theta", "partial_rotary_factor"),
            ),
            _NEOX_BUFFERS,
        ),
        like_llama(
            "smollm3",
            "SmolLM3ForCausalLM",
            llama_names(),
            Dialect(
                keys=(_ATTENTION_BIAS, _MLP_BIAS),
                kv_heads=4,
                theta=2000000,
                tied=True,
                last=_smollm3_layers,
                written=_smollm3_keys,
            ),
        ),
        like_llama(
            "glm4",
            "Glm4ForCausalLM",
            llama_names(
                {
                    FC1: _GATE_UP_ROWS,
                    _LAYER + "post_self_attn_layernorm": "model.layers.{}.post_self_attn_layernorm",
                    _LAYER + "post_mlp_layernorm": "model.layers.{}.post_mlp_layernorm",
                }
            ),
            Dialect(
                flags=_RMS_NORM
                | _INTERLEAVED
                | {"post_self_attn_layernorm": True, "post_mlp_layernorm": True},
                keys=(Key("attention_bias", False, QKV_BIAS),),
                epsilon=("rms_norm_eps", 1.5625e-07),
                kv_heads=2,
                head_dim=128,
                partial=0.5,
            ),
        ),
        like_llama(
            "apertus",
            "ApertusForCausalLM",
            llama_names(
                {
                    INPUT_NORM: "model.layers.{}.attention_layernorm",
                    MLP_NORM: "model.layers.{}.feedforward_layernorm",
                    _LAYER + "mlp.xielu": "model.layers.{}.mlp.act_fn",
                },
                gated=False,
            ),
            Dialect(
                flags=_RMS_NORM | {"qk_layernorm": True},
                keys=(_ATTENTION_BIAS,),
                activations={"xielu": "xielu"},
                epsilon=("rms_norm_eps", 1e-5),
                theta=12000000,
                first=_apertus_rotary,
            ),
            constants={
                "model.layers.{}.mlp.act_fn.beta": 0.5,
                "model.layers.{}.mlp.act_fn.eps": -1e-6,
            },
        ),
        like_llama("olmo2", "Olmo2ForCausalLM", _POST_NORM_NAMES, Dialect(**_OLMO)),
        like_llama(
            "olmo3",
            "Olmo3ForCausalLM",
            _POST_NORM_NAMES,
            Dialect(
                **_OLMO,
                theta=500000,
                omitted=("rope_scaling",),
                first=_olmo3_rotary,
                last=_olmo3_window,
                written=_olmo3_keys,
            ),
        ),
        like_llama(
            "exaone4",
            "Exaone4ForCausalLM",
            _POST_NORM_NAMES,
            Dialect(
                flags=_POST_NORMS,
                epsilon=("rms_norm_eps", 1e-5),
                kv_heads=32,
                last=_exaone4_layers,
                written=_exaone4_keys,
            ),
        ),
        like_llama(
            "granite",
            "GraniteForCausalLM",
            llama_names(),
            Dialect(
                keys=(
                    _ATTENTION_BIAS,
                    _MLP_BIAS,
                    Key("embedding_multiplier", 1.0, ("embedding_multiplier",)),
                    Key("residual_multiplier", 1.0, ("residual_multiplier",)),
                    Key("attention_multiplier", 1.0, ("softmax_scale",)),
                    Key("logits_scaling", 1.0, ("logits_scaling",)),
                ),
            ),
        ),
        like_llama(
            "gemma",
            "GemmaForCausalLM",
            llama_names(),
            Dialect(
                flags=_RMS_NORM | {"apply_layernorm_1p": True},
                keys=(_ATTENTION_BIAS,),
                fixed={
                    "use_bidirectional_attention": (False, "attention is causal"),
                    "hidden_activation": ("gelu_pytorch_tanh", "--geglu has the tanh form of GELU"),
                },
                activations=GEGLU,
                kv_heads=16,
                head_dim=256,
                tied=True,
                last=_gemma_embedding,
            ),
        ),
        Family(
            "gpt_bigcode",
            "GPTBigCodeForCausalLM",
            _gpt2_names(SAME, SAME),
            _read_bigcode,
            _write_bigcode,
            _MASKS,
        ),
    )
}
