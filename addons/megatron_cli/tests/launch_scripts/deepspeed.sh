#!/bin/bash
# Megatron-DeepSpeed: a configuration written by the script.
ZERO_STAGE=1
MICRO=4
config_json="./ds_config.json"
cat <<CONFIG > $config_json
{"train_micro_batch_size_per_gpu": $MICRO, "zero_optimization": {"stage": $ZERO_STAGE}, "bf16": {"enabled": true}}
CONFIG
ds_args=""
ds_args=" --deepspeed ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
if [ "${activation_checkpoint:-true}" = "true" ]; then
  ds_args="--deepspeed-activation-checkpointing ${ds_args}"
fi
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 2 --no-pipeline-parallel \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 \
  --micro-batch-size $MICRO --train-iters 100 --lr 1e-4 --bf16 --mock-data --vocab-size 50304 $ds_args
