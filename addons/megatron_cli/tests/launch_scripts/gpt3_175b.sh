#!/bin/bash
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-128}
WORLD_SIZE=$((GPUS_PER_NODE * NUM_NODES))
TP=8; PP=16
CHECKPOINTS=$1
VOCAB=$2/gpt2-vocab.json
MERGES=${2%/}/gpt2-merges.txt
DATA_PATH="$3"

torchrun --nproc_per_node ${GPUS_PER_NODE} --nnodes ${NUM_NODES} pretrain_gpt.py \
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 1 --global-batch-size $((WORLD_SIZE / (TP * PP) * 192)) \
    --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 \
    --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 \
    --lr-decay-iters 430000 --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
    --data-path ${DATA_PATH} --vocab-file $VOCAB --merge-file $MERGES --split 949,50,1 \
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --save $CHECKPOINTS --load $CHECKPOINTS \
    --eval-iters 10 --data-cache-path "${CHECKPOINTS}/cache" 2>&1 | tee -a train.log
