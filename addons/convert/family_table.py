"""The families of Hugging Face models that are converted, one entry each: names of tensors, and
config.json <-> flags.

CONTRIBUTING.md explains how to add one. Imports no torch: --help names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.model import ModelConfig

from .config_keys import Keys
from .dialect import (
    GEGLU,
    GELU_ERF,
    GELU_TANH,
    LLAMA3,
    QUICK_GEGLU,
    RELU2,
    TANH_GEGLU,
    Dialect,
    Flags,
    Key,
    read_dropout,
    scaling_keys,
)
from .links import (
    DELTA_CONV,
    DELTA_ROWS,
    DEPTHS,
    EXPERT_ROWS,
    EXPERTS,
    EXPERTS_GATE_UP,
    EXPERTS_T,
    FUSED_GATE_UP,
    FUSED_QKV,
    FUSED_QKV_ROWS,
    GATE_UP,
    GATE_UP_IN_TURNS,
    GATE_UP_IN_TURNS_T,
    QKV,
    ROW,
    SAME,
    TRANSPOSED,
    ConversionError,
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


def _moe_names(
    block: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    shared: str = "shared_experts",
    bias: str = "gate.e_score_correction_bias",
    changes: Sources | None = None,
) -> Names:
    """Llama's names, and those of router, experts, the `shared` expert and the `bias` of the
    selection; `changes` as in llama_names."""
    layer = "model.layers.{}."
    expert = layer + block + ".experts.{expert}."
    shared = layer + f"mlp.{shared}."
    mlp = _LAYER + "mlp."
    return llama_names(
        {
            mlp + "router": f"{layer}{block}.gate",
            mlp + "router.expert_bias": f"{layer}{block}.{bias}",
            mlp + "experts.linear_fc1": ((expert + gate, expert + up), EXPERTS_GATE_UP),
            mlp + "experts.linear_fc2": ((expert + down,), EXPERTS),
            mlp + "shared_experts.linear_fc1": (
                (shared + "gate_proj", shared + "up_proj"),
                GATE_UP,
            ),
            mlp + "shared_experts.linear_fc2": shared + "down_proj",
            mlp + "shared_experts.gate_weight": layer + "mlp.shared_expert_gate.weight",
            **(changes or {}),
        }
    )


# Of multi-token prediction (DeepSeek-V3), beside its layers, counted on behind the decoder's.
TOKEN_HEADS: Names = {
    f"mtp.layers.{{}}.{ours}": ((f"model.layers.{{}}.{theirs}",), SAME)
    for ours, theirs in (
        ("enorm", "enorm"),
        ("hnorm", "hnorm"),
        ("eh_proj", "eh_proj"),
        ("final_layernorm", "shared_head.norm"),
    )
}


def _qwen3_next_names() -> Names:
    """Layers have attention or a gated delta net; the layer of multi-token prediction has a prefix
    of its own, and what surrounds it no number."""
    theirs = "model.layers.{}.linear_attn."
    heads = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    return {
        **_moe_names("mlp", shared="shared_expert"),
        _ATTENTION + "in_proj": ((theirs + "in_proj_qkvz", theirs + "in_proj_ba"), DELTA_ROWS),
        _ATTENTION + "conv1d": ((theirs + "conv1d",), DELTA_CONV),
        _ATTENTION + "dt_bias": ((theirs + "dt_bias",), SAME),
        _ATTENTION + "A_log": ((theirs + "A_log",), SAME),
        _ATTENTION + "out_norm": ((theirs + "norm",), SAME),
        _ATTENTION + "out_proj": ((theirs + "out_proj",), SAME),
        DEPTHS: (("model.layers.{}", DEPTHS), SAME),
        **{ours: ((f"mtp.{name}",), SAME) for ours, name in zip(TOKEN_HEADS, heads, strict=True)},
    }


def _granite_moe_names() -> Names:
    """All experts of a layer are one tensor, gate first."""
    block = "model.layers.{}.block_sparse_moe."
    return llama_names(
        {
            _LAYER + "mlp.router": block + "router.layer",
            _LAYER + "mlp.experts.linear_fc1": ((block + "input_linear",), EXPERT_ROWS),
            _LAYER + "mlp.experts.linear_fc2": block + "output_linear",
        }
    )


def _ling_names() -> Names:
    """Attention has names of its own, and one matrix of all queries, all keys, all values."""
    attention = "model.layers.{}.attention."
    return _moe_names(
        "mlp",
        bias="gate.expert_bias",
        changes={
            "embedding.word_embeddings": "model.word_embeddings",
            LINEAR_QKV: ((attention + "query_key_value",), FUSED_QKV_ROWS),
            PROJ: attention + "dense",
            _ATTENTION + "q_layernorm": attention + "query_layernorm",
            _ATTENTION + "k_layernorm": attention + "key_layernorm",
        },
    )


def _gpt_oss_names() -> Names:
    """All experts of a layer are one tensor; sinks have no suffix."""
    mlp = "model.layers.{}.mlp."
    experts = mlp + "experts."
    return llama_names(
        {
            _LAYER + "mlp.router": mlp + "router",
            _LAYER + "mlp.experts.linear_fc1.weight": (
                (experts + "gate_up_proj",),
                GATE_UP_IN_TURNS_T,
            ),
            _LAYER + "mlp.experts.linear_fc1.bias": (
                (experts + "gate_up_proj_bias",),
                GATE_UP_IN_TURNS,
            ),
            _LAYER + "mlp.experts.linear_fc2.weight": ((experts + "down_proj",), EXPERTS_T),
            _LAYER + "mlp.experts.linear_fc2.bias": experts + "down_proj_bias",
            _ATTENTION + "core_attention.softmax_offset": "model.layers.{}.self_attn.sinks",
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


def _layer_types(keys: Keys, layers: int, other: str = "sliding_attention") -> list[str]:
    """layer_types: the kind of attention of each layer, full or the `other`, or nothing."""
    types = keys.take("layer_types", [], list)
    kinds = ("full_attention", other)
    if types and (len(types) != layers or any(kind not in kinds for kind in types)):
        keys.refuse(
            "layer_types", types, f"it must name {layers} layers, each {' or '.join(kinds)}"
        )
        return []
    return types


def _window(
    keys: Keys,
    flags: Flags,
    used: bool = True,
    first: int = 0,
    absent: int | None = _WINDOW,
    typed: bool = True,
    long: bool = False,
) -> Flags:
    """The flags with a sliding window, if it is `used`, in any layer from `first` on (layer_types
    counts more, if the family is `typed`: reads it); a missing one is `absent`, and null is none.
    One as long as the longest sequence is none, if not `long`. It counts the token itself,
    --window-size does not."""
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


def _phi3_rotary(keys: Keys) -> None:
    """Types of older files are names of longrope; the old context stands outside, and counts."""
    if keys.table.get("original_max_position_embeddings") is None:
        keys.table = keys.table | {"original_max_position_embeddings": 4096}
    for key in ("rope_scaling", "rope_parameters"):
        scaling = keys.table.get(key)
        if isinstance(scaling, dict):
            kind = scaling.get("rope_type", scaling.get("type"))
            if kind in ("su", "yarn"):
                scaling = scaling | {"rope_type": "longrope"}
                keys.table = keys.table | {key: scaling}


def _phi3_window(keys: Keys, flags: Flags) -> Flags:
    """original_max_position_embeddings matters to the scaling type longrope alone."""
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


def _without_aux_loss(keys: Keys, flags: Flags) -> Flags:
    _ignore_aux_loss(keys)
    return flags


def _read_mixtral(keys: Keys, flags: Flags) -> Flags:
    _ignore_aux_loss(keys)
    noise = keys.take("router_jitter_noise", 0.0, (float, int))
    if noise:
        keys.notes.append(
            f"router_jitter_noise {noise} is not used: --moe-input-jitter-eps changes the input of "
            "routers, not that of experts"
        )
    return _optional_window(keys, flags)


def _qwen2_moe_window(keys: Keys, flags: Flags) -> Flags:
    """As transformers: of the layers before max_window_layers every other one has the window, the
    first one, too."""
    used = keys.take("use_sliding_window", False, bool)
    last = keys.take("max_window_layers", _FIRST_WINDOW_LAYER, (int,))
    if not used:  # files of transformers 5 say 0
        keys.table = keys.table | {"sliding_window": None}
    elif keys.table.get("layer_types") is None:
        layers = range(flags["num_layers"])
        kinds = [_FULL if layer % 2 or layer >= last else _SLIDING for layer in layers]
        keys.table = keys.table | {"layer_types": kinds}
    return _window(keys, flags, used)


def _qwen3_moe_window(keys: Keys, flags: Flags) -> Flags:
    """That of all layers."""
    used = keys.take("use_sliding_window", False, bool)
    return _window(keys, flags, used, typed=False)


def _read_qwen_moe(keys: Keys, flags: Flags, normalized: bool = False) -> Flags:
    """Which layers have experts, and how these are selected; `normalized`: norm_topk_prob, where it
    is missing."""
    _ignore_aux_loss(keys)
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
        "moe_router_pre_softmax": not keys.take("norm_topk_prob", normalized, bool),
    }


def _read_qwen3_next(keys: Keys, flags: Flags) -> Flags:
    """Every 4th layer (full_attention_interval) has attention where layer_types is missing, the
    others gated delta nets."""
    flags = _read_qwen_moe(keys, flags, normalized=True)
    layers = flags["num_layers"]
    interval = keys.take("full_attention_interval", 4)
    types = _layer_types(keys, layers, _LINEAR) or [
        _LINEAR if (layer + 1) % interval else _FULL for layer in range(layers)
    ]
    key_heads, value_heads = flags["linear_num_key_heads"], flags["linear_num_value_heads"]
    if value_heads % key_heads:
        keys.refuse("linear_num_value_heads", value_heads, f"no multiple of {key_heads} key heads")
    if _LINEAR not in types:
        return {name: flag for name, flag in flags.items() if not name.startswith("linear_")}
    return flags | {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": str([int(kind == _LINEAR) for kind in types]),
    }


def _read_olmoe(keys: Keys, flags: Flags) -> Flags:
    _ignore_aux_loss(keys)
    return flags | {"moe_router_pre_softmax": not keys.take("norm_topk_prob", False, bool)}


def _expert_layers(keys: Keys, key: str, pattern: list[bool]) -> Flags:
    """Which layers have experts, as `key` says."""
    if not any(pattern):
        keys.refuse(key, keys.table.get(key), "no layer has experts")
    return {"moe_layer_freq": "1" if all(pattern) else str([int(each) for each in pattern])}


def _first_dense(keys: Keys, flags: Flags, absent: int) -> Flags:
    """The first first_k_dense_replace layers have no experts."""
    key = "first_k_dense_replace"
    first = keys.take(key, absent, (int,))
    return _expert_layers(keys, key, [layer >= first for layer in range(flags["num_layers"])])


def _shared_experts(keys: Keys, flags: Flags, key: str, absent: int, least: int = 0) -> Flags:
    """Several shared experts, at `least` so many, are one of their widths together."""
    count = keys.take(key, least, (int,), absent=absent)
    if count < least:
        keys.refuse(key, count, f"there are at least {least} shared experts")
    return {"moe_shared_expert_intermediate_size": count * flags["moe_ffn_hidden_size"] or None}


def _scaled(keys: Keys, absent: float = 1.0) -> Flags:
    """The factor on the probabilities of the selected experts."""
    factor = float(keys.take("routed_scaling_factor", absent, (float, int)))
    if factor <= 0:
        keys.refuse("routed_scaling_factor", factor, "probabilities are multiplied by it")
    return {"moe_router_topk_scaling_factor": factor}


def _groups_of_experts(keys: Keys, flags: Flags, best: int, absent: tuple[int, int]) -> Flags:
    """Group-limited selection, in which the `best` scores of a group count."""
    groups = keys.take("n_group", 1, absent=absent[0])
    chosen = keys.take("topk_group", 1, absent=absent[1])
    experts, topk = flags["num_experts"], flags["moe_router_topk"]
    of_group = experts // groups
    if experts % groups or chosen > groups or topk > chosen * of_group or best > of_group:
        keys.refuse("n_group", groups, f"{experts} experts, {topk} of them in {chosen} groups")
    if groups == 1:
        return {}
    usual = topk % chosen == 0 and topk // chosen == best
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_score_topk": None if usual else best,
    }


def _normalized(flags: Flags, normalized: bool) -> Flags:
    """Do the sigmoids of the selected experts sum to 1?"""
    usual = normalized == (flags["moe_router_topk"] > 1)
    chosen = "always" if normalized else "never"
    return {"moe_router_normalization": "auto" if usual else chosen}


def _read_glm4_moe(keys: Keys, flags: Flags) -> Flags:
    keys.take("output_router_logits", False, bool)
    flags = flags | _shared_experts(keys, flags, "n_shared_experts", 1, 1) | _scaled(keys)
    flags |= _normalized(flags, keys.take("norm_topk_prob", True, bool))
    return flags | _groups_of_experts(keys, flags, 2, (1, 1)) | _first_dense(keys, flags, absent=1)


def _latent_attention(keys: Keys, flags: Flags, queries: int) -> Flags:
    """Widths of latents and heads; `queries`: the latent of queries where the key is missing."""
    heads = flags["num_attention_heads"]
    rotary = keys.take("qk_rope_head_dim", 64)
    if flags["group_query_attention"]:
        keys.refuse("num_key_value_heads", flags["num_query_groups"], f"there are {heads} heads")
    plain = keys.take("qk_nope_head_dim", 128)
    for name, width in (("head_dim", rotary), ("qk_head_dim", plain + rotary)):
        keys.must_be(name, width, why="qk_nope_head_dim and qk_rope_head_dim say otherwise")
    linear = flags.get("rotary_seq_len_interpolation_factor")
    if linear or flags.get("use_rope_scaling") or flags.get("rope_type") == "longrope":
        key = "rope_scaling" if keys.table.get("rope_scaling") else "rope_parameters"
        keys.refuse(key, keys.table[key], "the types default, dynamic and yarn can be")
    dropped = ("kv_channels", "group_query_attention", "num_query_groups")
    return {name: value for name, value in flags.items() if name not in dropped} | {
        "q_lora_rank": keys.take("q_lora_rank", None, absent=queries),
        "kv_lora_rank": keys.take("kv_lora_rank", 512),
        "qk_head_dim": plain,
        "qk_pos_emb_head_dim": rotary,
        "v_head_dim": keys.take("v_head_dim", 128),
        "rope_type": flags.get("rope_type", "rope"),
        **_latent_scales(keys, flags),
    }


def _latent_scales(keys: Keys, flags: Flags) -> Flags:
    """As transformers: YaRN's mscale_all_dim is that of the scores, whatever the length of queries
    and keys is."""
    if flags.get("rope_type") != "yarn":
        return {}
    key = "rope_scaling" if keys.table.get("rope_scaling") else "rope_parameters"
    scaling = keys.table[key]
    logarithm = 0.1 * math.log(max(1.0, flags["rotary_scaling_factor"]))
    all_dim = float(scaling.get("mscale_all_dim") or 0.0)
    mscale = float(scaling.get("mscale") or 0.0)
    length = scaling.get("attention_factor")
    if length is None and not (mscale and all_dim):
        length = 1.0 + logarithm
    if length is not None and logarithm:
        mscale = (float(length) * (1.0 + logarithm * all_dim) - 1.0) / logarithm
    if mscale < 0:
        keys.refuse(key, scaling, "attention_factor must not be less than 1 / that of the scores")
        mscale = 0.0
    return {"mscale": mscale, "mscale_all_dim": all_dim}


def _read_deepseek(keys: Keys, flags: Flags) -> Flags:
    """What all have."""
    keys.take("output_router_logits", False, bool)
    for name in ("aux_loss_alpha", "seq_aux", "ep_size"):  # of training
        keys.take(name, None, (int, float, bool))
    flags = flags | _shared_experts(keys, flags, "n_shared_experts", 1, 1) | _scaled(keys)
    return flags


def _read_deepseek_v2(keys: Keys, flags: Flags) -> Flags:
    """The group with the best expert counts, if topk_method says so."""
    flags = _read_deepseek(keys, _latent_attention(keys, flags, 1536))
    method = keys.take("topk_method", "greedy", str)
    if method == "group_limited_greedy":
        flags |= _groups_of_experts(keys, flags, 1, (1, 1))
    elif method == "greedy":
        for name in ("n_group", "topk_group"):  # not read then
            keys.take(name, 1)
    else:
        keys.refuse("topk_method", method, "greedy or group_limited_greedy can be")
    return flags | _first_dense(keys, flags, absent=0)


def _read_deepseek_v3(keys: Keys, flags: Flags) -> Flags:
    flags = _read_deepseek(keys, _latent_attention(keys, flags, 1536))
    flags |= _normalized(flags, keys.take("norm_topk_prob", True, bool))
    return flags | _groups_of_experts(keys, flags, 2, (8, 4)) | _first_dense(keys, flags, absent=3)


def _read_glm4_moe_lite(keys: Keys, flags: Flags) -> Flags:
    """Which layers have experts says mlp_layer_types; without it, all but the first."""
    flags = _read_deepseek(keys, _latent_attention(keys, flags, 768))
    flags |= _normalized(flags, keys.take("norm_topk_prob", True, bool))
    layers = flags["num_layers"]
    kinds = keys.take("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1), list)
    if len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        keys.refuse("mlp_layer_types", kinds, f"it must name {layers} layers, dense or sparse")
        kinds = ["sparse"] * layers
    pattern = [kind == "sparse" for kind in kinds]
    first = pattern.index(True) if any(pattern) else layers
    why = f"mlp_layer_types has {first} dense layers first"
    keys.must_be("first_k_dense_replace", first, why=why)
    return (
        flags
        | _groups_of_experts(keys, flags, 2, (1, 1))
        | _expert_layers(keys, "mlp_layer_types", pattern)
    )


def _read_ling(keys: Keys, flags: Flags) -> Flags:
    """Its code normalizes the probabilities of several experts whatever norm_topk_prob says."""
    _ignore_aux_loss(keys)
    for name in ("output_dropout", "embedding_dropout"):
        keys.take(name, 0.0, (float, int))
    flags = flags | _shared_experts(keys, flags, "num_shared_experts", 1) | _scaled(keys)
    shared = flags["moe_shared_expert_intermediate_size"]
    why = f"num_shared_experts says that it is {shared}"
    keys.must_be("moe_shared_expert_intermediate_size", shared, why=why)
    return flags | _groups_of_experts(keys, flags, 2, (8, 4)) | _first_dense(keys, flags, absent=1)


def _read_minimax_m2(keys: Keys, flags: Flags) -> Flags:
    kinds = keys.take("attn_type_list", [], list)
    if any(kind != 1 for kind in kinds):
        keys.refuse("attn_type_list", kinds, "each layer has softmax attention, kind 1")
    for name in ("mlp_intermediate_size", "shared_moe_mode"):  # of layers that there are none of
        keys.take(name, None, (int, str))
    return _read_mixtral(keys, flags | _normalized(flags, normalized=True))


def _minimax_m2_rotary(keys: Keys) -> None:
    """rotary_dim is the rotated share of a head where nothing else says it."""
    rotated = keys.take("rotary_dim", None)
    head = keys.table.get("head_dim", 128)
    if rotated is not None and isinstance(head, int) and "partial_rotary_factor" not in keys.table:
        keys.table = keys.table | {"partial_rotary_factor": rotated / max(head, 1)}


def _read_ernie4_5_moe(keys: Keys, flags: Flags) -> Flags:
    _ignore_aux_loss(keys)
    layers = range(flags["num_layers"])
    interval = keys.take("moe_layer_interval", 1)
    first = keys.take("moe_layer_start_index", 1, (int,))
    last = keys.take("moe_layer_end_index", -1, (int,))
    last = len(layers) - 1 if last == -1 else last
    keys.take("moe_capacity", [], list)  # of training
    pattern = [(layer + 1) % interval == 0 and first <= layer <= last for layer in layers]
    return (
        flags
        | _shared_experts(keys, flags, "moe_num_shared_experts", 2)
        | _expert_layers(keys, "moe_layer_start_index", pattern)
    )


def _alike(keys: Keys, *names: str) -> None:
    """Of keys that may be a list of all layers, the one value that it must have."""
    for name in names:
        value = keys.table.get(name)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                keys.refuse(name, value, "all layers are alike")
            keys.table = keys.table | {name: value[0]}


def _hunyuan_first(keys: Keys) -> None:
    """`alpha` turns the rotary type dynamic into a constant change of the base."""
    _alike(keys, "moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size")
    key = "rope_scaling" if keys.table.get("rope_scaling") else "rope_parameters"
    scaling = keys.table.get(key)
    if isinstance(scaling, dict) and scaling.get("alpha"):
        if scaling.get("rope_type", scaling.get("type")) != "dynamic":
            keys.refuse(key, scaling, "alpha belongs to the type dynamic")
        unread = {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
        rest = {name: value for name, value in scaling.items() if name not in unread}
        alpha = rest.pop("alpha")
        keys.table = keys.table | {key: rest | {"rope_type": "default"}, _NTK_ALPHA: alpha}


def _read_hunyuan(keys: Keys, flags: Flags) -> Flags:
    """One width is that of the experts, of the shared one and of the keys that say it again."""
    _ignore_aux_loss(keys)
    alpha = float(keys.take(_NTK_ALPHA, 1.0, (int, float)))
    if alpha <= 0:
        keys.refuse("rope_scaling.alpha", alpha, "the base is multiplied by a power of it")
    width = flags["ffn_hidden_size"]
    head = flags["kv_channels"] or flags["hidden_size"] // flags["num_attention_heads"]
    for name, value in (("moe_intermediate_size", width), ("attention_head_dim", head)):
        keys.must_be(name, value, why=f"transformers does not read it, and has {value} there")
    return flags | {
        "moe_shared_expert_intermediate_size": width,
        "rotary_ntk_alpha": alpha if alpha > 0 else 1.0,
    }


def _smollm3_layers(keys: Keys, flags: Flags) -> Flags:
    """Layers without rotary positions are 0 in no_rope_layers; where that is missing every 4th
    layer (no_rope_layer_interval) is. These have the window where layer_types is missing."""
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
    if used and keys.table.get("layer_types") is None and keys.table.get("sliding_window"):
        kinds = [_FULL if number else _SLIDING for number in rotated]
        keys.table = keys.table | {"layer_types": kinds}
    return _window(keys, flags, used, absent=None)


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


_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LINEAR = "linear_attention"
_WINDOW_BASE = "rope_parameters.sliding_attention.rope_theta"
# Bases, where no key has them, and keys of old files: of layers without a window, of those with
# one (None: they had no key).
_OLMO3_BASES = (("rope_theta", 500000.0), (None, 500000.0))
_GEMMA3_BASES = (("rope_theta", 1e6), ("rope_local_base_freq", 1e4))
_Base = tuple[str | None, float]


def _usual_types(keys: Keys, period: int) -> None:
    """Every `period`-th layer is without the window where layer_types is missing."""
    layers = keys.table.get("num_hidden_layers")
    if keys.table.get("layer_types") is None and isinstance(layers, int):
        kinds = [_SLIDING if (layer + 1) % period else _FULL for layer in range(layers)]
        keys.table = keys.table | {"layer_types": kinds}


def _rotary_by_kind(keys: Keys, bases: tuple[_Base, _Base]) -> None:
    """transformers 5 writes rope_parameters of each kind of layer; an older rope_scaling is that of
    layers without a window alone."""
    by_kind = keys.take("rope_parameters", {}, dict)
    if by_kind and not by_kind.keys() & {_FULL, _SLIDING}:
        keys.refuse("rope_parameters", by_kind, "transformers reads it by kind of layer alone")
    full, window = (by_kind.get(kind) or {"rope_type": "default"} for kind in (_FULL, _SLIDING))
    if not (isinstance(full, dict) and isinstance(window, dict)):
        keys.refuse("rope_parameters", by_kind, "it must be a table for each kind of layer")
        return
    scaling = keys.take("rope_scaling", {}, dict)
    written = keys.table.get("rope_parameters") is not None
    if scaling and written and not by_kind.get(_FULL):
        keys.refuse("rope_scaling", scaling, "transformers adds it to those of full_attention")
    full = full | scaling
    of_full, of_window = (
        usual if key is None else keys.take(key, usual, (int, float)) for key, usual in bases
    )
    full = {"rope_theta": of_full} | full
    window = {"rope_theta": of_window} | window
    types = keys.table.get("layer_types")
    base = window["rope_theta"]
    plain = window == {"rope_theta": base, "rope_type": "default"} and type(base) in (int, float)
    if full != window and _SLIDING in (types or [_SLIDING]) and not (plain and base == int(base)):
        why = "layers with a window have rotary positions of a base that is a whole number alone"
        keys.refuse("rope_parameters", by_kind, why)
    if full.get("truncate", True) is not True:
        keys.refuse("rope_parameters", by_kind, "transformers does not read truncate there")
    keys.table = keys.table | {"rope_parameters": full, "rope_scaling": None}
    if full != window:
        keys.table = keys.table | {_WINDOW_BASE: base}


def _olmo3_rotary(keys: Keys) -> None:
    _usual_types(keys, 4)
    _rotary_by_kind(keys, _OLMO3_BASES)


def _window_with_base(keys: Keys, flags: Flags) -> Flags:
    """Layers with a window have their base however long it is."""
    base = keys.take(_WINDOW_BASE, None, (int, float))
    flags = _window(keys, flags, long=base is not None)
    if flags.get("window_size") and base is not None:
        flags |= {"window_rotary_base": int(base)}
    return flags


def _gemma_embedding(keys: Keys, flags: Flags) -> Flags:
    return flags | {"embedding_multiplier": flags["hidden_size"] ** 0.5}


def _cap(keys: Keys, name: str, absent: float | None) -> Flags:
    """null is none."""
    cap = keys.take(name, None, (int, float), absent=absent)
    if cap is not None and cap <= 0:
        keys.refuse(name, cap, "a cap is above 0")
    return {name: cap}


def _gemma_scores(keys: Keys, flags: Flags, cap: float | None) -> Flags:
    """Scores are divided by the root of query_pre_attn_scalar. `cap`: of the logits, where the key
    is missing."""
    scalar = keys.take("query_pre_attn_scalar", 256)
    flags = _gemma_embedding(keys, flags) | {"softmax_scale": 1.0 / math.sqrt(scalar)}
    return flags | _cap(keys, "final_logit_softcapping", cap)


def _gemma2_layers(keys: Keys, flags: Flags) -> Flags:
    flags = _gemma_scores(keys, flags, 30.0) | _cap(keys, "attn_logit_softcapping", 50.0)
    return _window(keys, flags)


def _gemma3_first(keys: Keys) -> None:
    """Every 6th layer, or the number that older files name, is without the window."""
    _usual_types(keys, keys.take("sliding_window_pattern", 6))
    _rotary_by_kind(keys, _GEMMA3_BASES)


def _gemma3_layers(keys: Keys, flags: Flags) -> Flags:
    return _window_with_base(keys, _gemma_scores(keys, flags, None))


def _gpt_oss_first(keys: Keys) -> None:
    """Without other rotary settings those of the published models."""
    _usual_types(keys, 2)
    if keys.table.get("rope_parameters") is None and not keys.table.get("rope_scaling"):
        keys.table = keys.table | {"rope_parameters": dict(_GPT_OSS_ROPE)}


def _gpt_oss_layers(keys: Keys, flags: Flags) -> Flags:
    """Keys of the published files that say again what others do, which transformers does not
    read."""
    _ignore_aux_loss(keys)
    experts = flags["moe_router_topk"]
    keys.must_be("experts_per_token", experts, why=f"num_experts_per_tok is {experts}")
    context = flags.get("original_max_position_embeddings")
    keys.must_be("initial_context_length", context, why="rope_scaling has another one")
    return _window(keys, flags)


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
_SANDWICH: Flags = _RMS_NORM | {
    "apply_layernorm_1p": True,
    "post_self_attn_layernorm": True,
    "post_mlp_layernorm": True,
}
_SANDWICH_NAMES = llama_names(
    {
        _LAYER + "post_self_attn_layernorm": "model.layers.{}.post_attention_layernorm",
        MLP_NORM: "model.layers.{}.pre_feedforward_layernorm",
        _LAYER + "post_mlp_layernorm": "model.layers.{}.post_feedforward_layernorm",
    }
)
_NOT_READ = "transformers does not read it for this family"
_GEMMA: dict[str, Any] = {
    "keys": (_ATTENTION_BIAS,),
    "activations": TANH_GEGLU,
    "activation_key": "hidden_activation",
    "kv_heads": 4,
    "head_dim": 256,
    "tied": True,
}
_CAUSAL = {"use_bidirectional_attention": (False, "attention is causal")}
_GPT_OSS_ROPE: dict[str, Any] = {
    **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
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
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(m.rotary_base)}
    rope |= {"partial_rotary_factor": m.rotary_percent}
    context = {}
    if m.longrope:
        rope |= scaling_keys(m)
        context = {"original_max_position_embeddings": m.longrope.context}
    return _one_window(m) | {"rope_scaling": None, "rope_parameters": rope} | context


def _by_kind(m: ModelConfig) -> dict[str, Any]:
    """Windows, and rotary positions of both kinds of layers."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(m.rotary_base)}
    full = rope | scaling_keys(m)
    window = full if m.window_base is None else rope | {"rope_theta": float(m.window_base)}
    return _windows(m) | {"rope_parameters": {_FULL: full, _SLIDING: window}}


