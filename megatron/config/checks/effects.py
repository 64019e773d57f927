"""Notes on flags that have no effect without another one, or never."""

from __future__ import annotations

from collections.abc import Iterator

from megatron import launcher
from megatron.config.checks.facts import Facts
from megatron.config.checks.model import ACTIVATIONS
from megatron.config.tokenizer import TOKENIZER_FILES


def _reads(f: Facts, name: str) -> bool:
    """Is the tokenizer of this command line made from the file that this flag names? Unknown types
    are a problem of their own."""
    files = TOKENIZER_FILES.get(f.config.data.tokenizer)
    return files is None or name in [flag for flag, _ in files]


# Flags that need another one to be given.
_NEEDED_FLAGS = {
    "tensorboard_dir": "tensorboard_queue_size",
    "wandb_project": "wandb_exp_name wandb_entity wandb_save_dir",
    "verify_step_interval": "verify_step_action",
    "trace": "trace_ranks trace_output",
    "save": "save_interval no_save_optim async_save keep_last snapshot_interval",
    "keep_last": "keep_every",
    "load": (
        "finetune no_load_optim exit_on_missing_checkpoint override_opt_param_scheduler "
        "allow_data_order_change use_checkpoint_opt_param_scheduler"
    ),
    "eval_tasks": "eval_tasks_interval",
    "manual_gc": "manual_gc_interval manual_gc_eval",
    "use_rope_scaling": "rope_scaling_factor",
    "num_experts": (
        "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate moe_router_topk moe_router_score_function moe_router_pre_softmax "
        "moe_router_topk_scaling_factor moe_router_dtype moe_router_load_balancing_type "
        "moe_aux_loss_coeff moe_z_loss_coeff moe_router_num_groups moe_router_group_topk "
        "moe_router_enable_expert_bias moe_expert_capacity_factor moe_input_jitter_eps "
        "expert_tensor_parallel_size moe_per_layer_logging moe_layer_recompute"
    ),
    "moe_expert_capacity_factor": "moe_token_drop_policy",
    "moe_router_enable_expert_bias": "moe_router_bias_update_rate",
    "profile": "use_pytorch_profiler profile_step_start profile_step_end profile_ranks",
    "qk_layernorm": "apply_wd_to_qk_layernorm qk_layernorm_all_heads",
    "packed_samples": "pack_into_one pad_samples min_sample_length",
    "swiglu": "bias_swiglu_fusion",
    "bf16": "grad_reduce_in_bf16 main_grads_dtype",
}

