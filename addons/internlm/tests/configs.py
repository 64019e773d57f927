"""InternLM's configuration files in the form of its demos, made for tests."""

from __future__ import annotations

from pathlib import Path

# The keys and values of the demos (seeds 000, 001, 003), comments left out.
DEMO = """
JOB_NAME = "{name}_train"
SEQ_LEN = 2048
HIDDEN_SIZE = {hidden}
NUM_ATTENTION_HEAD = {heads}
MLP_RATIO = 8 / 3
NUM_LAYER = {layers}
VOCAB_SIZE = 103168
MODEL_ONLY_FOLDER = "local:llm_ckpts/xxxx"
SAVE_CKPT_FOLDER = "local:llm_ckpts"
LOAD_CKPT_FOLDER = "local:llm_ckpts/49"
CHECKPOINT_EVERY = 50
ckpt = dict(
    enable_save_ckpt=False,
    save_ckpt_folder=SAVE_CKPT_FOLDER,
    load_optimizer=True,
    checkpoint_every=CHECKPOINT_EVERY,
    async_upload=True,
    async_upload_tmp_folder="/dev/shm/internlm_tmp_ckpt/",
    snapshot_ckpt_folder="/".join([SAVE_CKPT_FOLDER, "snapshot"]),
    oss_snapshot_freq=int(CHECKPOINT_EVERY / 2),
)
TRAIN_FOLDER = "/path/to/dataset"
VALID_FOLDER = "/path/to/dataset"
data = dict(seq_len=SEQ_LEN, micro_num=4, micro_bsz=2, valid_micro_num=4, valid_every=50, pack_sample_into_one=False,
            total_steps=50000, skip_batches="", rampup_batch_size="", min_length=50)
grad_scaler = dict(fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000), growth_factor=2, backoff_factor=0.5,
                   max_scale=2**24, hysteresis=2)
hybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=True, reduce_bucket_size=512 * 1024 * 1024,
                             clip_grad_norm=1.0)
loss = dict(label_smoothing=0)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)
model = dict(checkpoint=False, num_attention_heads=NUM_ATTENTION_HEAD, embed_split_hidden=True, vocab_size=VOCAB_SIZE,
             embed_grad_scale=1, parallel_output=True, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYER, mlp_ratio=MLP_RATIO,
             apply_post_layer_norm=False, dtype="torch.float16", norm_type="rmsnorm", layer_norm_epsilon=1e-5,
             use_flash_attn=True, num_chunks=1)
\"\"\"
zero1 parallel: a comment in the form of a text.
\"\"\"
parallel = dict(zero1={zero}, {tensor}pipeline=dict(size=1, interleaved_overlap=True), sequence_parallel=False)
cudnn_deterministic = False
cudnn_benchmark = False
"""
SIZES = {
    "7b": (4096, 32, 32, 8, "", 8, 7_321_948_160, 64),
    "20b": (5120, 40, 60, -1, "tensor=4, ", 16, 20_089_943_040, 32),
    "30b": (6144, 48, 60, -1, "tensor=4, ", 16, 28_449_036_288, 32),
}


def demo(name: str) -> str:
    hidden, heads, layers, zero, tensor, *_ = SIZES[name]
    return DEMO.format(
        name=name, hidden=hidden, heads=heads, layers=layers, zero=zero, tensor=tensor
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "config.py"
    path.write_text(text)
    return path


# The keys and values of InternEvo's 7B_sft.py, of all its versions that are public, comments left
# out.
INTERNEVO_7B = """
JOB_NAME = "7b_train"
DO_ALERT = False
MODEL_ONLY_FOLDER = "local:llm_ckpts/xxxx"
SAVE_CKPT_FOLDER = "local:llm_ckpts"
CHECKPOINT_EVERY = 50
ckpt = dict(enable_save_ckpt=False, save_ckpt_folder=SAVE_CKPT_FOLDER, load_ckpt_folder="local:llm_ckpts/",
            load_ckpt_info=dict(path=MODEL_ONLY_FOLDER, content=("model",), ckpt_type="internevo"), auto_resume=True,
            checkpoint_every=CHECKPOINT_EVERY, async_upload=True, async_upload_tmp_folder="/dev/shm/internlm_tmp_ckpt/",
            oss_snapshot_freq=int(CHECKPOINT_EVERY / 2))
TRAIN_FOLDER = None
data = dict(seq_len=2048, micro_num=4, micro_bsz=2, valid_micro_num=4, valid_every=50, pack_sample_into_one=False,
            total_steps=50000, skip_batches="", rampup_batch_size="", min_length=50, train_folder=TRAIN_FOLDER,
            valid_folder=None, empty_cache_and_diag_interval=200, diag_outlier_ratio=1.1, valid_pack_mode=False,
            use_shm=False)
grad_scaler = dict(fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000), growth_factor=2, backoff_factor=0.5,
                   max_scale=2**24, hysteresis=2)
hybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=False, reduce_bucket_size=512 * 1024 * 1024,
                             clip_grad_norm=1.0, use_split_tensor_optim=False, all_gather_size=512 * 1024 * 1024)
loss = dict(label_smoothing=0)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)
use_fp32_norm = False
model = dict(checkpoint=False, num_attention_heads=32, num_kv_attention_heads=32, embed_split_hidden=True, vocab_size=103168,
             embed_grad_scale=1, parallel_output=True, hidden_size=4096, num_layers=32, mlp_ratio=8 / 3,
             apply_post_layer_norm=False, dtype="torch.bfloat16", norm_type="rmsnorm", layer_norm_epsilon=1e-5,
             use_flash_attn=True, qk_interleaved=False, num_chunks=1)
parallel = dict(zero1=dict(size=-1), tensor=dict(size=1, mode="mtp"), pipeline=dict(size=1, interleaved_overlap=True),
                weight=dict(size=1, overlap=True, memory_pool=True))
cudnn_deterministic = False
cudnn_benchmark = False
monitor = dict(alert=dict(enable_feishu_alert=DO_ALERT, feishu_alert_address=None, light_monitor_address=None,
                          alert_file_path=f"llm_alter/{JOB_NAME}_alert.log"), tensorboard=dict(queue_max_length=10))
"""
