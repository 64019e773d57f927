#!/bin/bash
NP=${NP:-16}
LAYERS=(12 24 48)
SEQ=2048
export OMP_NUM_THREADS=4
mpirun -np $NP --map-by ppr:8:node -x OMP_NUM_THREADS -x PATH numactl --localalloc python3 pretrain_gpt.py \
    --num-layers ${LAYERS[1]} --hidden-size $((${#LAYERS[@]} * 512)) --num-attention-heads 24 \
    --seq-length $SEQ --max-position-embeddings ${SEQ} --micro-batch-size 1 --train-iters 50 --lr 1e-4 \
    --context-parallel-size 2 --mock-data --vocab-size 50304 --bf16
