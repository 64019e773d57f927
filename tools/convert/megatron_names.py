"""Names of Megatron-LM's two GPT models (checkpoint version 3.0), and its arguments <-> our flags.

Their tensors differ from ours in the names only: queries, keys and values are ordered by query
group in both, and a gated matrix is gate rows, then up rows, on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.arguments import flags_of
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from tools.convert.links import ConversionError

# Arguments of theirs that change what is computed and have no flag here: name -> values under which
# nothing changes.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "moe_apply_probs_on_input": (None, False),
    "moe_latent_size": (None,),
    "multi_latent_attention": (None, False),
    "window_size": (None,),
    "softmax_type": (None, "vanilla"),
    "quick_geglu": (None, False),
    "mtp_num_layers": (None, 0),
    "no_rope_freq": (None,),
    "attention_output_gate": (None, False),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (None, 0, 0.0),
    "activation_func_clamp_value": (None,),
    "retro_add_retriever": (None, False),
    "is_hybrid_model": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "qk_l2_norm": (None, False),
    "use_mup": (None, False),
}
# Flags of ours that an export cannot express.
_NOT_THEIRS = (
    *("no_rope_freq", "use_parallel_residual", "post_self_attn_layernorm", "post_mlp_layernorm"),
    *("embedding_multiplier", "residual_multiplier", "softmax_scale", "logits_scaling"),
    *("no_pre_layernorm", "xielu", "qk_layernorm_all_heads"),
)
_POSITIONS = ("learned_absolute", "rope", "none")
_TOKENIZER = (
    "tokenizer_type",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "vocab_extra_ids",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
)
# The older model's names in ours, in this order.
_LEGACY = (
    (r"^language_model\.", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"^decoder\.final_(layer)?norm\.", "decoder.final_layernorm."),
    (r"\.(input_norm)\.", ".input_layernorm."),
    (r"\.(post_attention_norm|post_attention_layernorm)\.", ".pre_mlp_layernorm."),
    (r"\.(self_)?attention\.", ".self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
)
# Transformer Engine's norms inside the matrix behind them.
_FUSED = (
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
)
TIED_COPY = "word_embeddings_for_head.weight"  # of the older model, on the last pipeline stage
_IGNORED = re.compile(r".*(_extra_state|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq)")


def our_name(theirs: str) -> str | None:
    """Our name of a tensor of either model, its layer number as it is; None for what is no
    weight."""
    name = theirs.removeprefix("module.")
    if _IGNORED.fullmatch(name):
        return None
    for pattern, new in (*_LEGACY, *_FUSED) if name.startswith("language_model.") else _FUSED:
        name = re.sub(pattern, new, name)
    return name


def legacy_path(ours: str) -> tuple[str, ...]:
    """Where the older model keeps a tensor of ours (its layer number as it is): the keys below
    `model`. Raises ConversionError for what that model has not."""
    if ours == TIED_COPY:
        return ("word_embeddings_for_head", "weight")
    head, rest = ours.split(".", 1)
    if head == "embedding":
        return "language_model", "embedding", *rest.split(".")
    if head == "output_layer":
        return "language_model", "output_layer", rest
    for mine, theirs in (
        (".linear_qkv.", ".query_key_value."),
        (".linear_proj.", ".dense."),
        (".linear_fc1.", ".dense_h_to_4h."),
        (".linear_fc2.", ".dense_4h_to_h."),
        (".pre_mlp_layernorm.", ".post_attention_norm."),
        (".input_layernorm.", ".input_norm."),
        ("final_layernorm.", "final_norm."),
    ):
        rest = rest.replace(mine, theirs)
    if "q_layernorm" in rest or "k_layernorm" in rest:
        raise ConversionError(
            f"{ours}: the older model has no norms of queries and keys; give --model core"
        )
    return "language_model", "encoder", rest


def flags_from(args: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Our flags of the architecture and of the tokenizer from their arguments. Raises
    ConversionError, naming every argument that cannot be represented or is missing."""
    problems = [
        f"{source}: {name} {args[name]!r} cannot be represented here"
        for name, neutral in _NEUTRAL.items()
        if args.get(name) not in neutral
    ]
    flags = {f.name: args[f.name] for f in fields(ModelConfig) if args.get(f.name) is not None}
    frequency = flags.get("moe_layer_freq")
    if isinstance(frequency, list):
        flags["moe_layer_freq"] = str(frequency)
    if flags.get("moe_token_dispatcher_type") == "flex":
        flags["moe_token_dispatcher_type"] = "alltoall"
    if flags.get("position_embedding_type", "rope") not in _POSITIONS:
        problems.append(
            f"{source}: position_embedding_type {flags['position_embedding_type']!r} cannot be "
            "represented here"
        )
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not isinstance(flags.get(name), int):
            problems.append(
                f"{source}: its arguments have no {name}; give --args FILE with the flags of the "
                "model"
            )
    known = flags_of(Config)
    for name, value in flags.items():
        switch = known[name].kind in ("switch", "off")
        words = value if isinstance(value, (list, tuple)) else [value]
        try:
            flags[name] = bool(value) if switch else known[name].convert(list(map(str, words)))
        except ValueError as error:
            problems.append(f"{source}: {name}: {error}")
        if switch and not isinstance(value, bool):
            problems.append(f"{source}: {name} is {value!r}, should be True or False")
    if problems:
        raise ConversionError("\n".join(problems))
    if flags.get("kv_channels") == flags["hidden_size"] / flags["num_attention_heads"]:
        flags["kv_channels"] = None
    return flags | {name: args[name] for name in _TOKENIZER if args.get(name) is not None}


def args_for(model: ModelConfig, data: Mapping[str, Any], experts: bool) -> dict[str, Any]:
    """Their arguments of our model; `data` are more (sizes of the layout, tokenizer); `experts`:
    the format has a place for them. Raises ConversionError for what their models cannot express."""
    problems = []
    if (
        model.attention_output_bias != model.add_bias_linear
        or model.mlp_bias != model.add_bias_linear
    ):
        problems.append(
            "--add-attention-output-bias, --add-mlp-bias: Megatron-LM has no such biases alone"
        )
    if model.num_experts is not None and not experts:
        problems.append("--num-experts: experts are written by --ckpt-format torch_dist alone")
    if model.num_experts is not None and len(model.moe_layers) < model.num_layers:
        problems.append(
            f"--moe-layer-freq {model.moe_layer_freq}: experts are converted where every layer has "
            "them"
        )
    problems += [
        f"--{name.replace('_', '-')}: models with it are not converted"
        for name in _NOT_THEIRS
        if getattr(model, name) != getattr(ModelConfig(), name)
    ]
    if model.geglu:
        problems.append("--geglu: Megatron-LM has no argument for it")
    if problems:
        raise ConversionError("\n".join(problems))
    lists = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    return {
        **vars(model),
        # a router of Megatron compares the one type with "sinkhorn"; a list is several
        **{name: list(v) if len(v := getattr(model, name)) > 1 else v[0] for name in lists},
        "ffn_hidden_size": model.ffn,
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups,
        "position_embedding_type": model.positions,
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": model.seq_length,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "moe_layer_freq": 1,
        **data,
    }
