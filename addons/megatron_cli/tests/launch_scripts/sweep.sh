#!/bin/bash
# A learning rate after the other; the last one is the one that is read.
for lr in 1e-4 2e-4 4e-4
do
    name="lr-$lr"
    CMD="torchrun --nproc_per_node 2 pretrain_gpt.py \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
        --micro-batch-size 4 --train-iters 20 --mock-data --vocab-size 100 --lr $lr --data-cache-path cache/$name"
    echo $CMD
    eval $CMD
done
