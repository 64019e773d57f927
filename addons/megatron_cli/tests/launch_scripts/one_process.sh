#!/bin/sh
# POSIX sh; one process; the last command counts, and what is only printed does not.
: "${STEPS:=20}"
cmd="python pretrain_gpt.py --num-layers 99"
echo "$cmd"
test "$STEPS" -ge 10 && more="--eval-iters 1 --eval-interval 10" || more=
CUDA_VISIBLE_DEVICES=0 RANK=0 exec python3 ./pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --train-iters "$STEPS" --lr 1e-3 \
    --mock-data --vocab-size 100 $more
