"""Names of Megatron-LM's two GPT models (checkpoint version 3.0), and its arguments <-> our flags.

Their tensors differ from ours in the names only: queries, keys and values are ordered by query
group in both, and a gated matrix is gate rows, then up rows, on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from megatron.arguments import flags_of
from megatron.config import command_line
from megatron.config.model import ModelConfig
from megatron.features.registry import RunConfig

from .config_keys import is_unset, names_of, not_known
from .links import ConversionError

# Arguments that change what is computed and have no flag here, or whose models are not converted:
# name -> values under which nothing changes.
_OFF = (None, False)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_head_type": (None, "multihead"),
    "compression_training": _OFF,
    "enable_hyper_connections": _OFF,
    "enable_mhc_connections": _OFF,
    "enable_gpt_oss": _OFF,
    "experimental_attention_variant": (None,),
    "export_model_type": (None, "GPTModel"),
    "export_moe_apply_probs_on_input": _OFF,
    "export_num_eagle_layers": (None, 0),
    "export_num_medusa_heads": (None, 0),
    "export_num_mtp": (None, 0),
    "export_qk_l2_norm": _OFF,
    "heterogeneous_layers_config_encoded_json": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_attention_ratio": (None, 0.0),
    "hybrid_layer_pattern": (None,),
    "hybrid_mlp_ratio": (None, 0.0),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": _OFF,
    "modelopt_enabled": _OFF,
    "moe_apply_probs_on_input": _OFF,
    "moe_expert_rank_capacity_factor": (None,),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_router_force_biased": (None,),
    "moe_router_force_load_balancing": _OFF,
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_token_dropping": _OFF,
    "mtp_hsm": _OFF,
    "mtp_hybrid_override_pattern": (None,),
    "mtp_use_repeated_layer": _OFF,
    "num_experts_switch": (None,),
    "qk_l2_norm": _OFF,
    "retro_add_retriever": _OFF,
    "spec": (None,),
}
# Other names of arguments that are flags here, and where they are used.
_RENAMED = {
    "layernorm_epsilon": "norm_epsilon",  # until September 2023, since core 0.16, DeepSpeed
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",  # since core 0.16
    "rope_theta": "rotary_base",  # DeepSpeed
    "rotary_position_embeddings_theta": "rotary_base",  # of a fork
}
# What the older model (language_model.*) does not read, and what it computes with.
_LEGACY_FIXED = {
    "rotary_base": 10000,
    "use_rope_scaling": False,
    "no_rope_freq": None,
    "window_size": None,
    "softmax_type": "vanilla",
    "rope_type": "rope",
    "attention_output_gate": False,
    "use_mup": False,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
}
# Arguments that are no flags here, nor accepted ones of another program, and change nothing
# in the function of a model that is converted: for training, files, generation, other models, or
# read with arguments of _NEUTRAL alone.
_HARMLESS = names_of("""
_is_global_batch_size_explicitly_specified actual_seq_length adjust_word_embedding_init
allow_ambiguous_pad_tokens allow_transformer_engine aml_* attn_mask batch_invariant_* batch_size
bert_* biencoder_* blend_sample_in_corpus block_data_path calc_ft_timeouts chat_template ckpt_*
classes_fraction constant_lr consumed_* count cpu_offloading_* create_all_gather_group cuda_graph_*
curr_iteration curriculum_* custom_token_counting data_* dataloader_*
ddp_param_name_patterns_for_fp32_local_accumulation decode_only_cuda_graphs decoder_num_layers
decoder_seq_length deepscale* deepspeed_* deprecated_use_mcore_models dino_*
disable_chunked_prefill disable_mamba_mem_eff_path disable_msc_deprecated dist_ckpt_* do_test
do_train do_valid ds_* dsa_* dshampooadamw_* embedding_init_method_std embedding_path
embedding_weights_in_fp32 enable_chunked_prefill enable_cuda_graph enable_ft_package
enable_full_sharding_in_hsdp enable_gloo_process_groups enable_zbh1_* encoder_num_layers
encoder_pipeline_model_parallel_size encoder_seq_length encoder_tensor_model_parallel_size eos_id
evidence_data_path exit_signal expert_tensor_parallel_num_weight_shards export_default_te_spec
export_draft_vocab_size export_eagle_algorithm export_force_local_attention export_freeze_mtp
export_kd_* export_kv_cache_quant export_legacy_megatron export_offline_model export_quant_cfg
export_real_quant_cfg export_te_mcore_model external_cuda_graph fake_process_group fault_injector_*
fim_* fine_grained_offloading_max_inflight_offloads finetune_* first_last_layers_bf16
flash_attention_version flight_recorder_* force_ds_sequence_parallel fp4* fp8_* freeze_all_layers
freeze_base_for_mtp fsdp_* ft_* fused_residual_rmsnorm gdp_cutedsl_kernel
gdp_num_chunk_states_to_recompute gdp_num_householder grpo_* gtp_* head_lr_mult hidden_size_teacher
hybrid_context_parallel ict_* img_* indexer_batch_size indexer_log_interval inference inference_*
inprocess_* iter_per_epoch iteration kd kd_* keep_fp8_transpose_cache* kill_switch_file kitchen_*
langrl_* lazy_mpu_init linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
linear_num_key_heads linear_num_value_heads linear_value_head_dim lion_* load_model_opt_format
load_tag load_teacher log_*_to_tensorboard logger_iteration logit_dtype logits_load_decode_threads
logits_load_dir logits_load_ignore_errors logits_load_kd_loss_alpha logits_load_msc_prefetch_depth
logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p
logits_save_top_p_min_k lr_* mamba_head_dim mamba_inference_conv_states_dtype
mamba_inference_ssm_states_dtype mamba_num_groups mamba_num_heads mamba_state_dim
mamba_training_ssm_states_dtype mask_factor mask_prob mask_type max_seqlen_per_dp_cp_rank
megatron_fsdp_* metadata_path mhc_init_gating_factor mhc_num_residual_streams
mhc_recompute_layer_num mhc_sinkhorn_iterations mlp_chunks_for_training mmap_warmup
model_parallel_size model_type moe_combine_bwd_dtype moe_deepep_* moe_dispatch_fwd_dtype
moe_enable_deepep moe_enable_routing_replay moe_extended_tp moe_flex_dispatcher_* moe_hybridep_*
moe_ncclep_* moe_pad_experts_for_cuda_graph_inference moe_paged_stash
moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
moe_paged_stash_page_size moe_permute_fusion_into_hybridep moe_router_padding_for_*
moe_router_quantile_balancing_ema moe_routing_trace_* moe_single_grouped_bias
moe_single_grouped_weight moe_upcycling_granularity moe_use_grouped_tensor
moe_use_legacy_grouped_gemm moe_use_upcycling mos mtp_detach_heads mtp_loss_scaling_factor
mtp_standalone multiprocessing_context muon_* muonadamw_* muonclip_* mup_width_mult
nccl_all_reduce_for_prefill
no_load_lr_state null_tokenizer_* num_attention_heads_teacher num_channels num_classes
num_experts_teacher num_floating_point_operations_so_far num_layers_at_end_in_bf16
num_layers_at_start_in_bf16 num_layers_teacher num_speculative_tokens object_storage_cache_path
offset_sampling_seed_by_dp_rank one_logger_* otel_* outer_dp_sharding_strategy
output_bert_embeddings override_ckpt_iteration pad_vocab_size padded_vocab_size params_dtype
patch_dim per_dataset_sequences_path perform_rl_step phase_transition_iterations
pipeline_model_parallel_split_rank pretrained_checkpoint profile_* qad_train_target
query_in_block_prob random_ltd* rank record_shapes refit_method renormalize_blend_weights
repeated_dataloader reset_iteration retriever_* retro_* return_data_index rl_* rotary_pos_emb
s3_cache_path sample_rate schedulefree_* sft sft_* short_seq_prob shuffle_sample_in_corpus
skipped_train_samples sophiag_* special_tokens standalone_embedding_stage straggler_*
stream_ckpt_dequant suggested_communication_unit_size swin_backbone_type te_precision_config_file
teacher_* tensor_parallel_num_weight_shards tensorboard_* timescale titles_data_path tokenizer_*
torch_fsdp2_* tp_comm_* trace_dir train_* transformer_pipeline_model_parallel_size
use_contiguous_buffers_in_ddp use_custom_fsdp use_dataset_only use_dist_ckpt_deprecated
use_flash_attn_builder use_flash_attn_triton use_flash_attn_v1 use_flash_attn_v2 use_gigatoken
use_grouped_gemm_for_* use_kitchen* use_layer_wise_distributed_optimizer use_mamba_mem_eff_path
use_megatron_fsdp use_mics use_one_sent_docs use_torch_fsdp2 variable_seq_lengths
virtual_pipeline_model_parallel_size vision_backbone_type vision_pretraining
vision_pretraining_type wandb_* warmup word_embedding_init_std yaml_cfg yarn_* zero_*
""")
# Arguments that are read by models with experts alone.
_OF_EXPERTS = names_of(
    "create_moe_param_group enable_expert_tensor_parallelism expert_interval mlp_type moe_* topk "
    "use_tutel"
)
# Flags of ours that an export cannot express.
_NOT_IN_MEGATRON = (
    *("use_parallel_residual", "post_self_attn_layernorm", "post_mlp_layernorm"),
    *("embedding_multiplier", "residual_multiplier", "softmax_scale", "logits_scaling"),
    *("no_pre_layernorm", "xielu", "qk_layernorm_all_heads", "window_rotary_base"),
    *("attn_logit_softcapping", "final_logit_softcapping", "rotary_ntk_alpha"),
    *("qk_layernorm_after_rope", "moe_router_normalization", "moe_router_group_score_topk"),
    *("longrope_short_factor", "longrope_long_factor", "longrope_attention_factor"),
    *("latent_norm_epsilon", "experimental_attention_variant", "hybrid_layer_pattern"),
)
_POSITIONS = ("learned_absolute", "rope", "yarn", "none")
# Flags of YaRN: their arguments begin with yarn_, but for those of latent attention.
_YARN = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim"),
)
_LATENT_CONTEXT = 4096  # that of its YaRN, which is no argument
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
    (r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r".\1_layernorm.\2"),
)
TIED_COPY = "word_embeddings_for_head.weight"  # of the older model, on the last pipeline stage
_IGNORED = re.compile(r".*(_extra_state|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq)")


def our_name(megatron_name: str) -> str | None:
    """Our name of a tensor of either model, its layer number as it is; None for what is no
    weight."""
    name = megatron_name.removeprefix("module.")
    if _IGNORED.fullmatch(name):
        return None
    for pattern, new in (*_LEGACY, *_FUSED) if name.startswith("language_model.") else _FUSED:
        name = re.sub(pattern, new, name)
    return name


def legacy_path(native_name: str) -> tuple[str, ...]:
    """Where the older model keeps a tensor of ours (its layer number as it is): the keys below
    `model`. Raises ConversionError for what that model has not."""
    if native_name == TIED_COPY:
        return ("word_embeddings_for_head", "weight")
    head, tail = native_name.split(".", 1)
    if head == "embedding":
        return "language_model", "embedding", *tail.split(".")
    if head == "output_layer":
        return "language_model", "output_layer", tail
    for our_word, their_word in (
        (".linear_qkv.", ".query_key_value."),
        (".linear_proj.", ".dense."),
        (".linear_fc1.", ".dense_h_to_4h."),
        (".linear_fc2.", ".dense_4h_to_h."),
        (".pre_mlp_layernorm.", ".post_attention_norm."),
        (".input_layernorm.", ".input_norm."),
        ("final_layernorm.", "final_norm."),
    ):
        tail = tail.replace(our_word, their_word)
    if "q_layernorm" in tail or "k_layernorm" in tail:
        raise ConversionError(
            f"{native_name}: the older model has no norms of queries and keys; give --model core"
        )
    return "language_model", "encoder", tail


def flags_from(
    args: Mapping[str, Any],
    source: str,
    *,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    ignored: Collection[str] = (),
    kind: str = "core",
) -> dict[str, Any]:
    """Our flags of the architecture and of the tokenizer from their arguments.

    `overrides`: flags that count more; `ignored`: unknown arguments that may be set; `kind` of the
    model: core, legacy or deepspeed. Raises ConversionError, naming every argument that cannot be
    represented, is missing, or is set and not known.
    """
    problems: list[str] = []
    renamed = _renamed(args, source, overrides, problems) | dict(overrides)
    if kind == "legacy":
        problems += [
            f"{source}: {name} {value!r}: the older model computes with {fixed!r} whatever "
            f"this says; give --args FILE with {_flag(name)} [config-key-not-supported]"
            for name, fixed in _LEGACY_FIXED.items()
            if (value := renamed.get(name)) not in (None, fixed) and name not in overrides
        ]
    problems += _refused(renamed, source, ignored)
    flags = {
        f.name: renamed[f.name] for f in fields(ModelConfig) if renamed.get(f.name) is not None
    }
    if kind == "core":
        flags.pop("openai_gelu", None)  # megatron-core does not read it
    flags.pop("moe_router_force_load_balancing", None)  # of benchmarks
    if flags.get("multi_latent_attention"):
        problems += _read_latent(flags, renamed, source)
    else:
        flags.pop("rope_type", None)
        for name in _YARN:
            flags.pop(name, None)
            if (value := renamed.get(f"yarn_{name}")) is not None:
                flags[name] = value
    for name in ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq"):
        if isinstance(flags.get(name), list):
            flags[name] = str(flags[name])
    if flags.get("position_embedding_type", "rope") not in _POSITIONS:
        problems.append(_not_supported(source, "position_embedding_type", renamed))
    problems += [
        f"{source}: its arguments have no {name}; give --args FILE with the flags of the model"
        for name in ("num_layers", "hidden_size", "num_attention_heads")
        if not isinstance(flags.get(name), int)
    ]
    if "num_experts" in flags and "moe_router_topk" not in flags:
        problems.append(_not_supported(source, "num_experts", renamed))  # routers before core 0.5
    problems += _convert(flags, source)
    if problems:
        raise ConversionError("\n".join(problems))
    if flags.get("kv_channels") == flags["hidden_size"] / flags["num_attention_heads"]:
        flags["kv_channels"] = None
    return flags | {name: renamed[name] for name in _TOKENIZER if renamed.get(name) is not None}


def _read_latent(flags: dict[str, Any], args: Mapping[str, Any], source: str) -> list[str]:
    """Latent attention's flags, in place; what cannot be read."""
    latent = flags_of(RunConfig)["multi_latent_attention"]
    problems = [
        _not_supported(source, name, args)
        for name in latent.excludes
        if flags.get(name) not in (None, getattr(ModelConfig(), name))
    ]
    if flags.get("rope_type", "yarn") == "yarn" and flags.get("rotary_scaling_factor") != 1.0:
        if flags.get("max_position_embeddings") == _LATENT_CONTEXT:  # of releases that read it
            flags.setdefault("original_max_position_embeddings", _LATENT_CONTEXT)
        problems += [
            f"{source}: its arguments have no {name}, which its release sets by itself; give "
            f"--args FILE with {_flag(name)} [config-key-not-supported]"
            for name in ("mscale", "mscale_all_dim", "original_max_position_embeddings")
            if name not in flags
        ]
    return problems


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _not_supported(source: str, name: str, args: Mapping[str, Any]) -> str:
    return (
        f"{source}: {name} {args[name]!r} cannot be represented here: no flag of this suite does "
        "that [config-key-not-supported]"
    )


