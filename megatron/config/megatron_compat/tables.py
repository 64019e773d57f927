"""The rows of Megatron's flags that are not ours; `megatron_flags` says what a row means. Knows no
code at all.

Rows are made by `same` (accepted without effect, "because ...") and `no` (refused, "...; what to
use"): name, default, text, and where needed spelling=, takes=, fine= (other values that are what
happens here anyway).
"""

from __future__ import annotations

from typing import Any

Row = tuple[bool, str, Any, str, dict[str, Any]]


def same(name: str, default: Any, text: str, **more: Any) -> Row:
    """A row of a flag that is accepted without effect."""
    return True, name, default, text, more


def no(name: str, default: Any, text: str, **more: Any) -> Row:
    """A row of a flag that is refused."""
    return False, name, default, text, more


_DP = (
    "not in this version; use data, tensor, pipeline or context parallelism, and "
    "--use-distributed-optimizer"
)
_WHOLE_SENDS = (
    "stages send whole hidden states (with --sequence-parallel each rank its part) by send and "
    "receive"
)
_ENDS = (
    "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers to give "
    "the ends fewer layers"
)
_WHEN_COMPLETE = "a bucket of gradients is sent as soon as it is complete, on every pipeline stage"
_AT_ONCE = "weights are gathered right after the update, on every pipeline stage"
_NO_TP_COMM = (
    "it steers overlap inside Transformer Engine's kernels, whose shared buffers are not set up "
    "here"
)
_ONE_KERNEL = "there is one implementation with the same numbers"
_NO_FP8 = (
    "fp8 is --fp8-format with --fp8-recipe tensorwise or delayed, and weights keep their "
    "format; leave the flag out"
)
_NO_WANDB = (
    "nothing is sent to Weights & Biases; --tensorboard-dir DIR or --metrics-file FILE keep the "
    "same numbers"
)
_NO_MOE = "mixture-of-experts models are not built here; leave the flag out for a dense model"
_ONLY_LAYERS = "only transformer layers are built; leave the flag out"
_OWN_FORMAT = "checkpoints have one format, that any number of ranks reads"

# Flags of January 2024 for models that are not trained here.
FAMILIES: tuple[tuple[str, str], ...] = (
    (
        "BERT is not trained here, only GPT; leave the flag out",
        "bert_binary_head=--bert-no-binary-head bert_embedder_type=megatron bert_load= "
        "mask_prob=0.15 output_bert_embeddings=False short_seq_prob=0.1",
    ),
    (
        "T5 is not trained here, only GPT; leave the flag out",
        "decoder_num_layers= decoder_seq_length= pipeline_model_parallel_split_rank=",
    ),
    (
        "vision models are not trained here, only GPT; leave the flag out",
        "classes_fraction=1.0 data_per_class_fraction=1.0 dino_bottleneck_size=256 "
        "dino_freeze_last_layer=1 dino_head_hidden_size=2048 dino_local_crops_number=10 "
        "dino_local_img_size=96 dino_norm_last_layer=False dino_teacher_temp=0.07 "
        "dino_warmup_teacher_temp=0.04 dino_warmup_teacher_temp_epochs=30 head_lr_mult=1.0 "
        "img_h=224 img_w=224 iter_per_epoch=1250 mask_factor=1.0 mask_type=random num_channels=3 "
        "num_classes=1000 patch_dim=16 swin_backbone_type=tiny vision_backbone_type=vit "
        "vision_pretraining=False vision_pretraining_type=classify",
    ),
    (
        "retrievers (ICT, biencoder) are not trained here, only GPT; leave the flag out",
        "biencoder_projection_dim=0 biencoder_shared_query_context_model=False block_data_path= "
        "embedding_path= evidence_data_path= ict_head_size= ict_load= indexer_batch_size=128 "
        "indexer_log_interval=1000 query_in_block_prob=0.1 retriever_report_topk_accuracies= "
        "retriever_score_scaling=False retriever_seq_length=256 sample_rate=1.0 titles_data_path= "
        "use_one_sent_docs=False",
    ),
    (
        "Retro is not trained here, only GPT; leave the flag out",
        "retro_add_retriever=False retro_attention_gate=1 retro_cyclic_train_iters= "
        "retro_encoder_attention_dropout=0.1 retro_encoder_hidden_dropout=0.1 "
        "retro_encoder_layers=2 retro_num_neighbors=2 retro_num_retrieved_chunks=2 "
        "retro_return_doc_ids=False retro_verify_neighbor_count=--retro-no-verify-neighbor-count "
        "retro_workdir=",
    ),
)

# The other flags of January 2024.
OLD: tuple[Row, ...] = (
    no(
        "adlr_autoresume",
        False,
        "that service runs on NVIDIA's own cluster; use --exit-signal-handler and the same "
        "command again",
    ),
    same("adlr_autoresume_interval", 1000, "there is no --adlr-autoresume"),
    same(
        "async_tensor_model_parallel_allreduce",
        True,
        "they are always reduced while weight gradients are computed",
        spelling="--no-async-tensor-model-parallel-allreduce",
    ),
    same(
        "barrier_with_L1_time",
        True,
        "timers never make one rank wait for another",
        spelling="--no-barrier-with-level-1-timing",
    ),
    same("bias_dropout_fusion", True, _ONE_KERNEL, spelling="--no-bias-dropout-fusion"),
    same(
        "clone_scatter_output_in_embedding",
        True,
        "the slice is a tensor of its own, so nothing keeps the whole alive",
        spelling="--no-clone-scatter-output-in-embedding",
    ),
    same(
        "data_parallel_random_init",
        False,
        "all ranks draw the same weights, from the seed and each one's name",
    ),
    same("delay_grad_reduce", True, _WHEN_COMPLETE, spelling="--no-delay-grad-reduce"),
    same("delay_param_gather", False, _AT_ONCE),
    no(
        "distribute_saved_activations",
        False,
        "with --sequence-parallel saved activations are spread over the "
        "tensor-parallel ranks already; use that",
    ),
    same("empty_unused_memory_level", 0, "the device's cache is left to torch between steps"),
    no("fp8_interval", 1, "delayed scales follow every step; leave the flag out"),
    no(
        "fp8_wgrad",
        True,
        "all three products of a layer are of 8 bits; leave the flag out",
        spelling="--no-fp8-wgrad",
    ),
    same("inference_batch_times_seqlen_threshold", 512, "training runs no inference server"),
    no("lazy_mpu_init", None, "process groups are always made at the start; leave the flag out"),
    same("max_tokens_to_oom", 12000, "training runs no inference server"),
    no("moe_grouped_gemm", False, _NO_MOE),
    same(
        "nccl_communicator_config_path",
        None,
        "process groups have NCCL's defaults; its NCCL_* variables count",
    ),
    same("no_persist_layer_norm", False, _ONE_KERNEL),
    no("num_experts", None, _NO_MOE),
    same("onnx_safe", None, "nothing is exported to ONNX"),
    same(
        "perform_initialization",
        True,
        "weights are always drawn (--load overwrites them)",
        spelling="--no-initialization",
    ),
    same(
        "scatter_gather_tensors_in_pipeline",
        True,
        _WHOLE_SENDS,
        spelling="--no-scatter-gather-tensors-in-pipeline",
    ),
    no(
        "spec",
        None,
        "the model's layers are those of megatron/model; change them there",
        takes="list",
    ),
    no("standalone_embedding_stage", False, _ENDS),
    same("tp_comm_bulk_dgrad", True, _NO_TP_COMM, spelling="--disable-tp-comm-bulk-dgrad"),
    same("tp_comm_bulk_wgrad", True, _NO_TP_COMM, spelling="--disable-tp-comm-bulk-wgrad"),
    no("tp_comm_overlap", False, _NO_TP_COMM + "; leave the flag out"),
    same("tp_comm_overlap_cfg", None, _NO_TP_COMM),
    same("tp_comm_split_ag", True, _NO_TP_COMM, spelling="--disable-tp-comm-split-ag"),
    same("tp_comm_split_rs", True, _NO_TP_COMM, spelling="--disable-tp-comm-split-rs"),
    same(
        "use_cpu_initialization",
        None,
        "weights are always drawn on the CPU, alike for any number of ranks",
        takes="switch",
    ),
    same("use_mcore_models", False, "there is one model, with megatron-core's parameter names"),
    same("use_ring_exchange_p2p", False, _WHOLE_SENDS),
)

# Flags that came after January 2024.
NEWER: tuple[Row, ...] = (
    no(
        "hierarchical_context_parallel_sizes",
        None,
        "context-parallel ranks form one ring; leave the flag out",
        takes="list",
    ),
    no(
        "use_tp_pp_dp_mapping",
        False,
        "ranks are numbered tensor, context, data, pipeline; leave the flag out",
    ),
    no(
        "microbatch_group_size_per_vp_stage",
        None,
        "as many micro-batches as stages pass a chunk in turn; leave the flag out",
        spelling="--microbatch-group-size-per-virtual-pipeline-stage",
    ),
    no("account_for_embedding_in_pipeline_split", False, _ENDS),
    no("account_for_loss_in_pipeline_split", False, _ENDS),
    no("pipeline_model_parallel_layout", None, _ENDS),
    same(
        "ddp_average_in_collective",
        False,
        "gradients are divided by the global count of tokens after the sum",
    ),
    no("use_megatron_fsdp", False, _DP),
    no("data_parallel_sharding_strategy", "no_shard", _DP, fine=("optim_grads_params",)),
    no("use_torch_fsdp2", False, _DP),
    no(
        "grad_reduce_in_bf16",
        False,
        "gradients are kept and reduced in fp32 with --bf16; leave the flag out",
    ),
    same("align_param_gather", True, _AT_ONCE, spelling="--no-align-param-gather"),
    same("align_grad_reduce", True, _WHEN_COMPLETE, spelling="--no-align-grad-reduce"),
    no(
        "use_precision_aware_optimizer",
        False,
        "main weights and moments are fp32; leave the flag out",
    ),
    no("main_grads_dtype", "fp32", "main gradients are fp32; leave the flag out"),
    no("main_params_dtype", "fp32", "main weights are fp32; leave the flag out"),
    no("exp_avg_dtype", "fp32", "Adam's moments are fp32; leave the flag out"),
    no("exp_avg_sq_dtype", "fp32", "Adam's moments are fp32; leave the flag out"),
    no("optimizer_cpu_offload", False, "the optimizer stays on its device; leave the flag out"),
    no("use_mup", False, "muP is not built in; set --init-method-std and --lr yourself"),
    no(
        "embedding_init_method_std",
        None,
        "the embedding has the deviation of all matrices; use --init-method-std",
    ),
    no("init_model_with_meta_device", False, "weights are drawn on the CPU; leave the flag out"),
    no("moe_layer_freq", "1", _NO_MOE),
    no("moe_ffn_hidden_size", None, _NO_MOE),
    no("moe_router_topk", 2, _NO_MOE),
    no("moe_router_load_balancing_type", "aux_loss", _NO_MOE),
    no("moe_aux_loss_coeff", 0.0, _NO_MOE),
    no("moe_z_loss_coeff", None, _NO_MOE),
    no("moe_router_score_function", "softmax", _NO_MOE),
    no("moe_router_pre_softmax", False, _NO_MOE),
    no("moe_router_enable_expert_bias", False, _NO_MOE),
    no("moe_router_bias_update_rate", 0.001, _NO_MOE),
    no("moe_router_topk_scaling_factor", None, _NO_MOE),
    no("moe_router_num_groups", None, _NO_MOE),
    no("moe_token_dispatcher_type", "allgather", _NO_MOE),
    no("moe_expert_capacity_factor", None, _NO_MOE),
    no("moe_shared_expert_intermediate_size", None, _NO_MOE),
    no("moe_permute_fusion", False, _NO_MOE),
    no("expert_tensor_parallel_size", None, _NO_MOE),
    no(
        "multi_latent_attention",
        False,
        "latent attention is not built here; use --group-query-attention",
    ),
    no("q_lora_rank", None, "latent attention is not built here; use --group-query-attention"),
    no("kv_lora_rank", 32, "latent attention is not built here; use --group-query-attention"),
    no("mtp_num_layers", None, "only the next token is predicted; leave the flag out"),
    no("mtp_loss_scaling_factor", 0.1, "only the next token is predicted; leave the flag out"),
    no("window_size", None, "attention looks at all tokens before; leave the flag out"),
    no("softmax_type", "vanilla", "there are no attention sinks; leave the flag out"),
    no("quick_geglu", False, "use --geglu (its GELU is the tanh form) or --swiglu"),
    same("cross_entropy_loss_fusion", False, "the loss is always computed in chunks, exactly"),
    same("cross_entropy_fusion_impl", "native", "the loss is always computed in chunks, exactly"),
    no("fp8_param_gather", False, _NO_FP8),
    no("fp4", None, "there are no FP4 kernels here; use --bf16", spelling="--fp4-format"),
    no(
        "recompute_modules",
        ("core_attn",),
        "--recompute-granularity selective recomputes core attention; use full for more",
        takes="list",
    ),
    no(
        "cuda_graph_impl",
        "none",
        "CUDA graphs are not used; --torch-compile fuses where that gains",
    ),
    no("delay_wgrad_compute", False, _DP),
    same(
        "calculate_per_token_loss",
        False,
        "loss and gradients are always divided by the global count of tokens",
    ),
    no(
        "check_for_spiky_loss",
        False,
        "every run looks for spikes; --spike-action says what is done about one",
    ),
    no(
        "rerun_mode",
        "disabled",
        "iterations are not run twice to look for faults; leave the flag out",
    ),
    no(
        "eval_global_batch_size",
        None,
        "validation has the batch size of training; set --eval-iters for its length",
    ),
    no(
        "start_eval_at_iter",
        None,
        "the first validation comes after --eval-interval; leave the flag out",
    ),
    same("mmap_bin_files", True, "the .bin file is never mapped", spelling="--no-mmap-bin-files"),
    same(
        "create_attention_mask_in_dataloader",
        True,
        "no matrix of masks is ever made",
        spelling="--no-create-attention-mask-in-dataloader",
    ),
    no(
        "dataloader_inter_document_masking",
        False,
        "use --reset-attention-mask and --reset-position-ids",
    ),
    same("num_dataset_builder_threads", 1, "the index is built by one thread"),
    no("fim_data", False, "samples are plain left-to-right text; leave the flag out"),
    no("object_storage_cache_path", None, "data are read from files; copy them to a disk first"),
    same("ckpt_format", "torch_dist", _OWN_FORMAT),
    same("dist_ckpt_format", "torch_dist", _OWN_FORMAT),
    same("use_dist_ckpt", False, _OWN_FORMAT),
    same("async_strategy", "nvrx", _OWN_FORMAT),
    same("ckpt_fully_parallel_save", True, _OWN_FORMAT, spelling="--no-ckpt-fully-parallel-save"),
    same(
        "ckpt_fully_parallel_save_deprecated",
        False,
        _OWN_FORMAT,
        spelling="--ckpt-fully-parallel-save",
    ),
    same("ckpt_fully_parallel_load", False, _OWN_FORMAT),
    same("ckpt_assume_constant_structure", False, _OWN_FORMAT),
    same("auto_detect_ckpt_format", False, _OWN_FORMAT),
    same("use_mp_args_from_checkpoint_args", False, _OWN_FORMAT),
    no(
        "dist_ckpt_strictness",
        "assume_ok_unexpected",
        "a checkpoint must hold exactly what the model needs, and every difference is an error",
    ),
    no("pretrained_checkpoint", None, "use --load DIR --finetune"),
    no("save_retain_interval", None, "use --keep-last 1 --keep-every N"),
    no("non_persistent_save_interval", None, "use --snapshot-interval"),
    no("override_ckpt_iteration", None, "use --ckpt-step, or --finetune to start from iteration 0"),
    no(
        "use_legacy_models",
        False,
        "there is one model, with megatron-core's parameter names; leave the flag out",
    ),
    same("log_progress", False, "no progress.txt is written; --metrics-file has every iteration"),
    same(
        "log_memory_interval", None, "memory goes to TensorBoard with --log-memory-to-tensorboard"
    ),
    same("log_energy", False, "energy is not measured"),
    same(
        "log_straggler",
        False,
        "stragglers are not looked for; --timing-log-option all shows every rank",
    ),
    same("logging_level", None, "library lines are always printed at level INFO"),
    same(
        "enable_one_logger",
        True,
        "nothing is sent to a logging service",
        spelling="--no-one-logger",
    ),
    same(
        "distributed_timeout_seconds_after_init",
        None,
        "--distributed-timeout-minutes holds for the whole run",
    ),
    no(
        "exit_signal",
        "SIGTERM",
        "--exit-signal-handler watches SIGTERM and SIGUSR1",
        fine=("SIGUSR1",),
    ),
    no(
        "trust_remote_code",
        False,
        "no code is taken from tokenizer files; convert the tokenizer first",
    ),
    same("legacy_tokenizer", False, "there is one set of tokenizers"),
    no(
        "pad_vocab_size",
        True,
        "use --make-vocab-size-divisible-by 1",
        spelling="--no-pad-vocab-size",
    ),
    no("hybrid_layer_pattern", None, _ONLY_LAYERS),
    no("yaml_cfg", None, "write the flags into a text file and give @FILE"),
    same(
        "use_gloo_process_groups",
        True,
        "no second set of process groups is made",
        spelling="--disable-gloo-process-groups",
    ),
    no("sft", False, "only pretraining samples are made; leave the flag out"),
)

# Flags that Megatron dropped before January 2024, and those of its forks: scripts still have them.
REMOVED: tuple[Row, ...] = (
    no("batch_size", None, "use --micro-batch-size (samples of one forward pass on one rank)"),
    no("model_parallel_size", None, "use --tensor-model-parallel-size"),
    no("warmup", None, "use --lr-warmup-fraction"),
    no(
        "checkpoint_activations",
        False,
        "use --recompute-activations, or --recompute-granularity full with "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    no("checkpoint_num_layers", 1, "use --recompute-num-layers"),
    no("checkpoint_granularity", None, "use --recompute-granularity"),
    no("checkpoint_method", None, "use --recompute-method"),
    no("activations_checkpoint_method", None, "use --recompute-method"),
    no("activations_checkpoint_num_layers", 1, "use --recompute-num-layers"),
    no("distribute_checkpointed_activations", False, "use --recompute-granularity full alone"),
    no("layernorm_epsilon", 1e-5, "use --norm-epsilon"),
    no("override_lr_scheduler", False, "use --override-opt_param-scheduler"),
    no("use_checkpoint_lr_scheduler", False, "use --use-checkpoint-opt_param-scheduler"),
    no("fp32_allreduce", False, "use --accumulate-allreduce-grads-in-fp32"),
    no("dynamic_loss_scale", False, "use --fp16 without --loss-scale"),
    same(
        "data_impl", "infer", "there is one data format, Megatron's .bin and .idx", fine=("mmap",)
    ),
    same("DDP_impl", "local", "gradients always live in flat buffers of our own"),
    same(
        "use_contiguous_buffers_in_local_ddp",
        True,
        "gradients always live in flat buffers of our own",
        spelling="--no-contiguous-buffers-in-local-ddp",
    ),
    same(
        "query_key_layer_scaling",
        True,
        "it is numerically neutral",
        spelling="--no-query-key-layer-scaling",
    ),
    same(
        "no_pipeline_parallel",
        False,
        "--pipeline-model-parallel-size alone says how many stages there are",
    ),
    no(
        "tokenizer_name_or_path",
        None,
        "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH",
    ),
    no("train_tokens", None, "use --train-samples, the tokens divided by --seq-length"),
    no(
        "skip_train_iteration_range",
        None,
        "use --train-range-to-skip a b, whose numbers are absolute",
        takes="list",
    ),
    no(
        "train_iters_to_skip",
        None,
        "use --iterations-to-skip, which counts from 1 as the log does",
        takes="list",
    ),
    no("deepspeed", False, "DeepSpeed is not used; leave its flags out"),
)

# What to say about any other flag that begins so.
PREFIXES: tuple[tuple[str, str], ...] = (
    ("--moe- --expert-", _NO_MOE),
    ("--fp8- --fp4- --te- --keep-fp8-", _NO_FP8),
    ("--use-flash-attn", "use --use-flash-attn, or --attention-backend flash"),
    ("--tp-comm-", _NO_TP_COMM),
    ("--wandb- --one-logger-", _NO_WANDB),
    (
        "--bert- --retro- --vision- --dino- --ict- --biencoder- --retriever-",
        "only GPT is trained here; leave the flag out",
    ),
    ("--mamba- --hybrid- --heterogeneous- --linear-attention-", _ONLY_LAYERS),
    (
        "--rl- --grpo- --inference- --export- --sft- --distillation-",
        "only pretraining is done here; leave the flag out",
    ),
    ("--deepspeed --zero- --ds-", "DeepSpeed is not used; leave its flags out"),
    (
        "--ft- --inprocess- --rerun- --straggler-",
        "restarts are the launcher's; a run resumes by the same command",
    ),
    (
        "--cuda-graph --enable-cuda-graph --external-cuda-graph",
        "CUDA graphs are not used; --torch-compile fuses where that gains",
    ),
    ("--fsdp- --megatron-fsdp-", _DP),
)

# What other suites call our flags.
SYNONYMS: dict[str, str] = {
    "--learning-rate": "--lr",
    "--lr-min": "--min-lr",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--steps": "--train-iters",
    "--max-steps": "--train-iters",
    "--num-steps": "--train-iters",
    "--iters": "--train-iters",
    "--epochs": "--train-iters",
    "--num-train-epochs": "--train-iters",
    "--num-heads": "--num-attention-heads",
    "--num-head": "--num-attention-heads",
    "--n-head": "--num-attention-heads",
    "--n-layer": "--num-layers",
    "--n-embd": "--hidden-size",
    "--num-kv-heads": "--num-query-groups",
    "--kv-heads": "--num-query-groups",
    "--gqa": "--group-query-attention",
    "--rmsnorm": "--normalization",
    "--rope": "--position-embedding-type",
    "--vocab": "--vocab-file",
    "--merges": "--merge-file",
    "--data": "--data-path",
    "--output-dir": "--save",
    "--resume": "--load",
    "--num-gpus": "--world-size",
    "--gradient-clipping": "--clip-grad",
    "--max-grad-norm": "--clip-grad",
    "--batch": "--micro-batch-size",
    "--random-seed": "--seed",
}