# (flags that need it, the condition in words, is it met?): a flag typed without it is said to have
# no effect.
_NEEDED = (
    (
        "hysteresis initial_loss_scale min_loss_scale max_loss_scale loss_scale_growth_factor "
        "loss_scale_backoff_factor loss_scale_window",
        "dynamic loss scaling (--fp16, and no --loss-scale)",
        lambda v: v["fp16"] and v["loss_scale"] is None,
    ),
    ("loss_scale", "--fp16 or --bf16", lambda v: v["fp16"] or v["bf16"]),
    ("restart_forkserver", "torchrun", lambda v: launcher.under_torchrun()),
    ("sgd_momentum", "--optimizer sgd", lambda v: v["optimizer"] == "sgd"),
    (
        "init_method_std init_method_xavier_uniform",
        "--init-scheme megatron",
        lambda v: v["init_scheme"] == "megatron",
    ),
    (
        "lr_warmup_first_step lr_warmup_init",
        "a warm-up",
        lambda v: v["lr_warmup_iters"] or v["lr_warmup_samples"] or v["lr_warmup_fraction"],
    ),
    (
        "adam_beta1 adam_beta2 adam_beta2_schedule_c adam_eps",
        "--optimizer adam",
        lambda v: v["optimizer"] == "adam",
    ),
    (
        "tensorboard_log_interval log_timers_to_tensorboard log_batch_size_to_tensorboard "
        "log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_world_size_to_tensorboard",
        "--tensorboard-dir or --wandb-project",
        lambda v: v["tensorboard_dir"] or v["wandb_project"],
    ),
    (
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
        "--lr-decay-style WSD",
        lambda v: v["lr_decay_style"] == "WSD",
    ),
    (
        "min_lr decoupled_min_lr",
        "a decay (--lr-decay-style is constant)",
        lambda v: v["lr_decay_style"] != "constant",
    ),
    (
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor "
        "use_rope_scaling no_rope_freq",
        "--position-embedding-type rope",
        lambda v: v["position_embedding_type"] == "rope" or v["use_rotary_position_embeddings"],
    ),
    (
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        "--pipeline-model-parallel-size",
        lambda v: v["pipeline_model_parallel_size"] > 1,
    ),
    (
        "microbatch_group_size_per_vp_stage",
        "virtual pipeline stages (--num-virtual-stages-per-pipeline-rank or a layout)",
        lambda v: (
            v["pipeline_model_parallel_size"] > 1
            and (
                v["num_virtual_stages_per_pipeline_rank"]
                or v["num_layers_per_virtual_pipeline_stage"]
                or v["pipeline_model_parallel_layout"]
            )
        ),
    ),
    ("cp_comm_type", "--context-parallel-size", lambda v: v["context_parallel_size"] > 1),
    (
        "moe_token_dispatcher_type",
        "--expert-model-parallel-size",
        lambda v: v["expert_model_parallel_size"] > 1,
    ),
    (
        "moe_aux_loss_coeff",
        "--moe-router-load-balancing-type aux_loss, seq_aux_loss or global_aux_loss",
        lambda v: v["moe_router_load_balancing_type"] not in (("none",), ("sinkhorn",)),
    ),
    (
        "moe_router_pre_softmax",
        "--moe-router-score-function softmax",
        lambda v: v["moe_router_score_function"] == "softmax",
    ),
    (
        "recompute_modules",
        "--recompute-granularity selective",
        lambda v: (
            v["recompute_granularity"] == "selective"
            or v["recompute_activations"]
            or v["moe_layer_recompute"]
        ),
    ),
    (
        "recompute_method recompute_num_layers",
        "--recompute-granularity full",
        lambda v: v["recompute_granularity"] or v["recompute_activations"],
    ),
    (
        "weight_decay",
        "--weight-decay-incr-style constant (--start-weight-decay and --end-weight-decay set it)",
        lambda v: v["weight_decay_incr_style"] == "constant",
    ),
    (
        "lr_decay_iters lr_decay_samples",
        "a decay (--lr-decay-style is constant)",
        lambda v: v["lr_decay_style"] != "constant" or v["lr_warmup_fraction"],
    ),
    (
        "init_method_std",
        "normal initial values (--init-method-xavier-uniform is given)",
        lambda v: not v["init_method_xavier_uniform"],
    ),
    (
        "add_qkv_bias add_attention_output_bias add_mlp_bias",
        "--disable-bias-linear: all linear layers have biases",
        lambda v: not v["add_bias_linear"],
    ),
    (
        "reset_position_ids",
        "positions (--position-embedding-type is none)",
        lambda v: v.config.model.positions != "none",
    ),
    (
        "non_persistent_local_ckpt_dir replication_jump replication_factor",
        "--non-persistent-ckpt-type local",
        lambda v: v["non_persistent_ckpt_type"] == "local",
    ),
    ("snapshot_dir", "--save or --load", lambda v: v["save"] or v["load"]),
    ("vocab_file", "--tokenizer-type GPT2BPETokenizer", lambda v: _reads(v, "vocab_file")),
    ("merge_file", "--tokenizer-type GPT2BPETokenizer", lambda v: _reads(v, "merge_file")),
    (
        "tokenizer_model",
        "a --tokenizer-type that is made from a model file",
        lambda v: _reads(v, "tokenizer_model"),
    ),
    (
        "eval_interval eval_global_batch_size eval_micro_batch_size start_eval_at_iter",
        "validation (--eval-iters is 0)",
        lambda v: v["eval_iters"],
    ),
    (
        "timing_log_option",
        "--timing-log-level 1 or 2",
        lambda v: v["timing_log_level"] or not v.config.logging.is_short,
    ),
    (
        "log_memory_to_tensorboard",
        "an accelerator (--device is cpu)",
        lambda v: v["device"] != "cpu",
    ),
    (
        "profile",
        "--use-pytorch-profiler (--device is cpu, without a CUDA profiler)",
        lambda v: v["use_pytorch_profiler"] or v["device"] != "cpu",
    ),
    (
        "vocab_extra_ids",
        "--tokenizer-type SentencePieceTokenizer",
        lambda v: v["tokenizer_type"] == "SentencePieceTokenizer",
    ),
    (
        "tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens",
        "--tokenizer-type TikTokenizer",
        lambda v: v["tokenizer_type"] == "TikTokenizer",
    ),
    (
        "continue_data_mix",
        "--load and --data-order epoch",
        lambda v: v["load"] and v["data_order"] == "epoch",
    ),
    ("data_sharding", "--dataloader-type cyclic", lambda v: v["dataloader_type"] == "cyclic"),
    (
        "bias_gelu_fusion",
        "a GELU with biases",
        lambda v: v["add_bias_linear"] and not any(v[name] for name in ACTIVATIONS),
    ),
    ("split", "--data-path or --data-args-path", lambda v: not (v["mock_data"] or v["dummy_data"])),
    ("spike_action", "training (--skip-train is given)", lambda v: not v["skip_train"]),
    ("spike_snapshot_interval", "--spike-action rewind", lambda v: v["spike_action"] == "rewind"),
    (
        "min_sample_length",
        "files of data (--dummy-data has all its samples)",
        lambda v: v["dummy_data"] is None,
    ),
    (
        "apply_rope_fusion",
        "--position-embedding-type rope",
        lambda v: v["position_embedding_type"] == "rope" or v["use_rotary_position_embeddings"],
    ),
    (
        "masked_softmax_fusion",
        "--attention-backend auto or unfused",
        lambda v: v["attention_backend"] in ("auto", "unfused") and not v["use_flash_attn"],
    ),
    ("fp8_recipe", "--fp8-format", lambda v: v["fp8"]),
    (
        "ddp_reduce_scatter_with_fp32_accumulation",
        "--use-distributed-optimizer and --zero-partition even",
        lambda v: v["use_distributed_optimizer"] and v["zero_partition"] == "even",
    ),
    (
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
        "--fp8-format and --fp8-recipe delayed",
        lambda v: v["fp8"] and v["fp8_recipe"] == "delayed",
    ),
    (
        "overlap_p2p_comm",
        "--pipeline-model-parallel-size",
        lambda v: v["pipeline_model_parallel_size"] > 1,
    ),
)


_ALWAYS = {
    "attention_softmax_in_fp32": "the softmax is always computed in fp32",
    "apply_query_key_layer_scaling": "it changes no number (the softmax is always in fp32)",
    "no_load_rng": "there is no random state to load: masks follow from seed and iteration",
    "no_save_rng": "there is no random state to save: masks follow from seed and iteration",
}


def notes(f: Facts) -> Iterator[str]:
    """One line for each flag that was typed and changes nothing."""
    flags = [
        (names, f"--{flag.replace('_', '-')}", f[flag]) for flag, names in _NEEDED_FLAGS.items()
    ]
    for names, condition, met in [*flags, *((a, b, met(f)) for a, b, met in _NEEDED)]:
        if not met:
            for name in names.split():
                if name in f.typed:
                    yield f"{f.say(name)}: no effect without {condition} [flag-has-no-effect]"
    for name, why in _ALWAYS.items():
        if name in f.typed and f[name] != f.flags[name].default:
            yield f"{f.say(name)}: no effect here, because {why} [flag-has-no-effect]"
