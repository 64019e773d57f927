"""The command lines that were published of DeepSeek-V3, Kimi K2, Moonlight and GLM-4.7-Flash dry-run as
they are, with the published numbers of parameters (without heads for later tokens).

Sources, read on 2026-11-30: yanring/Megatron-MoE-ModelZoo, model_configs/benchmarking/DeepSeek-V3.yaml
(31942f09) with the values of runtime_configs/benchmarking/runtime.conf and what its script adds for
DISPATCHER=deepep; slime, scripts/models/{kimi-k2,moonlight}.sh (34bba0b8, e0be9a07) and
glm4.7-30B-A3B.sh, which say the model alone. Data and tokenizer are ours, and paths are left out."""

import re

import pytest

import pretrain_gpt
from megatron.arguments import config_from, parse_typed
from megatron.config import command_line
from megatron.config.checks import rules
from megatron.config.plan.plan import make_plan
from megatron.features.registry import RunConfig

DEEPSEEK = """--distributed-timeout-minutes 60 --tensor-model-parallel-size 1
--pipeline-model-parallel-size 16 --expert-model-parallel-size 64 --context-parallel-size 1
--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --use-mcore-models --sequence-parallel --use-flash-attn
--disable-bias-linear --micro-batch-size 1 --global-batch-size 8192 --train-samples 585937500
--exit-duration-in-mins 220 --no-save-optim --no-check-for-nan-in-loss-and-grad
--cross-entropy-loss-fusion --cross-entropy-fusion-impl native --manual-gc --manual-gc-interval 10
--transformer-impl transformer_engine --seq-length 4096 --split 99,1,0 --no-mmap-bin-files
--no-create-attention-mask-in-dataloader --num-workers 6 --num-layers 61 --hidden-size 7168
--ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --max-position-embeddings 4096
--position-embedding-type rope --rotary-base 10000 --make-vocab-size-divisible-by 3232
--normalization RMSNorm --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights
--multi-latent-attention --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0
--weight-decay 0.1 --qk-layernorm --lr-decay-samples 584765624 --lr-warmup-samples 1536000
--lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine --adam-beta1 0.9
--adam-beta2 0.95 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss
--moe-router-topk 8 --moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4
--moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32
--moe-permute-fusion --moe-router-fusion --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0
--mscale-all-dim 1.0 --eval-iters 32 --eval-interval 200 --no-load-optim --no-load-rng
--auto-detect-ckpt-format --save-interval 500 --dist-ckpt-strictness log_all --init-method-std 0.02
--log-timers-to-tensorboard --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard
--log-throughput --log-interval 1 --logging-level 40 --bf16 --enable-experimental
--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 1
--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep
--mock-data --tokenizer-type NullTokenizer --vocab-size 129280"""
SLIME = """--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --vocab-size 163840 --multi-latent-attention
--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
--rotary-base 50000 --mscale 1.0 --mscale-all-dim 1.0 --attention-softmax-in-fp32 --no-rope-fusion
--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall
--moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0 --moe-router-group-topk 1
--moe-router-num-groups 1 --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion
--mock-data --tokenizer-type NullTokenizer --bf16 --micro-batch-size 1 --global-batch-size 1024
--train-iters 100 --lr 1e-4 --seq-length 4096 --max-position-embeddings 8192"""
MODELS = {
    "DeepSeek-V3": (DEEPSEEK, 671.0),
    "Kimi K2": (
        f"""{SLIME} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
        --num-attention-heads 64 --kv-channels 64 --norm-epsilon 1e-6 --q-lora-rank 1536
        --rotary-scaling-factor 32.0 --num-experts 384 --moe-layer-freq [0{",1" * 60}]
        --moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-shared-expert-intermediate-size 2048
        --moe-router-topk-scaling-factor 2.827""",
        1026.4,
    ),
    "Moonlight": (
        f"""{SLIME} --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264
        --num-attention-heads 16 --kv-channels 128 --norm-epsilon 1e-5 --rotary-percent 1.0
        --no-masked-softmax-fusion --rotary-scaling-factor 1 --num-experts 64
        --moe-layer-freq [0{",1" * 26}] --moe-ffn-hidden-size 1408 --moe-router-topk 6
        --moe-shared-expert-intermediate-size 2816 --moe-router-topk-scaling-factor 2.446
        --moe-token-drop-policy probs""",
        15.96,
    ),
    "GLM-4.7-Flash": (
        """--moe-layer-freq [0]*1+[1]*46 --num-experts 64
        --moe-shared-expert-intermediate-size 1536 --moe-router-topk 4 --moe-grouped-gemm
        --moe-permute-fusion --moe-ffn-hidden-size 1536 --moe-router-score-function sigmoid
        --moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
        --moe-router-load-balancing-type seq_aux_loss --moe-router-topk-scaling-factor 1.8
        --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --make-vocab-size-divisible-by 64
        --num-layers 47 --hidden-size 2048 --ffn-hidden-size 10240 --num-attention-heads 20
        --disable-bias-linear --add-qkv-bias --swiglu --untie-embeddings-and-output-weights
        --position-embedding-type rope --no-position-embedding --normalization RMSNorm
        --qk-layernorm --multi-latent-attention --q-lora-rank 768 --kv-lora-rank 512
        --qk-head-dim 192 --v-head-dim 256 --kv-channels 192 --qk-pos-emb-head-dim 64
        --vocab-size 154880 --rotary-base 1000000 --no-rope-fusion --mock-data
        --tokenizer-type NullTokenizer --bf16 --micro-batch-size 1 --global-batch-size 1024
        --train-iters 100 --lr 1e-4 --seq-length 4096 --max-position-embeddings 8192""",
        29.943,
    ),
}
WORLD = 1024


def by_hand(m, vocab: int) -> tuple[int, int]:
    """All parameters, and those that a token is computed with."""
    h, heads, q = m.hidden_size, m.num_attention_heads, m.q_lora_rank
    head, latent, value = m.qk_head_dim + 64, 512, m.v_head_dim
    queries = h * heads * head if q is None else h * q + q + q * heads * head
    attention = queries + h * (latent + 64) + latent + heads * value * h
    attention += latent * heads * (m.qk_head_dim + value)
    expert = 3 * h * m.moe_ffn_hidden_size
    shared = 3 * h * m.moe_shared_expert_intermediate_size + m.num_experts * (h + 1)
    sparse = len(m.moe_layers)
    total = 2 * vocab * h + h + m.num_layers * (attention + 2 * h)
    total += (m.num_layers - sparse) * 3 * h * m.ffn_hidden_size
    every, active = (
        total + sparse * (shared + n * expert) for n in (m.num_experts, m.moe_router_topk)
    )
    return every, active


@pytest.mark.parametrize("name", MODELS)
def test_published_numbers_of_parameters(name):
    line, billions = MODELS[name]
    typed = parse_typed(command_line.parser(RunConfig), line.split())
    config = config_from(RunConfig, typed)
    assert rules.problems(config, WORLD, typed) == []
    plan = make_plan(config, WORLD, config.data.vocab_size)
    assert (plan.num_parameters, plan.num_active) == by_hand(config.model, plan.vocab_size)
    assert plan.num_parameters / 1e9 == pytest.approx(billions, rel=1e-4)


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
def test_published_command_lines_dry_run(name, capfd):
    line, billions = MODELS[name]
    pretrain_gpt.main([*line.split(), "--dry-run", "--world-size", str(WORLD)])
    (count,) = re.findall(r" model +([\d,]+) parameters", capfd.readouterr().out)
    assert int(count.replace(",", "")) / 1e9 == pytest.approx(billions, rel=1e-4)