def _gemma_keys(m: ModelConfig) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = {name: getattr(m, name) for name in names}
    return {"query_pre_attn_scalar": round(m.attention_scale**-2), **caps}


def _exaone4_keys(m: ModelConfig) -> dict[str, Any]:
    rotated = [m.rope(layer) is not None for layer in range(m.num_layers)]
    if m.window is None and not all(rotated):
        kinds = [_SLIDING if each else "full_attention" for each in rotated]
        return _windows(m) | {"layer_types": kinds}
    return _windows(m) | ({"sliding_window": None} if m.window is None else {})


def _some_windows(m: ModelConfig) -> dict[str, Any]:
    """Windows by layer_types, which files without windows do not have."""
    return _no_window_used(m) if m.window is None else _windows(m) | {"use_sliding_window": True}


def _no_window_used(m: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None}


def _normalization(m: ModelConfig) -> dict[str, Any]:
    """Do the probabilities of the selected experts add up to 1?"""
    return {"norm_topk_prob": m.router_probabilities == "softmax over the selected experts"}


def _qwen_moe(m: ModelConfig) -> dict[str, Any]:
    dense = sorted({*range(m.num_layers)} - {*_layers_with_experts(m)})
    return {
        **_normalization(m),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _qwen3_next_keys(m: ModelConfig) -> dict[str, Any]:
    kinds = [_LINEAR if m.is_delta_layer(layer) else _FULL for layer in range(m.num_layers)]
    return {"layer_types": kinds, **_qwen_moe(m)}


def _all_windows(m: ModelConfig) -> dict[str, Any]:
    """That of all layers, or none."""
    return {"use_sliding_window": m.window is not None, "sliding_window": m.window}


class NeedsExperts(ConversionError):
    """A family of models with experts cannot express one without."""


def _layers_with_experts(m: ModelConfig) -> list[int]:
    layers = [layer for layer in range(m.num_layers) if m.is_moe_layer(layer)]
    if not layers:
        raise NeedsExperts("no layer of the model has experts, as those of this family have")
    return layers


def _shared_count(m: ModelConfig) -> int:
    """Shared experts as wide as the others."""
    return (m.moe_shared_expert_intermediate_size or 0) // m.expert_ffn


def _v3_router(m: ModelConfig) -> dict[str, Any]:
    """Which layers have experts, and which of these a token has."""
    return {
        "first_k_dense_replace": _layers_with_experts(m)[0],
        "n_group": m.moe_router_num_groups or 1,
        "topk_group": m.moe_router_group_topk or 1,
        "routed_scaling_factor": m.router_scale,
        "norm_topk_prob": m.normalizes_scores,
    }


def _heads(m: ModelConfig) -> dict[str, Any]:
    return {"num_nextn_predict_layers": m.mtp_num_layers or 0}


def _glm4_moe_keys(m: ModelConfig) -> dict[str, Any]:
    return _v3_router(m) | {"n_shared_experts": _shared_count(m), **_heads(m)}


def _latent_keys(m: ModelConfig) -> dict[str, Any]:
    """Widths of latents and heads, and YaRN's scales, which are not those of the other families."""
    keys: dict[str, Any] = {
        "q_lora_rank": m.q_lora_rank,
        "kv_lora_rank": m.kv_lora_rank,
        "qk_nope_head_dim": m.qk_head_dim,
        "qk_rope_head_dim": m.qk_pos_emb_head_dim,
        "v_head_dim": m.v_head_dim,
        "num_key_value_heads": m.num_attention_heads,
        "n_shared_experts": _shared_count(m),
    }
    if m.yarn is None:
        return keys
    scaling = scaling_keys(m) | {"mscale_all_dim": m.mscale_all_dim}
    if m.mscale and m.mscale_all_dim:
        scaling = scaling | {"mscale": m.mscale}
        del scaling["attention_factor"]
    rope = scaling | {"rope_theta": float(m.rotary_base)}
    return keys | {"rope_scaling": scaling, "rope_parameters": rope}


def _deepseek_v2_keys(m: ModelConfig) -> dict[str, Any]:
    router = _v3_router(m) | {"norm_topk_prob": False, "scoring_func": "softmax"}
    grouped = m.moe_router_num_groups is not None
    method = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return router | _latent_keys(m) | method


def _deepseek_v3_keys(m: ModelConfig) -> dict[str, Any]:
    method = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", **_heads(m)}
    return _v3_router(m) | _latent_keys(m) | method


def _glm4_moe_lite_keys(m: ModelConfig) -> dict[str, Any]:
    kinds = ["sparse" if m.is_moe_layer(layer) else "dense" for layer in range(m.num_layers)]
    return _deepseek_v3_keys(m) | {"mlp_layer_types": kinds}


def _ling_keys(m: ModelConfig) -> dict[str, Any]:
    return _v3_router(m) | {
        "num_shared_experts": _shared_count(m),
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "num_nextn_predict_layers": 0,
    }


def _minimax_m2_keys(m: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": m.expert_ffn,
        "rotary_dim": int(m.head_dim * m.rotary_percent),
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    }


def _ernie4_5_moe_keys(m: ModelConfig) -> dict[str, Any]:
    layers = _layers_with_experts(m)
    return {
        "moe_layer_start_index": layers[0],
        "moe_layer_end_index": layers[-1],
        "moe_layer_interval": 1 if len(layers) == 1 else layers[1] - layers[0],
        "moe_num_shared_experts": _shared_count(m),
    }


def _hunyuan_keys(m: ModelConfig) -> dict[str, Any]:
    keys = {"intermediate_size": m.expert_ffn, "moe_topk": m.moe_router_topk}
    if m.rotary_ntk_alpha == 1:
        return keys
    scaling = {"rope_type": "dynamic", "factor": 1.0, "alpha": m.rotary_ntk_alpha}
    rope = scaling | {"rope_theta": float(m.rotary_base)}
    return keys | {"rope_scaling": scaling, "rope_parameters": rope}


def _topk(default: int) -> Key:
    return Key("num_experts_per_tok", default, ("moe_router_topk",))


_QWEN_EXPERTS = _moe_names("mlp", shared="shared_expert")
_EXPERT_WIDTH = ("moe_ffn_hidden_size",)
_FP32_ROUTER: Flags = {"moe_router_dtype": "fp32"}
_SIGMOID_ROUTER: Flags = _FP32_ROUTER | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
_LATENT: Flags = _RMS_NORM | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "latent_norm_epsilon": 1e-6,
}
_LATENT_NAMES = _moe_names(
    "mlp",
    changes={
        _ATTENTION + ours: f"model.layers.{{}}.self_attn.{theirs}"
        for ours, theirs in (
            ("linear_q_proj", "q_proj"),
            ("linear_q_down_proj", "q_a_proj"),
            ("q_layernorm", "q_a_layernorm"),
            ("linear_q_up_proj", "q_b_proj"),
            ("linear_kv_down_proj", "kv_a_proj_with_mqa"),
            ("kv_layernorm", "kv_a_layernorm"),
            ("linear_kv_up_proj", "kv_b_proj"),
        )
    },
)
_LATENT_FIXED: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "layers to and from latents have no biases"),
    "rope_interleave": (True, "neighbours are rotated"),
    "moe_layer_freq": (1, "all layers behind the dense ones have experts"),
}
_V3_FIXED = _LATENT_FIXED | {
    "scoring_func": ("sigmoid", "scores of experts are sigmoids"),
    "topk_method": ("noaux_tc", "the selection has a bias"),
}
_V3 = Dialect(
    flags=_LATENT | _SIGMOID_ROUTER,
    keys=(
        Key("n_routed_experts", 256, ("num_experts",)),
        _topk(8),
        Key("moe_intermediate_size", 2048, _EXPERT_WIDTH),
    ),
    fixed=_V3_FIXED,
    kv_heads=128,
    own_head_dim=False,
    renamed={"num_local_experts": "n_routed_experts"},
    last=_read_deepseek_v3,
    written=_deepseek_v3_keys,
)
_DELTA_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_NTK_ALPHA = "rope_scaling.alpha"
_GRANITE_FACTORS = (
    Key("embedding_multiplier", 1.0, ("embedding_multiplier",)),
    Key("residual_multiplier", 1.0, ("residual_multiplier",)),
    Key("attention_multiplier", 1.0, ("softmax_scale",)),
    Key("logits_scaling", 1.0, ("logits_scaling",)),
)
_LING = Dialect(
    flags=_RMS_NORM | _SIGMOID_ROUTER,
    keys=(
        Key("use_qkv_bias", False, QKV_BIAS),
        Key("use_bias", False, ("add_attention_output_bias",)),
        Key("use_qk_norm", True, ("qk_layernorm",)),
        Key("num_experts", 256, ("num_experts",)),
        _topk(8),
        Key("moe_intermediate_size", 512, _EXPERT_WIDTH),
    ),
    fixed={
        "score_function": ("sigmoid", "scores of experts are sigmoids in the published code"),
        "norm_topk_prob": (True, "the published code always normalizes"),
        "router_dtype": ("fp32", "routers compute in float32"),
        "moe_router_enable_expert_bias": (True, "the published code has the bias always"),
        "use_rmsnorm": (True, "all norms are RMSNorm"),
        "use_sliding_window": (False, "attention has no window"),
    },
    kv_heads=4,
    head_dim=128,
    theta=600000,
    partial=1.0,
    last=_read_ling,
    written=_ling_keys,
)