def _renamed(
    args: Mapping[str, Any], source: str, overrides: Collection[str], problems: list[str]
) -> dict[str, Any]:
    """The arguments, those that are flags here under our names."""
    renamed = dict(args)
    for megatron_name, native_name in _RENAMED.items():
        value = renamed.pop(megatron_name, None)
        if value is None:
            continue
        if renamed.get(native_name) not in (None, value) and native_name not in overrides:
            problems.append(
                f"{source}: {megatron_name} is {value!r} and {native_name} "
                f"{renamed[native_name]!r}; give --args FILE with {_flag(native_name)} "
                "[config-key-not-supported]"
            )
        renamed[native_name] = value
    heads = renamed.pop("num_key_value_heads", None)
    if isinstance(heads, int) and heads != renamed.get("num_attention_heads"):
        renamed |= {"num_query_groups": heads, "group_query_attention": True}
    if renamed.get("mtp_num_layers") in (None, 0):
        renamed |= dict.fromkeys(("mtp_num_layers", "mtp_loss_scaling_factor"))
    if renamed.get("num_experts") in ([1], (1,)):
        renamed["num_experts"] = None
    return renamed


def _refused(args: Mapping[str, Any], source: str, ignored: Collection[str]) -> list[str]:
    """What is wrong with arguments that are no flags here, or whose models are not converted."""
    flags = flags_of(RunConfig)
    foreign = command_line.foreign_flags(RunConfig)
    problems = []
    unknown = {}
    for name, value in args.items():
        if args.get("num_experts") is None and _OF_EXPERTS.fullmatch(name):
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                problems.append(_not_supported(source, name, args))
        elif name not in flags and not (
            name in ignored
            or is_unset(value)
            or foreign.changes_nothing(name, value)
            or _HARMLESS.fullmatch(name)
        ):
            unknown[name] = value
    if unknown:
        problems.append(not_known(source, unknown))
    return problems


