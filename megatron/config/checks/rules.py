"""Every rule that restricts a value or spans fields, and ALL that a command line breaks at once.

A problem is one line: flag and value, what is wrong, what to write instead. Rules are
Megatron-LM's, and this suite's own where Megatron would build something else than
what was asked for. Files: `check_paths`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from megatron import optional
from megatron.config.checks import batch as check_batch
from megatron.config.checks import low_precision as check_low_precision
from megatron.config.checks import paths as check_paths
from megatron.config.checks.facts import Facts
from megatron.config.moe import parse_layer_pattern
from megatron.config.parallel import ParallelConfig
from megatron.config.plan.plan import batch_schedule
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.config.tree import Config

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
    "check_weight_hash_across_dp_replicas_interval num_experts moe_router_topk "
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_num_groups "
    "moe_router_group_topk"
).split()
_ACTIVATIONS = ("swiglu", "geglu", "squared_relu", "xielu", "openai_gelu")
_NOT_NEGATIVE = (
    "init_method_std mid_level_dataset_surplus lr min_lr lr_warmup_iters lr_warmup_samples "
    "lr_warmup_init weight_decay start_weight_decay end_weight_decay clip_grad eval_iters "
    "num_workers manual_gc_interval ckpt_step decoupled_lr decoupled_min_lr vocab_extra_ids "
    "lr_init_iters adam_beta2_schedule_c spike_snapshot_interval min_sample_length "
    "profile_step_start start_eval_at_iter "
    "moe_z_loss_coeff moe_router_bias_update_rate crash_loop_limit "
    "hang_timeout_seconds"
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


def _reads(f: Facts, name: str) -> bool:
    """Is the tokenizer of this command line made from the file that this flag names? Unknown types
    are a problem of their own."""
    files = TOKENIZER_FILES.get(f.config.data.tokenizer)
    return files is None or name in [flag for flag, _ in files]


# (flags that need it, the condition in words, is it met?): a flag typed without it is said to have
# no effect.
_NEEDED = (
    (
        "hysteresis initial_loss_scale min_loss_scale max_loss_scale loss_scale_growth_factor "
        "loss_scale_backoff_factor loss_scale_window",
        "--fp16 without --loss-scale",
        lambda v: v["fp16"] and v["loss_scale"] is None,
    ),
    ("loss_scale", "--fp16 or --bf16", lambda v: v["fp16"] or v["bf16"]),
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
    ("tensorboard_queue_size", "--tensorboard-dir", lambda v: v["tensorboard_dir"]),
    (
        "wandb_exp_name wandb_entity wandb_save_dir",
        "--wandb-project",
        lambda v: v["wandb_project"],
    ),
    ("trace_ranks trace_output", "--trace", lambda v: v["trace"]),
    ("save_interval", "--save, so that no checkpoint will be written", lambda v: v["save"]),
    ("no_save_optim async_save keep_last snapshot_interval", "--save", lambda v: v["save"]),
    ("keep_every", "--keep-last, without which nothing is removed", lambda v: v["keep_last"]),
    (
        "finetune no_load_optim exit_on_missing_checkpoint override_opt_param_scheduler "
        "allow_data_order_change use_checkpoint_opt_param_scheduler",
        "--load",
        lambda v: v["load"],
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
    ("eval_tasks_interval", "--eval-tasks", lambda v: v["eval_tasks"]),
    ("manual_gc_interval manual_gc_eval", "--manual-gc", lambda v: v["manual_gc"]),
    ("rope_scaling_factor", "--use-rope-scaling", lambda v: v["use_rope_scaling"]),
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
        "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate moe_router_topk moe_router_score_function moe_router_pre_softmax "
        "moe_router_topk_scaling_factor moe_router_dtype moe_router_load_balancing_type "
        "moe_aux_loss_coeff moe_z_loss_coeff moe_router_num_groups moe_router_group_topk "
        "moe_router_enable_expert_bias moe_expert_capacity_factor moe_input_jitter_eps "
        "expert_tensor_parallel_size moe_per_layer_logging moe_layer_recompute",
        "--num-experts",
        lambda v: v["num_experts"],
    ),
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
        "moe_token_drop_policy",
        "--moe-expert-capacity-factor",
        lambda v: v["moe_expert_capacity_factor"],
    ),
    (
        "moe_router_bias_update_rate",
        "--moe-router-enable-expert-bias",
        lambda v: v["moe_router_enable_expert_bias"],
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
        "use_pytorch_profiler profile_step_start profile_step_end profile_ranks",
        "--profile",
        lambda v: v["profile"],
    ),
    (
        "profile",
        "--use-pytorch-profiler (--device is cpu, without a CUDA profiler)",
        lambda v: v["use_pytorch_profiler"] or v["device"] != "cpu",
    ),
    (
        "apply_wd_to_qk_layernorm qk_layernorm_all_heads",
        "--qk-layernorm",
        lambda v: v["qk_layernorm"],
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
        lambda v: v["add_bias_linear"] and not any(v[name] for name in _ACTIVATIONS),
    ),
    ("split", "--data-path or --data-args-path", lambda v: not (v["mock_data"] or v["dummy_data"])),
    ("spike_action", "training, which --skip-train leaves out", lambda v: not v["skip_train"]),
    ("spike_snapshot_interval", "--spike-action rewind", lambda v: v["spike_action"] == "rewind"),
    (
        "pack_into_one pad_samples min_sample_length",
        "--packed-samples",
        lambda v: v["packed_samples"],
    ),
    (
        "min_sample_length",
        "files of data (--dummy-data has all its samples)",
        lambda v: v["dummy_data"] is None,
    ),
    ("bias_swiglu_fusion", "--swiglu", lambda v: v["swiglu"]),
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
    ("grad_reduce_in_bf16 main_grads_dtype", "--bf16", lambda v: v["bf16"]),
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


def problems(config: Config, world_size: int, typed: Collection[str] = ()) -> list[str]:
    """Everything that keeps this command line from running on `world_size` ranks, one line each; []
    if nothing does.

    `typed`: names of the fields the user gave (a value other than its default can be wrong only
    because it was given). Missing files are problems only of a real run, not with --dry-run.
    """
    facts = Facts(config, world_size, typed)
    found = [line for rule in _RULES for line in rule(facts)]
    found += check_paths.problems(config)
    if not config.training.dry_run:
        found += check_paths.missing(config)
    return list(dict.fromkeys(found))


def notes(config: Config, world_size: int, typed: Collection[str] = ()) -> list[str]:
    """Warnings for a command line without problems, one line each."""
    facts = Facts(config, world_size, typed)
    found = []
    for names, condition, met in _NEEDED:
        if not met(facts):
            found += [
                f"{facts.say(name)}: no effect without {condition} [flag-has-no-effect]"
                for name in names.split()
                if name in typed
            ]
    found += [
        f"{facts.say(name)}: no effect here, because {why} [flag-has-no-effect]"
        for name, why in _ALWAYS.items()
        if name in typed and facts[name] != facts.flags[name].default
    ]
    if facts["sequence_parallel"] and facts["tensor_model_parallel_size"] == 1:
        found.append(
            "--sequence-parallel: switched off, because --tensor-model-parallel-size is 1 "
            "[flag-has-no-effect]"
        )
    if facts["distributed_backend"] == "nccl" and facts["device"] == "cpu":
        found.append(
            "--distributed-backend nccl: no effect with one rank on the CPU [flag-has-no-effect]"
        )
    if facts["control_file"] is not None and facts["save"] is None:
        found.append(
            f"{facts.say('control_file')}: nothing can be saved without --save: save has no "
            "effect, and stop ends the run without a checkpoint [control-file-without-save]"
        )
    if _asks_for_layout(facts):
        found += optional.load("megatron.config.checks.layout").notes(facts)
    if _chooses_kernels(facts):
        found += optional.load("megatron.config.checks.kernels").notes(facts)
    found += check_low_precision.notes(facts)
    found += _skip_ranges(facts)[1]
    if config.training.dry_run:
        found += [f"not here yet: {line}" for line in check_paths.missing(config)]
    return found


def _required(f: Facts) -> Iterator[str]:
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


def _ranges(f: Facts) -> Iterator[str]:
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


def _shape(f: Facts) -> Iterator[str]:
    if f.ok("hidden_size", "num_attention_heads") and f["kv_channels"] is None:
        hidden = f["hidden_size"]
        heads = f["num_attention_heads"]
        if hidden % heads:
            near = sorted({max(heads, hidden // heads * heads), (hidden // heads + 1) * heads})
            yield (
                f"--hidden-size {hidden}: not a multiple of --num-attention-heads {heads}; use "
                f"{' or '.join(map(str, near))}, another number of heads, or give --kv-channels "
                "[hidden-size-not-divisible-by-heads]"
            )
    if f.ok("num_attention_heads", "num_query_groups"):
        heads = f["num_attention_heads"]
        groups = f["num_query_groups"]
        if f["group_query_attention"] and heads % groups:
            fit = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            yield (
                f"--num-query-groups {groups}: --num-attention-heads {heads} is not a multiple of "
                f"it; use {', '.join(fit[:12])} [heads-not-divisible-by-query-groups]"
            )
        if (
            "num_query_groups" in f.typed
            and not f["group_query_attention"]
            and groups not in (1, heads)
        ):
            yield (
                f"--num-query-groups {groups}: counts only with --group-query-attention; add "
                "that, or omit it [flag-needs-other-flag]"
            )
    if (
        f.ok("seq_length", "max_position_embeddings")
        and f["max_position_embeddings"] < f["seq_length"]
    ):
        yield (
            f"--max-position-embeddings {f['max_position_embeddings']}: less than --seq-length "
            f"{f['seq_length']}; use {f['seq_length']} or more "
            "[position-embeddings-shorter-than-sequence]"
        )
    if (
        f.ok("hidden_size", "num_attention_heads", "rotary_percent")
        and f.config.model.positions == "rope"
    ):
        width = f.config.model.head_dim
        rotated = int(width * f["rotary_percent"])
        if rotated < 2 or rotated % 2:
            yield (
                f"--rotary-percent {f['rotary_percent']}: rotates {rotated} of the {width} "
                "channels of a head; it must be an even number (see --kv-channels) "
                "[rotary-channels-odd]"
            )
    if f["use_rotary_position_embeddings"] and f["position_embedding_type"] == "none":
        yield (
            "--position-embedding-type none: --use-rotary-position-embeddings asks for rope; "
            "omit one of them [flags-exclude-each-other]"
        )
    yield from _rope_pattern(f)
    yield from _norms(f)
    yield from _only_one(f, *_ACTIVATIONS)
    yield from _only_one(f, "ffn_hidden_size", "ffn_multiple_of")
    for name in ("ffn_multiple_of", "init_scheme"):
        if f[name] not in (None, "megatron") and not f.config.model.gated:
            yield (
                f"{f.say(name)}: is InternLM's rule for a gated MLP; add --swiglu, or leave it "
                "out [flag-needs-other-flag]"
            )


def _norms(f: Facts) -> Iterator[str]:
    after = "apply_residual_connection_post_layernorm"
    yield from _only_one(f, "use_parallel_residual", after)
    yield from _only_one(f, "no_pre_layernorm", after)
    yield from _only_one(f, "no_pre_layernorm", "fp32_residual_connection")
    if f["no_pre_layernorm"] and not (f["post_self_attn_layernorm"] and f["post_mlp_layernorm"]):
        yield (
            "--no-pre-layernorm: layers would have no norm; add --post-self-attn-layernorm "
            "--post-mlp-layernorm [flag-needs-other-flag]"
        )
    if f["qk_layernorm"] and f["qk_layernorm_all_heads"] and f["normalization"] != "RMSNorm":
        yield (
            "--qk-layernorm-all-heads: needs --normalization RMSNorm; add it, or omit "
            "--qk-layernorm-all-heads [flag-needs-other-flag]"
        )


def _rope_pattern(f: Facts) -> Iterator[str]:
    text = f["no_rope_freq"]
    if text is None or not f.ok("num_layers"):
        return
    layers = f["num_layers"]
    try:
        fits = int(text) > 0 if text.isdigit() else len(parse_layer_pattern(text)) == layers
    except ValueError:
        fits = False
    if not fits:
        f.bad.add("no_rope_freq")
        yield (
            f"--no-rope-freq {text}: must be a number of at least 1, or a pattern of "
            f"--num-layers {layers} times 0 or 1 such as [0]*3+[1]*1 [value-out-of-range]"
        )


def _only_one(f: Facts, *names: str) -> Iterator[str]:
    given = [f.flags[name].spelling for name in names if f[name]]
    if len(given) > 1:
        yield f"{' and '.join(given)}: only one of these can be given [flags-exclude-each-other]"


def _precision(f: Facts) -> Iterator[str]:
    yield from _only_one(f, "fp16", "bf16", "fp64")
    if f["fp32_residual_connection"] and not (f["fp16"] or f["bf16"]):
        yield (
            "--fp32-residual-connection: needs --fp16 or --bf16; everything is in fp32 already, "
            "so omit it [flag-needs-other-flag]"
        )
    if f["fp16_lm_cross_entropy"] and not f["fp16"]:
        yield "--fp16-lm-cross-entropy: needs --fp16; omit it [flag-needs-other-flag]"
    if f["tf32"] and (f["fp16"] or f["bf16"] or f["fp64"] or f["device"] == "cpu"):
        yield (
            "--tf32: has an effect on fp32 GEMMs on CUDA only; omit it [tf32-without-fp32-on-cuda]"
        )
    if (
        f["fp16"]
        and f.ok("initial_loss_scale", "max_loss_scale")
        and f["initial_loss_scale"] > f["max_loss_scale"]
    ):
        yield (
            f"{f.say('initial_loss_scale')}: greater than {f.say('max_loss_scale')}; use at most "
            "that [initial-loss-scale-out-of-bounds]"
        )
    if (
        f["fp16"]
        and f.ok("initial_loss_scale", "min_loss_scale")
        and f["initial_loss_scale"] < f["min_loss_scale"]
    ):
        yield (
            f"{f.say('initial_loss_scale')}: less than {f.say('min_loss_scale')}; use at least "
            "that [initial-loss-scale-out-of-bounds]"
        )


def _run(f: Facts) -> Iterator[str]:
    """Length, batch and what counts in iterations or in samples."""
    if f["train_iters"] is not None and f["train_samples"] is not None:
        yield (
            f"{f.say('train_iters')} and {f.say('train_samples')}: two lengths of the same run; "
            "give only one of them [two-run-lengths]"
        )
    else:
        samples = f["train_samples"] is not None
        mine, other = ("samples", "iters") if samples else ("iters", "samples")
        for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            if (samples or f["train_iters"] is not None) and f[f"{stem}_{other}"]:
                yield (
                    f"{f.say(f'{stem}_{other}')}: the run is counted by --train-{mine}; use "
                    f"--{stem.replace('_', '-')}-{mine} [schedule-in-other-unit-than-run]"
                )
        if f["train_iters"] is not None:
            for name in ("rampup_batch_size", "step_batch_size_schedule"):
                if f[name] is not None:
                    yield (
                        f"{f.say(name)}: changes the batch by samples; give --train-samples "
                        "instead of --train-iters [batch-schedule-needs-train-samples]"
                    )
    if f["lr_warmup_fraction"] is not None:
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if f[name]:
                yield (
                    f"{f.say(name)} and {f.say('lr_warmup_fraction')}: two warm-ups; give only "
                    "one of them [two-warmups]"
                )
    if f.ok("micro_batch_size") and not f.bad & {"global_batch_size", "seq_length"}:
        yield from check_batch.batch(f)


def _schedule(f: Facts) -> Iterator[str]:
    """Learning rate and weight decay."""
    yield from _learning_rates(f)
    unit = "iters" if f["train_samples"] is None else "samples"
    horizon = f"lr_decay_{unit}" if f[f"lr_decay_{unit}"] is not None else f"train_{unit}"
    if f.ok(horizon):
        yield from _warm_up(f, unit, horizon)
        yield from _wsd(f, unit, horizon)
    yield from _weight_decay(f)
    yield from _only_one(f, "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")


def _learning_rates(f: Facts) -> Iterator[str]:
    for name, peak in (
        ("min_lr", "lr"),
        ("lr_warmup_init", "lr"),
        ("lr_warmup_init", "decoupled_lr"),
        ("decoupled_min_lr" if f["decoupled_min_lr"] is not None else "min_lr", "decoupled_lr"),
    ):
        if f.ok(peak, name) and f[name] > f[peak]:
            yield f"{f.say(name)}: greater than {f.say(peak)}; use at most that [lr-above-peak]"
    if f["decoupled_min_lr"] is not None and f["decoupled_lr"] is None:
        yield (
            f"{f.say('decoupled_min_lr')}: is the floor of --decoupled-lr; give that too, or "
            "omit it [flag-needs-other-flag]"
        )


def _warm_up(f: Facts, unit: str, horizon: str) -> Iterator[str]:
    """The warm-up, which follows --lr-init-iters, must end before the decay does."""
    fraction = f["lr_warmup_fraction"] is not None
    name = "lr_warmup_fraction" if fraction else f"lr_warmup_{unit}"
    if not f.ok(name, "lr_init_iters"):
        return
    warmup = f[name] * f[horizon] if fraction else f[name]
    end = f"must be less than {f.say(horizon)}, the end of the decay [lr-warmup-too-long]"
    if warmup >= f[horizon]:
        yield f"{f.say(name)}: {end}"
    elif f["lr_init_iters"] and (
        warmup + f["lr_init_iters"] * (_batch_size(f) if unit == "samples" else 1) >= f[horizon]
    ):
        yield f"{f.say(name)}: with {f.say('lr_init_iters')} {end}"


def _batch_size(f: Facts) -> int:
    """The final global batch size; 0 where the batch flags have problems of their own."""
    try:
        return batch_schedule(f.config, max(1, f.world_size)).final_global_batch_size
    except (ValueError, TypeError):
        return 0


def _wsd(f: Facts, unit: str, horizon: str) -> Iterator[str]:
    if f["lr_decay_style"] != "WSD":
        return
    wsd = f"lr_wsd_decay_{unit}"
    if f[wsd] is None:
        yield (
            "--lr-decay-style WSD: needs the length of its anneal; give "
            f"{f.flags[wsd].spelling} [flag-missing]"
        )
    elif f.ok(wsd) and f[wsd] > f[horizon]:
        yield (
            f"{f.say(wsd)}: longer than {f.say(horizon)}, the whole schedule; use at most "
            "that [wsd-decay-too-long]"
        )


def _weight_decay(f: Facts) -> Iterator[str]:
    ends = ("start_weight_decay", "end_weight_decay")
    constant = f["weight_decay_incr_style"] == "constant"
    for name in ends:
        if constant and f[name] is not None:
            yield (
                f"{f.say(name)}: weight decay is constant; use --weight-decay, or "
                "--weight-decay-incr-style linear or cosine [weight-decay-is-constant]"
            )
        elif not constant and f[name] is None:
            yield (
                f"{f.flags[name].spelling} is missing: {f.say('weight_decay_incr_style')} "
                "needs start and end [flag-missing]"
            )
    if not constant and f.ok(*ends) and f[ends[0]] > f[ends[1]]:
        yield (
            f"{f.say(ends[0])}: greater than {f.say(ends[1])}; weight decay can only rise "
            "[weight-decay-decreases]"
        )


def _spikes(f: Facts) -> Iterator[str]:
    if f["spike_action"] != "rewind":
        return
    if not f["spike_snapshot_interval"] and f["save"] is None and f["load"] is None:
        yield (
            "--spike-action rewind: there is nothing to go back to with --spike-snapshot-interval "
            "0 and neither --save nor --load; give --save DIR, or an interval such as 50 "
            "[spike-action-without-snapshots]"
        )
    if f["no_save_optim"]:
        yield (
            "--no-save-optim: --spike-action rewind saves where it goes back to, and needs the "
            "optimizer there; omit one of them [spike-action-needs-optimizer-state]"
        )


def _loop(f: Facts) -> Iterator[str]:
    """Recompute, determinism, checkpoints."""
    yield from _recompute(f)
    if f["cudnn_benchmark"] and (f["deterministic_mode"] or f["cudnn_deterministic"]):
        yield (
            "--cudnn-benchmark: chooses kernels by their time, which is not deterministic; omit "
            "one of the two [flags-exclude-each-other]"
        )
    if f["save"] is not None and f["save_interval"] is None:
        yield (
            f"--save-interval is missing: {f.say('save')} needs the iterations between "
            "checkpoints [flag-missing]"
        )
    for name in ("ckpt_step", "use_checkpoint_args"):
        if f[name] not in (None, False) and f["load"] is None:
            yield (
                f"{f.say(name)}: needs --load DIR, the directory of the checkpoint "
                "[flag-needs-other-flag]"
            )


def _eval_tasks(f: Facts) -> Iterator[str]:
    if not f["eval_tasks"]:
        return
    if f["eval_tasks_interval"] is None:
        yield (
            f"--eval-tasks-interval is missing: {f.say('eval_tasks')} needs the iterations between "
            "scores [flag-missing]"
        )
    for name, off in (
        ("pipeline_model_parallel_size", 1),
        ("context_parallel_size", 1),
        ("expert_model_parallel_size", 1),
        ("fp8", None),
    ):
        if f[name] != off:
            yield (
                f"{f.say(name)}: not supported with --eval-tasks; omit one of the two, and score "
                "checkpoints with tools/run_lm_eval.py [flags-exclude-each-other]"
            )


def _profiling(f: Facts) -> Iterator[str]:
    if f["profile"] and f.ok("profile_step_start", "profile_step_end"):
        if f["profile_step_end"] <= f["profile_step_start"]:
            yield (
                f"{f.say('profile_step_end')}: profiles no iteration, because "
                f"{f.say('profile_step_start')} is not less; iterations start + 1 to end are "
                "profiled [profile-steps-empty]"
            )
        for rank in f["profile_ranks"]:
            if not 0 <= rank < f.world_size:
                yield (
                    f"--profile-ranks {rank}: there are ranks 0 to {f.world_size - 1} "
                    "[value-out-of-range]"
                )


_RECOMPUTE = (
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)


def _recompute(f: Facts) -> Iterator[str]:
    given = [f.say(name) for name in _RECOMPUTE if f[name]]
    if f["recompute_fraction"] is not None:
        if given:
            yield (
                f"{f.say('recompute_fraction')}: sets recompute completely; omit "
                f"{', '.join(given)} [flags-exclude-each-other]"
            )
    elif f["recompute_activations"] and f["recompute_granularity"] == "full":
        yield (
            "--recompute-granularity full: --recompute-activations means selective; omit one of "
            "them [flags-exclude-each-other]"
        )
    elif f["moe_layer_recompute"] and f["recompute_granularity"] == "full":
        yield (
            "--moe-layer-recompute: --recompute-granularity full recomputes whole layers; omit one "
            "of the two [flags-exclude-each-other]"
        )
    elif f["recompute_granularity"] == "full":
        yield from _full_recompute(f)
    elif f["recompute_activations"] or f["recompute_granularity"]:
        for name in ("recompute_method", "recompute_num_layers"):
            if f[name] is not None:
                yield (
                    f"{f.say(name)}: needs --recompute-granularity full; add that, or omit it "
                    "[flag-needs-other-flag]"
                )


def _full_recompute(f: Facts) -> Iterator[str]:
    layers = f["recompute_num_layers"]
    if f["recompute_method"] is None:
        yield (
            "--recompute-method is missing: --recompute-granularity full needs uniform or "
            "block [flag-missing]"
        )
    if layers is None:
        yield (
            "--recompute-num-layers is missing: --recompute-granularity full needs it, 1 is "
            "usual [flag-missing]"
        )
    elif f.ok("num_layers", "recompute_num_layers") and layers > f["num_layers"]:
        yield (
            f"--recompute-num-layers {layers}: there are only {f['num_layers']} layers; use "
            "at most that [recompute-layers-above-num-layers]"
        )


def _skips(f: Facts) -> list[str]:
    return _skip_ranges(f)[0]


def _skip_ranges(f: Facts) -> tuple[list[str], list[str]]:
    """(problems, warnings) of the iterations to skip."""
    if f["train_range_to_skip"] is None and f["iterations_to_skip"] is None:
        return [], []
    iterations = f["train_iters"] if f.ok("train_iters") else None
    samples_in = None
    try:
        schedule = batch_schedule(f.config, max(1, f.world_size))
        samples_in = schedule.samples_in
        if f.ok("train_samples"):
            iterations = schedule.train_iters_from_samples(f["train_samples"])
    except (ValueError, TypeError):
        # the batch flags have problems of their own, said above
        pass
    try:
        skips = optional.load("megatron.config.skip_flags").parse_skips(
            f["train_range_to_skip"],
            iterations,
            iterations_to_skip=f["iterations_to_skip"],
            samples_in=samples_in,
            seq_length=f["seq_length"],
        )
    except ValueError as error:
        return str(error).splitlines(), []
    return [], [f"WARNING: {line}" for line in skips.warnings] + skips.infos


def _experts(f: Facts) -> Iterator[str]:
    if f["num_experts"] is not None:
        yield from optional.load("megatron.config.checks.moe").rule(f)
    elif f.ok("expert_model_parallel_size") and f["expert_model_parallel_size"] > 1:
        yield (
            f"{f.say('expert_model_parallel_size')}: splits experts, and the model has none; "
            "give --num-experts, or omit it [flag-needs-other-flag]"
        )


def _fp8(f: Facts) -> Iterator[str]:
    if f["fp8"] is not None:
        yield from optional.load("megatron.config.checks.fp8").rule(f)


def _asks_for_layout(f: Facts) -> bool:
    """Are there several ranks, or flags about them?"""
    asked = f["world_size"] is not None or f["trace"] or f.world_size > 1
    return asked or f.config.parallel != ParallelConfig()


def _layout(f: Facts) -> Iterator[str]:
    if _asks_for_layout(f):
        yield from optional.load("megatron.config.checks.layout").rule(f)


def _chooses_kernels(f: Facts) -> bool:
    """Do flags ask for attention or modules other than the default ones?"""
    return (
        f["use_flash_attn"]
        or not f["masked_softmax_fusion"]
        or f["attention_backend"] != "auto"
        or f["transformer_impl"] != "local"
    )


def _kernels(f: Facts) -> Iterator[str]:
    if _chooses_kernels(f):
        yield from optional.load("megatron.config.checks.kernels").rule(f)


def _packed(f: Facts) -> Iterator[str]:
    if f["packed_samples"]:
        yield from optional.load("megatron.config.checks.packed").rule(f)
        return
    if f["dummy_data"] is not None:
        yield (
            f"{f.say('dummy_data')}: makes samples of many lengths, which are packed; add "
            "--packed-samples [flag-needs-other-flag]"
        )
    if f["log_accuracy"] and not (f["log_subsets"] or f["log_format"] == "internlm"):
        yield (
            "--log-accuracy: is counted by subset of the data; add --log-subsets, or omit "
            "it [flag-needs-other-flag]"
        )


_RULES = (
    _required,
    _ranges,
    _experts,
    _shape,
    _precision,
    _fp8,
    check_low_precision.rule,
    _layout,
    _packed,
    _run,
    _schedule,
    _loop,
    _eval_tasks,
    _spikes,
    _profiling,
    _skips,
    _kernels,
)