def _smollm3_keys(m: ModelConfig) -> dict[str, Any]:
    rotated = [int(m.rope(layer) is not None) for layer in range(m.num_layers)]
    return {"no_rope_layers": rotated} | _some_windows(m)


_MLA_KEYS = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_group", "topk_group"),
)
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
                written=_some_windows,
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
                written=_some_windows,
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
                first=_phi3_rotary,
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
                last=lambda keys, flags: _read_qwen_moe(keys, _qwen2_moe_window(keys, flags)),
                written=lambda m: _some_windows(m) | _qwen_moe(m),
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
                last=lambda keys, flags: _read_qwen_moe(keys, _qwen3_moe_window(keys, flags)),
                written=lambda m: _all_windows(m) | _qwen_moe(m),
            ),
        ),
        like_llama(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            _qwen3_next_names(),
            Dialect(
                flags=_RMS_NORM
                | {"apply_layernorm_1p": True, "qk_layernorm": True}
                | {"attention_output_gate": True, "moe_shared_expert_gate": True},
                keys=(
                    _ATTENTION_BIAS,
                    Key("num_experts", 512, ("num_experts",)),
                    _topk(10),
                    Key("moe_intermediate_size", 512, _EXPERT_WIDTH),
                    Key(
                        "shared_expert_intermediate_size",
                        512,
                        ("moe_shared_expert_intermediate_size",),
                    ),
                    *(Key(name, usual, (name,)) for name, usual in _DELTA_SIZES.items()),
                ),
                fixed={
                    "sliding_window": (None, _NOT_READ),
                    "use_sliding_window": (False, _NOT_READ),
                },
                kv_heads=2,
                head_dim=256,
                partial=0.25,
                last=_read_qwen3_next,
                written=_qwen3_next_keys,
            ),
        ),
        like_llama(
            "olmoe",
            "OlmoeForCausalLM",
            _QWEN_EXPERTS,
            Dialect(
                flags=_RMS_NORM | {"qk_layernorm": True, "qk_layernorm_all_heads": True},
                keys=(_ATTENTION_BIAS, Key("num_experts", 64, ("num_experts",)), _topk(8)),
                fixed={
                    "clip_qkv": (None, "queries, keys and values are not clipped"),
                    "sliding_window": (None, _NOT_READ),
                },
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
                last=_window_with_base,
                written=_by_kind,
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
            Dialect(keys=(_ATTENTION_BIAS, _MLP_BIAS, *_GRANITE_FACTORS)),
        ),
        like_llama(
            "granitemoe",
            "GraniteMoeForCausalLM",
            _granite_moe_names(),
            Dialect(
                keys=(
                    _ATTENTION_BIAS,
                    *_GRANITE_FACTORS,
                    Key("num_local_experts", 8, ("num_experts",)),
                    _topk(2),
                ),
                last=_without_aux_loss,
                written=lambda m: {"intermediate_size": m.expert_ffn},
            ),
        ),
        like_llama(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            {**_moe_names("mlp"), **TOKEN_HEADS},
            Dialect(
                flags=_RMS_NORM | _SIGMOID_ROUTER,
                keys=(
                    Key("attention_bias", False, QKV_BIAS),
                    Key("use_qk_norm", False, ("qk_layernorm",)),
                    Key("n_routed_experts", 128, ("num_experts",)),
                    _topk(8),
                    Key("moe_intermediate_size", 1408, _EXPERT_WIDTH),
                ),
                epsilon=("rms_norm_eps", 1e-5),
                kv_heads=8,
                partial=0.5,
                renamed={"num_local_experts": "n_routed_experts"},
                last=_read_glm4_moe,
                written=_glm4_moe_keys,
            ),
        ),
        like_llama(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            _LATENT_NAMES,
            Dialect(
                flags=_LATENT | _FP32_ROUTER | {"moe_router_pre_softmax": True},
                keys=(
                    Key("n_routed_experts", 64, ("num_experts",)),
                    Key("num_experts_per_tok", 6, ("moe_router_topk",)),
                    Key("moe_intermediate_size", 1407, _EXPERT_WIDTH),
                ),
                fixed=_LATENT_FIXED
                | {
                    "mlp_bias": (False, "dense and shared MLPs have biases there, experts none"),
                    "norm_topk_prob": (False, _NOT_READ),
                    "scoring_func": ("softmax", "scores of experts are a softmax"),
                },
                own_head_dim=False,
                renamed={"num_experts": "n_routed_experts"},
                last=_read_deepseek_v2,
                written=_deepseek_v2_keys,
            ),
        ),
        *(
            like_llama(name, "DeepseekV3ForCausalLM", {**_LATENT_NAMES, **TOKEN_HEADS}, _V3)
            for name in ("deepseek_v3", "kimi_k2")
        ),
        like_llama(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            _LATENT_NAMES,
            Dialect(
                flags=_LATENT | _SIGMOID_ROUTER,
                keys=(
                    Key("n_routed_experts", 64, ("num_experts",)),
                    _topk(4),
                    Key("moe_intermediate_size", 1536, _EXPERT_WIDTH),
                ),
                fixed=_V3_FIXED,
                epsilon=("rms_norm_eps", 1e-5),
                kv_heads=20,
                own_head_dim=False,
                renamed={"num_local_experts": "n_routed_experts"},
                last=_read_glm4_moe_lite,
                written=_glm4_moe_lite_keys,
            ),
        ),
        *(
            like_llama(name, "BailingMoeV2ForCausalLM", _ling_names(), _LING)
            for name in ("bailing_moe", "bailing_moe_v2")
        ),
        like_llama(
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            _moe_names("block_sparse_moe", "w1", "w3", "w2", bias="e_score_correction_bias"),
            Dialect(
                flags=_RMS_NORM
                | _SIGMOID_ROUTER
                | {"qk_layernorm": True, "qk_layernorm_all_heads": True},
                keys=(Key("num_local_experts", 256, ("num_experts",)), _topk(8)),
                fixed={
                    "scoring_func": ("sigmoid", "scores of experts are sigmoids"),
                    "use_qk_norm": (True, "queries and keys are normalized"),
                    "qk_norm_type": ("per_layer", "one norm has all heads of a layer"),
                    "use_routing_bias": (True, "the selection has a bias"),
                    "shared_intermediate_size": (0, "there is no shared expert"),
                    "layernorm_full_attention_beta": (1.0, _NOT_READ),
                    "layernorm_linear_attention_beta": (1.0, _NOT_READ),
                    "layernorm_mlp_beta": (1.0, _NOT_READ),
                    "sliding_window": (None, _NOT_READ),
                },
                kv_heads=8,
                head_dim=128,
                theta=5000000,
                partial=1.0,
                renamed={"num_experts": "num_local_experts"},
                first=_minimax_m2_rotary,
                last=_read_minimax_m2,
                written=_minimax_m2_keys,
            ),
        ),
        like_llama(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            _moe_names(
                "mlp",
                changes={
                    _LAYER + "mlp.router.expert_bias": (
                        ("model.layers.{}.mlp.moe_statics.e_score_correction_bias",),
                        ROW,
                    )
                },
            ),
            Dialect(
                flags=_RMS_NORM
                | _INTERLEAVED
                | _FP32_ROUTER
                | {"moe_router_enable_expert_bias": True},
                keys=(
                    Key("moe_num_experts", 64, ("num_experts",)),
                    Key("moe_k", 6, ("moe_router_topk",)),
                    Key("moe_intermediate_size", 1536, _EXPERT_WIDTH),
                ),
                fixed={
                    "use_bias": (False, "dense and shared MLPs have biases there, experts none"),
                    "moe_norm_min": (1e-12, "probabilities are divided by their sum"),
                    "moe_gate": ("topk", "the best experts are selected"),
                    "moe_use_aux_free": (True, "the selection has a bias"),
                    "use_rmsnorm": (True, "all norms are RMSNorm"),
                },
                epsilon=("rms_norm_eps", 1e-5),
                kv_heads=4,
                theta=500000,
                tied=True,
                renamed={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
                last=_read_ernie4_5_moe,
                written=_ernie4_5_moe_keys,
            ),
        ),
        like_llama(
            "hunyuan_v1_moe",
            "HunYuanMoEV1ForCausalLM",
            _moe_names(
                "mlp",
                shared="shared_mlp",
                changes={
                    _LAYER + "mlp.router": "model.layers.{}.mlp.gate.wg",
                    _ATTENTION + "q_layernorm": "model.layers.{}.self_attn.query_layernorm",
                    _ATTENTION + "k_layernorm": "model.layers.{}.self_attn.key_layernorm",
                },
            ),
            Dialect(
                flags=_RMS_NORM
                | _FP32_ROUTER
                | {"qk_layernorm": True, "qk_layernorm_after_rope": True},
                keys=(
                    _ATTENTION_BIAS,
                    Key("num_experts", 1, ("num_experts",)),
                    Key("moe_topk", 1, ("moe_router_topk",)),
                ),
                fixed={
                    "mlp_bias": (False, _NOT_READ),
                    "num_shared_expert": (1, "there is one shared expert"),
                    "use_mixed_mlp_moe": (True, "there is a shared expert"),
                    "use_qk_norm": (True, "queries and keys are normalized"),
                    "use_cla": (False, "each layer has keys and values of its own"),
                    "use_mla": (False, _NOT_READ),
                    "norm_topk_prob": (True, "the probabilities sum to 1"),
                    "norm_type": ("rms", "all norms are RMSNorm"),
                    "routed_scaling_factor": (1.0, _NOT_READ),
                    "group_limited_greedy": (False, _NOT_READ),
                    "moe_layer_num_skipped": (0, "all layers have experts"),
                    "use_rotary_pos_emb": (True, "positions are rotary"),
                    "position_embedding_xdrope": (False, "positions are one number"),
                    **dict.fromkeys(_MLA_KEYS, (None, _NOT_READ)),
                },
                epsilon=("rms_norm_eps", 1e-5),
                renamed={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
                first=_hunyuan_first,
                last=_read_hunyuan,
                written=_hunyuan_keys,
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
        like_llama(
            "gemma2",
            "Gemma2ForCausalLM",
            _SANDWICH_NAMES,
            Dialect(
                **_GEMMA,
                flags=_SANDWICH,
                fixed=_CAUSAL,
                first=lambda keys: _usual_types(keys, 2),
                last=_gemma2_layers,
                written=lambda m: _windows(m) | _gemma_keys(m),
            ),
        ),
        like_llama(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _SANDWICH_NAMES,
            Dialect(
                **_GEMMA,
                flags=_SANDWICH | {"qk_layernorm": True},
                fixed=_CAUSAL | {"attn_logit_softcapping": (None, _NOT_READ)},
                theta=1000000,
                omitted=("rope_scaling",),
                first=_gemma3_first,
                last=_gemma3_layers,
                written=lambda m: _by_kind(m) | _gemma_keys(m),
            ),
        ),
        like_llama(
            "gpt_oss",
            "GptOssForCausalLM",
            _gpt_oss_names(),
            Dialect(
                flags=_RMS_NORM
                | {"add_mlp_bias": True, "glu_linear_offset": 1.0, "softmax_type": "learnable"},
                keys=(
                    Key("attention_bias", True, ATTENTION_BIASES),
                    Key("num_local_experts", 128, ("num_experts",)),
                    _topk(4),
                    Key("swiglu_limit", 7.0, ("activation_func_clamp_value",)),
                ),
                fixed={"swiglu_alpha": (1.702, "--quick-geglu is x sigmoid(1.702 x)")},
                activations=QUICK_GEGLU,
                epsilon=("rms_norm_eps", 1e-5),
                kv_heads=8,
                head_dim=64,
                theta=150000,
                first=_gpt_oss_first,
                last=_gpt_oss_layers,
                written=lambda m: _windows(m) | {"intermediate_size": m.expert_ffn},
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
