"""get_args() of a script has the names that Megatron's scripts read, of which features have some."""

from __future__ import annotations

from megatron.training import get_args
from tests.forkrun import run_ranks
from tests.runs import SMALL, plot, with_flags

# What Megatron's training scripts for GPT read of get_args(), most often first.
READ = """data_path seq_length seed split reset_attention_mask eod_mask_loss reset_position_ids data_impl
sequence_parallel context_parallel_size data_cache_path padded_vocab_size num_experts train_data_path
valid_data_path test_data_path mid_level_dataset_surplus allow_ambiguous_pad_tokens use_flash_attn
max_position_embeddings tensor_model_parallel_size pipeline_model_parallel_size micro_batch_size
untie_embeddings_and_output_weights use_rotary_position_embeddings bf16 fp16 deepspeed zero_stage
no_pipeline_parallel kd mos teacher_forward curriculum_learning_legacy check_for_spiky_loss
data_efficiency_curriculum_learning check_for_nan_in_loss_and_grad decoder_seq_length spec
encoder_seq_length rotary_percent rotary_base position_embedding_type transformer_impl tensorboard_dir
fp16_lm_cross_entropy encoder_num_layers use_rope_scaling rope_scaling_factor full_validation sft
dataloader_defer_npy_index_mmap data_parallel_size multiple_validation_sets mmap_bin_files mock_data
num_dataset_builder_threads hybrid_context_parallel create_attention_mask_in_dataloader save load
per_dataset_sequences_path object_storage_cache_path global_batch_size train_iters train_samples
eval_iters eval_interval recompute_granularity moe_grouped_gemm normalization qk_l2_norm mtp_num_layers
experimental_attention_variant heterogeneous_layers_config_path yaml_cfg num_layers hidden_size
record_memory_history memory_snapshot_path use_torch_fsdp2 use_legacy_models use_mcore_models rank
world_size params_dtype iteration curr_iteration consumed_train_samples consumed_valid_samples
virtual_pipeline_model_parallel_size expert_model_parallel_size fim_data lr min_lr ckpt_format""".split()


def loss_and_missing(batch, model):
    missing = [name for name in READ if not hasattr(get_args(), name)]
    return *plot().forward_step(batch, model)[:2], {f"no {name}": 1.0 for name in missing}


def _rank(rank: int, world: int, argv: list[str]) -> None:
    plot().main(argv, forward_step=loss_and_missing)


def test_a_forward_step_finds_them(tmp_path):
    words = ["--mock-data", "--train-iters", "1", "--lr-warmup-iters", "0"]
    words += ["--metrics-file", str(tmp_path / "metrics")]
    run_ranks(1, _rank, with_flags(SMALL, *words), seconds=100.0)
    assert '"lm_loss"' in (text := (tmp_path / "metrics").read_text()) and '"no ' not in text
