"""Flags that must be given, and the ranges of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks.facts import Facts

_AT_LEAST_ONE = (
    "num_layers hidden_size ffn_hidden_size ffn_multiple_of num_attention_heads kv_channels "
    "num_query_groups seq_length max_position_embeddings rotary_base "
    "rotary_seq_len_interpolation_factor make_vocab_size_divisible_by tensor_model_parallel_size "
    "pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size "
    "microbatch_group_size_per_vp_stage "
    "ddp_bucket_size ddp_num_buckets num_distributed_optimizer_instances "
    "distributed_timeout_minutes loss_scale_window hysteresis vocab_size lr_wsd_decay_iters "
    "lr_wsd_decay_samples lr_decay_iters lr_decay_samples micro_batch_size global_batch_size "
    "eval_micro_batch_size eval_global_batch_size "
    "train_iters train_samples eval_interval eval_tasks_interval exit_interval "
    "recompute_num_layers world_size "
    "save_interval keep_last keep_every snapshot_interval log_interval tensorboard_log_interval "
    "tensorboard_queue_size fp8_amax_history_len profile_step_end "
    "replication_jump replication_factor "
    "check_weight_hash_across_dp_replicas_interval verify_step_interval "
    "num_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size "
    "moe_router_num_groups moe_router_group_topk"
).split()


_NOT_NEGATIVE = (
    "init_method_std mid_level_dataset_surplus lr min_lr lr_warmup_iters lr_warmup_samples "
    "lr_warmup_init weight_decay start_weight_decay end_weight_decay clip_grad eval_iters "
    "num_workers manual_gc_interval ckpt_step decoupled_lr decoupled_min_lr vocab_extra_ids "
    "lr_init_iters adam_beta2_schedule_c spike_snapshot_interval min_sample_length "
    "profile_step_start start_eval_at_iter "
    "moe_z_loss_coeff moe_router_bias_update_rate crash_loop_limit "
    "hang_timeout_seconds hang_timeout_startup_seconds hang_timeout_first_iteration_seconds "
    "hang_timeout_evaluation_seconds hang_timeout_save_seconds"
).split()


_POSITIVE = (
    "norm_epsilon adam_eps loss_scale initial_loss_scale min_loss_scale exit_duration_in_mins "
    "rope_scaling_factor max_loss_scale embed_grad_scale moe_router_topk_scaling_factor "
    "moe_expert_capacity_factor"
).split()


_BELOW_ONE = (
    "attention_dropout hidden_dropout label_smoothing adam_beta1 adam_beta2 sgd_momentum "
    "lr_warmup_fraction moe_input_jitter_eps"
).split()


def required(f: Facts) -> Iterator[str]:
    """Flags without a default that are missing."""
    seq = f["seq_length"]
    for name, hint in (
        ("num_layers", "give the number of transformer layers"),
        ("hidden_size", "give the width of the model"),
        ("num_attention_heads", "give the number of query heads"),
        ("seq_length", "give the tokens of one sample"),
        (
            "max_position_embeddings",
            f"give at least the sequence length{'' if seq is None else f', {seq}'}",
        ),
        ("micro_batch_size", "give the samples of one forward pass on one rank"),
        ("lr", "give the peak learning rate, as in --lr 3e-4"),
    ):
        if f[name] is None:
            yield f"{f.flags[name].spelling} is missing: {hint} [flag-missing]"
    if f["train_iters"] is None and f["train_samples"] is None:
        yield "--train-iters is missing: give it, or --train-samples [flag-missing]"


def bounds(f: Facts) -> Iterator[str]:
    """Numbers out of range, which later rules do not compute with."""
    rules = (
        (_AT_LEAST_ONE, lambda v: v >= 1, "must be at least 1"),
        (_NOT_NEGATIVE, lambda v: 0 <= v < math.inf, "must not be negative"),
        (_POSITIVE, lambda v: 0 < v < math.inf, "must be greater than 0"),
        (_BELOW_ONE, lambda v: 0 <= v < 1, "must be at least 0 and less than 1"),
        (
            ["embedding_multiplier", "residual_multiplier", "softmax_scale", "logits_scaling"],
            lambda v: 0 < v < math.inf,
            "must be greater than 0",
        ),
        (["rotary_percent"], lambda v: 0 < v <= 1, "must be greater than 0 and at most 1"),
        (["recompute_fraction"], lambda v: 0 <= v <= 1, "must be at least 0 and at most 1"),
        (["loss_scale_growth_factor"], lambda v: 1 < v < math.inf, "must be greater than 1"),
        (
            ["loss_scale_backoff_factor"],
            lambda v: 0 < v < 1,
            "must be greater than 0 and less than 1",
        ),
        (["seed"], lambda v: 0 < v < 2**32, f"must be between 1 and {2**32 - 1}"),
    )
    for names, fits, text in rules:
        for name in names:
            value = f[name]
            if value is not None and not fits(value):
                f.bad.add(name)
                unusual = isinstance(value, float) and not math.isfinite(value)
                if unusual:
                    yield f"{f.say(name)}: must be a finite number [value-not-finite]"
                else:
                    yield f"{f.say(name)}: {text} [value-out-of-range]"
