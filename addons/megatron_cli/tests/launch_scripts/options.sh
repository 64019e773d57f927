#!/bin/bash
# Options of its own.
BATCH=8
EXTRA=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --batch) BATCH="$2"; shift 2 ;;
        --fast) EXTRA+=(--bf16); shift ;;
        --) shift; break ;;
        *) EXTRA+=("$1"); shift ;;
    esac
done
NAME=$(basename "/models/gpt.small")
NAME=${NAME%.small}
NAME=${NAME^^}
RUN_DIR="runs/${NAME//T/t}"
if [[ $BATCH =~ ^[0-9]+$ && ! -z $NAME ]]; then
    BATCH_FLAGS="--micro-batch-size $BATCH"
fi
nohup torchrun --standalone --nproc_per_node 2 pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 \
    --seq-length 128 --max-position-embeddings 128 $BATCH_FLAGS --train-iters 20 --lr 1e-3 --mock-data --vocab-size 100 \
    "${EXTRA[@]}" --save "$RUN_DIR" --save-interval 10 > log.txt 2>&1 &
wait