def _convert(flags: dict[str, Any], source: str) -> list[str]:
    """Read the values as those of our flags, in place; what is wrong with them."""
    declared = flags_of(RunConfig)
    problems = []
    for name, value in flags.items():
        switch = declared[name].kind in ("switch", "off")
        words = value if isinstance(value, (list, tuple)) else [value]
        try:
            flags[name] = bool(value) if switch else declared[name].convert(list(map(str, words)))
        except ValueError as error:
            problems.append(f"{source}: {name}: {error}")
        if switch and not isinstance(value, bool):
            problems.append(f"{source}: {name} is {value!r}, should be True or False")
    return problems


def args_for(
    model: ModelConfig, data: Mapping[str, Any], experts: bool, kind: str = "core"
) -> dict[str, Any]:
    """Their arguments of our model; `data` are more (sizes of the layout, tokenizer); `experts`:
    the format has a place for them; `kind` of the model: core or legacy. Raises ConversionError for
    what their models cannot express."""
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
    if model.num_experts is not None and model.mlp_bias:
        problems.append("biases of experts (--disable-bias-linear is missing): not converted")
    if model.num_experts is not None and len(model.moe_layers) < model.num_layers:
        problems.append(
            f"--moe-layer-freq {model.moe_layer_freq}: experts are converted where every layer has "
            "them"
        )
    problems += [
        f"--{name.replace('_', '-')}: models with it are not converted"
        for name in _NOT_IN_MEGATRON
        if getattr(model, name) != getattr(ModelConfig(), name)
    ]
    if model.geglu:
        problems.append("--geglu: Megatron-LM has no argument for it")
    tanh = model.bias_gelu_fusion and model.add_bias_linear
    if kind == "core" and model.activation == "gelu (tanh)" and not tanh:
        problems.append(
            "--openai-gelu: megatron-core computes the exact GELU then; give --model legacy"
        )
    if kind == "legacy":
        problems += [
            f"{_flag(name)}: the older model does not read it; omit --model legacy"
            for name, fixed in _LEGACY_FIXED.items()
            if getattr(model, name) not in (fixed, None)
        ]
    if problems:
        raise ConversionError("\n".join(problems))
    return {
        **vars(model),
        "moe_router_load_balancing_type": _one_or_list(model.moe_router_load_balancing_type),
        "moe_aux_loss_coeff": _one_or_list(model.moe_aux_loss_coeff),
        "ffn_hidden_size": model.ffn,
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups,
        **_rotary(model),
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": model.seq_length,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "moe_layer_freq": 1,
        "no_rope_freq": model.no_rope_freq
        and [int(model.rope(layer) is None) for layer in range(model.num_layers)],
        "window_attn_skip_freq": model.window_attn_skip_freq
        and [int(model.window_of(layer) is not None) for layer in range(model.num_layers)],
        **data,
    }


def _rotary(model: ModelConfig) -> dict[str, Any]:
    """Arguments of positions: latent attention has YaRN's without yarn_."""
    if model.multi_latent_attention:
        kind = "yarn" if model.has_yarn else "rope"
        return {"position_embedding_type": model.positions, "rope_type": kind}
    return {
        "position_embedding_type": "yarn" if model.yarn else model.positions,
        "rope_type": None,
        **{f"yarn_{name}": getattr(model, name) for name in _YARN if model.yarn},
    }


def _one_or_list(values: Sequence[Any]) -> Any:
    """A router of Megatron compares the one type with "sinkhorn"; a list is several."""
    return list(values) if len(values) > 1 else values[0]
