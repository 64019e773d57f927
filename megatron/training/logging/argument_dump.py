"""The table of arguments."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.arguments import flags_of, values_of
from megatron.config.command_line import foreign_flags
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config

# What Megatron-LM of January 2024 prints, also at its default; later names stand there when set.
_ALWAYS = frozenset(
    """
num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention
num_query_groups seq_length max_position_embeddings position_embedding_type
use_rotary_position_embeddings add_position_embedding rotary_percent
rotary_seq_len_interpolation_factor make_vocab_size_divisible_by normalization norm_epsilon
apply_layernorm_1p apply_residual_connection_post_layernorm openai_gelu squared_relu swiglu
bias_gelu_fusion untie_embeddings_and_output_weights add_bias_linear attention_dropout
hidden_dropout init_method_std init_method_xavier_uniform apply_query_key_layer_scaling
attention_softmax_in_fp32 fp32_residual_connection num_experts micro_batch_size
global_batch_size rampup_batch_size train_iters train_samples seed eval_iters eval_interval
skip_train exit_interval exit_duration_in_mins exit_signal_handler
check_for_nan_in_loss_and_grad recompute_activations recompute_granularity recompute_method
recompute_num_layers manual_gc manual_gc_interval manual_gc_eval tokenizer_type vocab_file
merge_file tokenizer_model vocab_size vocab_extra_ids data_path train_data_path valid_data_path
test_data_path split data_cache_path num_workers dataloader_type data_sharding
reset_position_ids reset_attention_mask eod_mask_loss optimizer lr min_lr lr_decay_style
lr_decay_iters lr_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples
lr_warmup_init weight_decay start_weight_decay end_weight_decay weight_decay_incr_style
adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad override_opt_param_scheduler
use_checkpoint_opt_param_scheduler save save_interval load finetune no_load_optim no_load_rng
no_save_optim no_save_rng use_checkpoint_args exit_on_missing_checkpoint log_interval
log_throughput log_num_zeros_in_grad log_params_norm timing_log_level timing_log_option
tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
overlap_p2p_comm context_parallel_size expert_model_parallel_size sequence_parallel
use_distributed_optimizer overlap_grad_reduce overlap_param_gather distributed_backend
distributed_timeout_minutes local_rank fp16 bf16 loss_scale initial_loss_scale min_loss_scale
loss_scale_window hysteresis fp16_lm_cross_entropy accumulate_allreduce_grads_in_fp32 fp8
fp8_margin fp8_amax_history_len fp8_amax_compute_algo transformer_impl use_flash_attn
masked_softmax_fusion bias_swiglu_fusion apply_rope_fusion gradient_accumulation_fusion profile
profile_step_start profile_step_end profile_ranks tensorboard_dir tensorboard_log_interval
tensorboard_queue_size log_timers_to_tensorboard log_batch_size_to_tensorboard
log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
log_memory_to_tensorboard log_world_size_to_tensorboard wandb_project wandb_exp_name
wandb_save_dir
""".split()
)


def dumped_values(
    config: Config,
    plan: Plan,
    distributed_backend: str,
    foreign: Mapping[str, Any] | None = None,
    *,
    rank: int = 0,
    of_script: argparse.Namespace | None = None,
) -> dict[str, Any]:
    """{name: value} as Megatron's dump has them after its own checks: defaults filled in, derived
    names added.

    `distributed_backend`: the one in use, where the flag left it open; `foreign`: typed flags
    without effect; `of_script`: those of a script's own.
    """
    return {
        **vars(of_script or argparse.Namespace()),
        **_declared(config, foreign or {}),
        **_derived(config, plan),
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "distributed_backend": config.parallel.distributed_backend or distributed_backend,
        "rank": rank,
        "variable_seq_lengths": False,
    }


def _declared(config: Config, foreign: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as they were given, in the form that Megatron's own have."""
    flags = flags_of(type(config))
    dumped = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values_of(config).items()
        if name in _ALWAYS or value != flags[name].default
    }
    for name in ("train_range_to_skip", "iterations_to_skip"):
        if dumped.get(name):
            dumped[name] = [int(word) if word.isdigit() else word for word in dumped[name]]
    dumped.pop("recompute_activations", None)
    dumped |= {
        name: value or None
        for name, value in dumped.items()
        if name.startswith(("no_load_", "no_save_"))
    }
    if config.logging.printed_arguments != "all" and not foreign:
        return dumped  # a table of Megatron's own has its names that have no flag here
    return foreign_flags(type(config)).argument_table(dumped, foreign)


def _derived(config: Config, plan: Plan) -> dict[str, Any]:
    """What Megatron's checks fill in, overwrite or add."""
    m = config.model
    t = config.training
    o = config.optimizer
    p = config.parallel
    precision = config.precision
    grads_in_fp32 = precision.accumulate_allreduce_grads_in_fp32
    if precision.bf16:
        grads_in_fp32 = precision.grad_dtype == "float32"
    constant = o.weight_decay_incr_style == "constant"
    rampup = t.rampup_batch_size
    chunks = len(plan.layers_per_stage[0])
    return {
        "accumulate_allreduce_grads_in_fp32": grads_in_fp32,
        "attention_softmax_in_fp32": m.attention_softmax_in_fp32 or m.apply_query_key_layer_scaling,
        "bias_gelu_fusion": m.bias_gelu_fusion and m.add_bias_linear,
        "data_parallel_size": plan.data_parallel_size,
        "dataloader_type": config.data.dataloader_type or "single",
        "encoder_num_layers": m.num_layers,
        "encoder_seq_length": m.seq_length,
        "end_weight_decay": o.weight_decay if constant else o.end_weight_decay,
        "start_weight_decay": o.weight_decay if constant else o.start_weight_decay,
        **m.filled_in,
        "global_batch_size": plan.batch.final_global_batch_size,
        "overlap_p2p_comm": p.overlap_p2p_comm and len(plan.layers_per_stage) > 1,
        "params_dtype": f"torch.{precision.params_dtype}",
        "rampup_batch_size": None if rampup is None else list(map(str, rampup)),
        "world_size": plan.world_size,
        "recompute_granularity": t.recompute,
        "sequence_parallel": p.sequence_parallel and p.tensor_model_parallel_size > 1,
        "split": plan.split,
        "tokenizer_type": config.data.tokenizer,
        "transformer_pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }
