"""Megatron's flags that are not flags of this suite, as data; `flags.py` reads the table.

A row is `FLAG ... | REASON`, and an indented line continues it. FLAG is `NAME=DEFAULT`, where an
empty default is None, a default of True makes a flag that switches off (`--no-NAME`, which may
always be written `--disable-NAME`, and the reverse), `NAME:TYPE` gives the type where the default
does not show it, `!VALUE` is another value that needs no note (the words of a list joined by /),
`?VALUE` the only one that is accepted beside the default, and `,--SPELLING` replaces the spelling
made from the name (several are aliases). REASON `&KEY` is the text in REASONS. A line
`[VERDICT]` says what happens to the flags below it:

note     accepted: the numbers of the run are the same without it
more     accepted: less precision or memory was requested than is used; REASON is what it costs
read-as  the flags of REASON are read in its place ({} is its value, {samples} a value in tokens
         divided by --seq-length, {strategy} that of a ZeRO stage), where they are not typed
         themselves; of two rows the upper one counts
refused  an error: ignoring it would train another model or lose data; REASON says what to use

`dumped`: in January 2024's argument dump of Megatron also where it was not given.
"""

from __future__ import annotations

REASONS: dict[str, str] = {
    "bucket": "a bucket of gradients is reduced as soon as it is complete, on every stage",
    "graphs": "CUDA graphs are those of --cuda-graph-impl local, whole micro-batches in one pool",
    "engine": "it steers Transformer Engine's kernels or buffers, which are not used",
    "ends": "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers to "
    "give the ends fewer layers",
    "fp8": "FP8 is --fp8-format with --fp8-recipe tensorwise or delayed; use those",
    "gather": "weights are gathered right after the update, on every pipeline stage",
    "gpt": "only GPT is trained here; omit the flag",
    "layers": "only transformer layers are built; omit the flag",
    "moe": "this option of mixture-of-experts models is not supported; omit the flag",
    "mtp": "each module of --mtp-num-layers has a layer of its own, which is trained with the "
    "rest; omit the flag",
    "optimizer": "the optimizers are adam, sgd and muon; use one of these",
    "nccl": "process groups have NCCL's defaults; NCCL_* variables apply",
    "one": "there is one implementation, with the same numbers",
    "restart": "a failed run is restarted by its launcher and resumes with the same command",
    "hsdp": "the --num-distributed-optimizer-instances are replicas, which share nothing; omit it",
    "sharding": "this option of fully sharded data parallelism is not supported; use "
    "--data-parallel-sharding-strategy alone",
    "wandb": "it steers a part of Weights & Biases, or another service, that is not used",
}

# ZeRO stages as --data-parallel-sharding-strategy
STRATEGIES = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}

TABLE = """
[refused]
bert_binary_head=True,--bert-no-binary-head bert_embedder_type=megatron bert_load= mask_prob=0.15
  output_bert_embeddings=False short_seq_prob=0.1
  | BERT is not trained here, only GPT; omit the flag
decoder_num_layers= decoder_seq_length= pipeline_model_parallel_split_rank=
  | T5 is not trained here, only GPT; omit the flag
classes_fraction=1.0 data_per_class_fraction=1.0 dino_bottleneck_size=256 dino_freeze_last_layer=1
  dino_head_hidden_size=2048 dino_local_crops_number=10 dino_local_img_size=96
  dino_norm_last_layer=False dino_teacher_temp=0.07 dino_warmup_teacher_temp=0.04
  dino_warmup_teacher_temp_epochs=30 head_lr_mult=1.0 img_h=224 img_w=224 iter_per_epoch=1250
  mask_factor=1.0 mask_type=random num_channels=3 num_classes=1000 patch_dim=16
  swin_backbone_type=tiny vision_backbone_type=vit vision_pretraining=False
  vision_pretraining_type=classify | vision models are not trained here, only GPT; omit the flag
biencoder_projection_dim=0 biencoder_shared_query_context_model=False block_data_path=
  embedding_path= evidence_data_path= ict_head_size= ict_load= indexer_batch_size=128
  indexer_log_interval=1000 query_in_block_prob=0.1 retriever_report_topk_accuracies:list=
  retriever_score_scaling=False retriever_seq_length=256 sample_rate=1.0 titles_data_path=
  use_one_sent_docs=False
  | retrievers (ICT, biencoder) are not trained here, only GPT; omit the flag
retro_add_retriever=False retro_attention_gate=1 retro_cyclic_train_iters=
  retro_encoder_attention_dropout=0.1 retro_encoder_hidden_dropout=0.1 retro_encoder_layers=2
  retro_num_neighbors=2 retro_num_retrieved_chunks=2 retro_return_doc_ids=False
  retro_verify_neighbor_count=True,--retro-no-verify-neighbor-count retro_workdir=
  | Retro is not trained here, only GPT; omit the flag

[refused dumped]
fp8_wgrad=True
  | all three GEMMs of a linear layer run in FP8; omit the flag
lazy_mpu_init= | process groups are always made at the start; omit the flag
spec:list=!slime_plugins.models.glm4/get_glm_spec
  | the layers of the model are those of megatron/model; change them there
standalone_embedding_stage=False | &ends

[note dumped]
moe_grouped_gemm=False | &one
adlr_autoresume=False adlr_autoresume_interval=1000
  | that service runs on NVIDIA's cluster; --exit-signal-handler saves before a job ends
fp8_interval=1 | delayed scales follow every step, as in Megatron, which ignores it too
async_tensor_model_parallel_allreduce=True
  | they are always reduced while weight gradients are computed
barrier_with_L1_time=True,--no-barrier-with-level-1-timing
  | timers never make one rank wait for another
bias_dropout_fusion=True no_persist_layer_norm=False | &one
clone_scatter_output_in_embedding=True
  | the slice is a tensor of its own and keeps no other memory
data_parallel_random_init=False
  | all ranks draw the same weights, from the seed and the name of each parameter
delay_grad_reduce=True | &bucket
delay_param_gather=False | &gather
empty_unused_memory_level=0 | torch manages the cache of the device between steps
inference_batch_times_seqlen_threshold=512 max_tokens_to_oom=12000
  | training runs no inference server
nccl_communicator_config_path= | &nccl
onnx_safe= | nothing is exported to ONNX
perform_initialization=True,--no-initialization | weights are always drawn (--load overwrites them)
scatter_gather_tensors_in_pipeline=True use_ring_exchange_p2p=False
  | stages exchange whole hidden states (with --sequence-parallel the part of each rank)
tp_comm_bulk_dgrad=True,--disable-tp-comm-bulk-dgrad
  tp_comm_bulk_wgrad=True,--disable-tp-comm-bulk-wgrad
  tp_comm_split_ag=True,--disable-tp-comm-split-ag
  tp_comm_split_rs=True,--disable-tp-comm-split-rs
  tp_comm_overlap=False tp_comm_overlap_cfg= | &engine
use_cpu_initialization:switch=
  | weights are always drawn on the CPU, identically for any number of ranks
use_mcore_models=False | there is one model, with megatron-core's parameter names

[more dumped]
distribute_saved_activations=False
  | every tensor-parallel rank keeps the inputs of its layers whole; --sequence-parallel splits them

[note]
enable_zbh1_pipeline=False enable_zbh1_exact_semantics=False
  | stages run one forward, one backward, with the same results
use_grouped_gemm_for_dense_mlp=False | &one
use_legacy_models=False | there is one model, with megatron-core's parameter names
trust_remote_code=False | no code of a tokenizer's folder is run; tokenizer.json is read
no_attention_softmax_in_fp32=False | the softmax is always computed in fp32
relative_attention_num_buckets=32 relative_attention_max_distance=128 mrope_section:list=
  | only positions of other kinds read it
cache_mla_latents=False flash_decode=False use_legacy_static_engine=False mlp_chunks_for_prefill=1
  symmetric_ar_type= | only Megatron's own generation reads it
enable_msc=True,--disable-msc | data are read from files
dump_param_to_param_group_map= save_config_filepath= save_params_interval:int=
  save_activations_interval:int= save_wgrads_interval:int= save_dgrads_interval:int=
  save_tokens_per_expert_interval:int= save_tokenizer_assets=True
  | no such files are written; the log and every checkpoint have all flags
exit_signal_handler_for_dataloader=False exit_signal_handler_for_training=False
  | data workers leave signals to the training process, which handles them
validation_set_names:list= | validation sets are numbered in the order of --valid-data-path
log_throughput_to_tensorboard=False throughput_window_size=100 memory_keys=
  log_device_memory_used=False log_l2_norm_grad_to_tensorboard=False
  log_runtime_to_tensorboard=False runtime_time_unit=hours log_per_layer_resource_usage=False
  log_per_layer_resource_usage_interval:int=
  | it is not logged; --log-throughput and --metrics-file have the numbers of every iteration
filter_warnings=True modules_to_filter:list= set_level_for_all_loggers=False
  | warnings are always printed
async_ckpt_cpu_priority=10 async_ckpt_io_priority=3
  | the writer process of --async-save has the priority of its parent
ckpt_fully_parallel_load_exchange_algo=broadcast ckpt_fully_parallel_save_process_group=dp
  ckpt_fully_parallel_load_process_group=dp ckpt_fully_parallel_save_replicate_local=False
  ckpt_fully_parallel_load_replicate_local=False ckpt_load_validate_sharding_integrity=True
  hetereogenous_dist_checkpoint=False load_main_params_from_ckpt=False universal_checkpoint=False
  | checkpoints have one format, which any number of ranks can read
tokenizer_metadata= tokenizer_sentencepiece_legacy=False
  tokenizer_sentencepiece_ignore_extra_whitespaces=True tokenizer_hf_no_use_fast=False
  tokenizer_hf_no_include_special_tokens=False
  | text was tokenized by tools/preprocess_data.py; training only reads the size of the vocabulary
pytorch_profiler_collect_chakra=False | --profile --use-pytorch-profiler writes a Chrome trace
high_priority_a2a_comm_stream=False | &nccl
use_fused_weighted_squared_relu=False use_fused_mlp=False use_inference_optimized_layers=False
  fallback_to_eager_attn=False mla_down_proj_fusion=False fused_single_qkv_rope=False
  memory_efficient_layer_norm=False batch_p2p_comm=True batch_p2p_sync=True
  deallocate_pipeline_outputs=False ep_overlap_early_attn_memory_release=False
  overlap_dispatch_backward_with_experts_wgrad=False mem_efficient_ln=True
  cpu_torch_adam=False,--cpu_torch_adam,--cpu-torch-adam use_layer_wise_param_layout=True | &one
optimizer_cuda_graph=False | &graphs
tp_only_amax_red=False | &engine
store_param_remainders=True | main weights are whole fp32 numbers
max_padding_length= | samples are never padded
codecarbon_dir= log_level= log_level_replica= | it is not logged
align_grad_reduce=True | &bucket
align_param_gather=True overlap_param_gather_with_optimizer_step=False | &gather
app_tag_run_name= app_tag_run_version=0.0.0 config_logger_dir=''
  enable_one_logger=True,--no-one-logger | nothing is sent to a logging service
ddp_average_in_collective=False gradient_reduce_div_fusion=True
  | gradients are divided by the global number of tokens after they are summed
ddp_pad_buckets_for_high_nccl_busbw=False disable_jit_fuser=False | &one
calculate_per_token_loss=False
  | loss and gradients are always divided by the global number of tokens
cross_entropy_loss_fusion=False cross_entropy_fusion_impl=native
  | the loss is always computed in chunks, exactly
mmap_bin_files=True | the .bin file is never mapped
create_attention_mask_in_dataloader=True | no attention mask matrix is ever made
num_dataset_builder_threads=1 defer_npy_index_mmap=False dataloader_fast_cache_load=False
  | the index is built by one thread
valid_num_workers= | --num-workers applies to every split
enable_experimental=False test_mode=False
  | it selects experiments of Megatron's code, which are not here
async_strategy=nvrx async_ckpt_use_cpu_shm=False async_ckpt_use_cached_metadata=False
  auto_detect_ckpt_format=False ckpt_assume_constant_structure=False ckpt_format=torch_dist
  ckpt_fully_parallel_load=False ckpt_fully_parallel_save=True
  ckpt_fully_parallel_save_deprecated=False,--ckpt-fully-parallel-save
  ckpt_convert_update_legacy_dist_opt_format=False dist_ckpt_format=torch_dist
  dist_ckpt_optim_fully_reshardable=False dist_ckpt_save_pre_mcore_014=False
  distrib_optim_fully_reshardable_mem_efficient=False use_dist_ckpt=False
  export_kd_teacher_ckpt_format= use_mp_args_from_checkpoint_args=False
  strict_fsdp_dtensor_load=True
  | checkpoints have one format, which any number of ranks can read
use_persistent_ckpt_worker=False | the writer process of --async-save runs until the run ends
dist_ckpt_strictness=assume_ok_unexpected
  | a checkpoint must hold exactly what the model needs: every difference is an error
verify_integrity=False | damage to a checkpoint is always detected before the first step
non_persistent_local_ckpt_algo=fully_parallel
  | a local copy has all that its rank holds, so that a rank reads nothing but its own
check_for_large_grads=False check_for_spiky_loss=False
  | a large finite loss or gradient norm is no error; the log has both of every iteration
error_injection_rate=0 error_injection_type=transient_error rerun_mode=disabled
  result_rejected_tracker_filename= | iterations are not repeated to look for hardware faults
deepspeed_activation_checkpointing=False contigious_checkpointing=False
  synchronize_each_layer=False profile_backward=False
  | it steers DeepSpeed's recomputation; --recompute-granularity requests it here
ds_inference=False | DeepSpeed is not used
abort_on_unmet_fused_kernel_constraints=False use_te_activation_func=False
  use_transformer_engine_op_fuser=False te_rng_tracker=False overlap_moe_expert_parallel_comm=False
  moe_permute_fusion=False moe_router_fusion=False moe_shared_expert_overlap=False
  | &one
export_force_local_attention=False export_te_mcore_model=False | &one
moe_deepep_num_sms:int= moe_enable_deepep=False moe_flex_dispatcher_backend=deepep
  moe_flex_dispatcher_num_sms:int= moe_hybridep_num_sms:int=
  moe_hybridep_num_sms_preprocessing=108
  | experts get their tokens by torch's all-to-all, with the same numbers
moe_pad_expert_input_to_capacity=False
  | experts compute only the tokens they have, with the same numbers
defer_embedding_wgrad_compute=False delay_wgrad_compute=False wgrad_deferral_limit=0
  overlap_p2p_comm_warmup_flush=False,--overlap-p2p-communication-warmup-flush
  | every gradient is computed and every message sent as soon as its input is there
pipeline_model_parallel_comm_backend= | &nccl
high_priority_stream_groups:list= disable_symmetric_registration=False sharp_enabled_group=
  nccl_ub=False,--use-nccl-ub use_sharp=False | &nccl
use_gloo_process_groups=True,--disable-gloo-process-groups
  | no second set of process groups is made
distributed_timeout_seconds_after_init= | --distributed-timeout-minutes applies to the whole run
train_sync_interval= | no synchronization is added between iterations
pytorch_profiler_collect_callstack=False pytorch_profiler_collect_shapes=False nvtx_ranges=False
  memory_snapshot_path=snapshot.pickle record_memory_history=False
  run_workload_inspector_server=False
  | no memory history is recorded; --profile --use-pytorch-profiler traces operations
log_progress=False | no progress.txt is written; --metrics-file has every iteration
log_memory_interval= | memory goes to TensorBoard with --log-memory-to-tensorboard
log_energy=False | energy is not measured
disable_straggler_on_startup=False | --log-straggler is on from the start
log_optimizer_states_to_tensorboard=False structured_logs=False structured_logs_dir=
  | they are not logged; --metrics-file has every iteration
logging_level= | library lines are always printed at level INFO
legacy_tokenizer=False | there is one set of tokenizers
use_tokenizer_model_from_checkpoint_args=True
  | --use-checkpoint-args takes the tokenizer file of the checkpoint only where none is given
kill_switch_path= trigger_path= | no such path is watched; --control-file saves or stops a run
sync_tp_duplicated_parameters=False
  | parameters that tensor-parallel ranks share have equal gradients on all of them

[more]
activation_func_fp8_input_store=False | inputs of activation functions are kept in 16 bits
cpu_offloading=False cpu_offloading_activations=True cpu_offloading_weights=False
  cpu_offloading_double_buffering=False min_offloaded_tensor_size=1048576
  activation_offload_fraction=1.0 delta_offload_bytes_across_pp_ranks=0
  delay_offload_until_cuda_graph=False memory_centric_tiled_linear=False
  remote_device=none scattered_embeddings=False split_transformers=False tile_factor=1
  use_pin_memory=False
  | activations and weights stay on the device
use_bnb_optimizer=False | moments are fp32, not 8 bits
fp8_param_gather=False
  | weights are gathered in 16 bits and cast to FP8 by each rank: twice the bytes
main_params_dtype=fp32
  | main weights are fp32: twice the bytes
reuse_grad_buf_for_mxfp8_param_ag=False
  | buffers are not shared
cpu_offloading_num_layers=0 fine_grained_activation_offloading=False offload_modules:list=
  | activations stay on the device
optimizer_cpu_offload=False optimizer_offload_fraction=1.0 use_torch_optimizer_for_cpu_offload=False
  overlap_cpu_optimizer_d2h_h2d=False pin_cpu_grads=True pin_cpu_params=True cpu_optimizer=False
  | optimizer states stay on the device
init_model_with_meta_device=False
  | each rank draws its part of the weights on the CPU first: as much host memory
distribute_checkpointed_activations=False partition_activations=False
  checkpoint_in_cpu=False,--checkpoint-in-cpu
  | each rank keeps the inputs of its recomputed layers whole, on the device

[read-as]
activations_checkpoint_num_layers=1 checkpoint_num_layers=1 | --recompute-num-layers {}
activations_checkpoint_granularity= checkpoint_granularity= | --recompute-granularity {}
activations_checkpoint_method= checkpoint_method=
  | --recompute-granularity full --recompute-method {} --recompute-num-layers 1
checkpoint_activations=False
  | --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
fp32_allreduce=False | --accumulate-allreduce-grads-in-fp32
allgather_cp=False | --cp-comm-type all_gather
layernorm_epsilon:float= | --norm-epsilon {}
load_iteration:int= | --ckpt-step {}
most_recent_k=-1 | --keep-last {}
no_weight_decay_cond_type=?qwen3_next?apply_wd_to_qk_layernorm | --apply-wd-to-qk-layernorm
non_persistent_save_interval:int= | --snapshot-interval {}
non_persistent_global_ckpt_dir= | --snapshot-dir {}
num_key_value_heads:int= | --group-query-attention --num-query-groups {}
override_lr_scheduler=False | --override-opt_param-scheduler
rotary_position_embeddings_theta:int= | --rotary-base {}
save_retain_interval:int= | --keep-last 1 --keep-every {}
attention_head_type=multihead?multiquery | --group-query-attention --num-query-groups 1
use_checkpoint_lr_scheduler=False | --use-checkpoint-opt_param-scheduler
use_flash_attn_v1=False,--use-flash-attn-v1,--use-flash-attn-v2,--use-flash-attn-builder,
  --use-flash-attn-triton | --use-flash-attn
s3_cache_path= | --object-storage-cache-path {}
zero_stage=0?1?2?3 | --data-parallel-sharding-strategy {strategy}
use_megatron_fsdp=False use_torch_fsdp2=False use_custom_fsdp=False
  | --data-parallel-sharding-strategy optim_grads_params
ds_sequence_parallel_size=1 | --context-parallel-size {}
data_file_list= | --data-args-path {}
tokenizer_file= | --tokenizer-model {}
train_tokens:int= | --train-samples {samples}
lr_decay_tokens:int= | --lr-decay-samples {samples}
lr_warmup_tokens:int= | --lr-warmup-samples {samples}

[refused]
export_kd_teacher_model_config=
  | the checkpoint of --export-kd-teacher-load knows what model it is of; omit the flag
hybrid_context_parallel=False dynamic_context_parallel=False max_seqlen_per_dp_cp_rank:int=
  min_hybrid_context_parallel_size:int= min_dynamic_context_parallel_size:int=
  sequence_packing_scheduler= pad_packed_seq_alignment:int= thd_max_packed_sequences:int=
  use_varlen_dataset=False varlen_mock_dataset_config_json= varlen_sbhd_validation=False
  | every sequence has --seq-length tokens; omit the flag
enable_full_sharding_in_hsdp=False outer_dp_sharding_strategy=no_shard | &hsdp
preserve_fp32_weights=True megatron_fsdp_main_params_dtype=fp32
  | the optimizer updates fp32 weights; omit the flag
megatron_fsdp_main_grads_dtype=auto!fp32 megatron_fsdp_grad_comm_dtype=auto!fp32
  | gradients are fp32; use --grad-reduce-in-bf16 for bf16
encoder_tensor_model_parallel_size=0 encoder_pipeline_model_parallel_size=0
  | there is no encoder; omit the flag
qk_l2_norm=False
  | use --qk-layernorm to keep attention scores small
glu_activation= | use --swiglu or --geglu
is_hybrid_model=False mamba_mem_eff_path=True,--disable-mamba-mem-eff-path
  use_mamba_mem_eff_path=True enable_hyper_connections=False num_residual_streams=1
  mlp_type=standard | &layers
use_kitchen=False use_kitchen_attention=False kitchen_attention_backend=
  kitchen_config_file= kitchen_recipe_number:int= quant_recipe= | &fp8
decoupled_weight_decay=True
  | Adam decays weights apart from the gradient (AdamW); omit the flag
muon_scalar_optimizer=adam | Adam updates what Muon does not; omit the flag
use_layer_wise_distributed_optimizer=False
  | use --use-distributed-optimizer, with which --optimizer muon gives whole matrices to ranks
batch_invariant_mode=False | use --deterministic-mode
allow_ambiguous_pad_tokens=False
  | no token is taken for padding; use --eod-mask-loss to mask the loss at end-of-document tokens
tokenizer_special_tokens:list= | use --tiktoken-special-tokens
create_moe_param_group=False use_tutel=False topk=1 noisy_gate_policy=
  enable_expert_tensor_parallelism=False disable_moe_token_dropping=False
  moe_expert_parallel_size:int= moe_loss_coeff:float= moe_train_capacity_factor:float=
  moe_eval_capacity_factor:float= moe_min_capacity:int=
  | Megatron-DeepSpeed's experts are others; use --expert-model-parallel-size,
  --moe-aux-loss-coeff, --moe-expert-capacity-factor
kd=False kd_alpha_ce=1.0 kd_beta_ce=1.0 kd_temp=1.0 mos=False
  teacher_forward=False load_teacher= hidden_size_teacher:int=
  num_layers_teacher:int= num_experts_teacher:list= num_attention_heads_teacher:int=
  | only pretraining is done here; omit the flag
reset_iteration=False | use --finetune, which starts from iteration 0
custom_token_counting=False | every sample has --seq-length tokens; omit the flag
train_data_exact_num_epochs:int=
  | use --data-order epoch with --data-path epochs:N PREFIX, which reads PREFIX N times
return_data_index=False repeated_dataloader=False train_desc_path= train_doc_idx_path=
  train_idx_path= train_sample_idx_path= train_shuffle_idx_path=
  | the order of samples follows from --seed and --data-order; omit the flag
freeze_all_layers=False freeze_base_model_for_mtp=False
  | use --train-only with patterns of the parameters that are trained, such as 'mtp.*'
blend_sample_in_corpus=False shuffle_sample_in_corpus=False
  | samples of all data sets are mixed by their weights; use --data-path
train_mode=pretrain | only pretraining is done here; omit the flag
dataset=!MMAP | use --data-path with data of tools/preprocess_data.py
patch_tokenizer_type= extra_vocab_size:int=
  | use --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH, or --vocab-size
reweight_loss_based_on_position_frequency=False loss_on_targets_only=False
  | every token has the same weight in the loss; omit the flag
force_ds_sequence_parallel=False | use --context-parallel-size
pp_partition_method= | &ends
embedding_init_method_std=
  | the embedding has the standard deviation of all matrices; use --init-method-std
embed_layernorm=False | the embedding has no norm of its own; omit the flag
use_gated_attention=False | use --attention-output-gate, whose gates are rows of linear_qkv
alibi_attention=False,--alibi | use --position-embedding-type rope or learned_absolute
fp4=,--fp4-format | there are no FP4 kernels; use --bf16
first_last_layers_bf16=False num_layers_at_start_in_bf16=1 num_layers_at_end_in_bf16=1
  | every layer runs in FP8 with --fp8-format; use --bf16 alone
dataloader_inter_document_masking=False | use --reset-attention-mask and --reset-position-ids
logits_load_dir= logits_load_decode_threads=4 logits_load_ignore_errors=False
  logits_load_kd_loss_alpha=1.0 logits_load_msc_prefetch_depth=2 logits_load_prefetch_factor=3
  | no teacher's logits are read; train on the data, or write a loss in a script of your own
tokenizer_name_or_path=
  | use --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH
padded_vocab_size= pad_vocab_size_to= | use --make-vocab-size-divisible-by
pad_vocab_size=True
  | use --make-vocab-size-divisible-by 1
ckpt_convert_format= ckpt_convert_save=
  | use tools/convert_checkpoint.py, which needs no GPU and no launcher
pretrained_checkpoint= | use --load DIR --finetune
override_ckpt_iteration=
  | iterations are not renumbered; use --ckpt-step, or --finetune to start from iteration 0
exit_signal=SIGTERM!SIGUSR1 | use --exit-signal-handler, which watches SIGTERM and SIGUSR1
goldfish_loss=False goldfish_k=50 goldfish_h=50 | every token has the same weight; omit the flag
attn_layernorm=True,--no-attn-layernorm mlp_layernorm=True,--no-mlp-layernorm
  final_layernorm=True,--no-final-layernorm post_layer_norm=False input_embeddings_multiplier=1.0
  apply_norm_post_sub_block=False qknorm_impl=te!torch!apex
  | layers have one norm before attention, one before the MLP, and one at the end; omit the flag
renormalize_blend_weights=False | weights of data sets are taken as they are given; omit the flag
num_seq_splits=1 use_mics=False ds_sequence_parallel_fpdt=False
  | use --context-parallel-size, or --data-parallel-sharding-strategy
shuffle_each_epoch_separately=False | use --data-order epoch
model_spec:list= | layers are made as the flags say; omit the flag
hybrid_attention_ratio=0.0 hybrid_mlp_ratio=0.0 | &layers
heterogeneous_layers_config_path= | &layers
curriculum_learning=False curriculum_learning_legacy=False
  data_efficiency_curriculum_learning=False
  | every sample is read whole, in one order; omit the flag
yaml_cfg= | write the flags into a text file and give @FILE
sft=False sft_mock_dataset_config_json= perform_rl_step=False
  | only pretraining samples are made; omit the flag
batch_size= | use --micro-batch-size (samples of one forward pass on one rank)
model_parallel_size= | use --tensor-model-parallel-size
warmup= | use --lr-warmup-fraction
dynamic_loss_scale=False | use --fp16 without --loss-scale
skip_train_iteration_range:list= | use --train-range-to-skip a b, whose numbers are absolute
train_iters_to_skip:list= | use --iterations-to-skip, which counts from 1 as the log does

[note]
enable_gpt_oss=False
  | only models that Megatron-LM's ModelOpt builder makes have its YaRN; with --modelopt-enabled
  it is read as --position-embedding-type yarn and the numbers of Megatron-LM's gpt-oss
modelopt_enabled=False | layers are the same whoever builds them
fsdp_double_buffer=False fsdp_manual_registration=False
  | the memory of a layer is the allocator's, and no library registers it
torch_fsdp2_reshard_after_forward=True,--torch-fsdp2-no-reshard-after-forward
  | weights are freed behind each layer: less memory, and one more gather
suggested_communication_unit_size:int= | what is gathered together is a layer
dataloader_defer_npy_index_mmap=False | indices of samples are mapped when they are read
per_dataset_sequences_path= | the sizes of data sets are read from their .idx files
moe_use_legacy_grouped_gemm=False moe_dynamic_hpu=False use_fused_sdpa=True
  use_fused_sdpa_with_recompute=False fp8_smooth_swiglu=False | &one
mmap_warmup=False | files are mapped, and read where samples need them
enable_manual_profiling=False trace_dir= | use --profile
data_impl=infer!mmap | there is one data format, Megatron's .bin and .idx
DDP_impl=local use_contiguous_buffers_in_local_ddp=True,--no-contiguous-buffers-in-local-ddp
  | gradients always live in flat buffers
query_key_layer_scaling=True | it is numerically neutral
no_pipeline_parallel=False | --pipeline-model-parallel-size sets the number of stages
deepspeed=False | DeepSpeed is not used
deepspeed_config=,--deepspeed_config,--deepspeed-config
  | read as the flags of what it sets: batch sizes, clipping, fp16, bf16, ZeRO stage 0 to 3
"""

# What happens to any other flag that begins so, whatever its values.
PREFIXES: tuple[tuple[str, str, str], ...] = (
    ("refused", "--moe- --expert-", "&moe"),
    ("refused", "--fp8- --fp4- --te- --keep-fp8-", "&fp8"),
    ("refused", "--use-flash-attn", "use --use-flash-attn, or --attention-backend flash"),
    ("note", "--tp-comm- --no-tp-comm- --disable-tp-comm-", "&engine"),
    ("note", "--inference- --decode-only-cuda-", "only Megatron's own generation reads it"),
    ("note", "--otel- --opentelemetry- --enable-otel", "nothing is sent to a logging service"),
    ("note", "--fault-injector- --gpu-sniff-", "no faults are injected"),
    ("note", "--wandb- --one-logger- --no-one-logger-", "&wandb"),
    ("refused", "--bert- --retro- --vision- --dino- --ict- --biencoder- --retriever-", "&gpt"),
    ("refused", "--mamba- --hybrid- --heterogeneous- --linear- --dsa- --csa- --kda-", "&layers"),
    ("refused", "--mhc- --hyper-connection- --engram-", "&layers"),
    ("refused", "--mtp-", "&mtp"),
    ("refused", "--lora- --peft-", "all weights are trained; use --finetune to start from a model"),
    ("refused", "--mup-", "the relative width is --hidden-size / --mup-base-hidden-size; omit it"),
    (
        "refused",
        "--curriculum- --data-efficiency- --random-ltd --compression-",
        "every sample is read whole, in one order; omit the flag",
    ),
    ("refused", "--experimental-attention- --kimi- --gated-delta-", "&layers"),
    ("refused", "--muon- --soap- --lion- --adaptive-muon-", "&optimizer"),
    (
        "refused",
        "--rl- --no-rl- --grpo- --langrl- --no-langrl- --export- --sft- --distillation- --logits- "
        "--kd- --mos",
        "only pretraining is done here; omit the flag",
    ),
    ("refused", "--deepspeed --zero- --ds-", "DeepSpeed is not used; omit its flags"),
    ("note", "--ft- --inprocess- --straggler- --enable-ft- --calc-ft-", "&restart"),
    ("refused", "--external-cuda-graph --cuda-graph-modules", "use --cuda-graph-impl local"),
    ("note", "--cuda-graph --enable-cuda-graph", "&graphs"),
    ("refused", "--fsdp- --megatron-fsdp- --torch-fsdp --gtp-", "&sharding"),
)

# What other suites call our flags.
SYNONYMS: dict[str, str] = {
    "--learning-rate": "--lr",
    "--lr-min": "--min-lr",
    "--warmup-iters": "--lr-warmup-iters",
    "--warmup-steps": "--lr-warmup-iters",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--dtype": "--bf16",
    "--params-dtype": "--bf16",
    "--precision": "--bf16",
    "--steps": "--train-iters",
    "--max-steps": "--train-iters",
    "--num-steps": "--train-iters",
    "--iters": "--train-iters",
    "--max-iters": "--train-iters",
    "--epochs": "--train-iters",
    "--num-train-epochs": "--train-iters",
    "--num-heads": "--num-attention-heads",
    "--num-head": "--num-attention-heads",
    "--n-head": "--num-attention-heads",
    "--n-heads": "--num-attention-heads",
    "--n-layer": "--num-layers",
    "--n-layers": "--num-layers",
    "--block-size": "--seq-length",
    "--context-length": "--seq-length",
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
    "--gradient-accumulation-steps": "--global-batch-size",
    "--grad-clip": "--clip-grad",
    "--gradient-clipping": "--clip-grad",
    "--max-grad-norm": "--clip-grad",
    "--batch": "--micro-batch-size",
    "--random-seed": "--seed",
}
