#!/usr/bin/env bash
# Sizes by case, flags by functions.
SIZE="${1:-small}"
add() {
    FLAGS+=("$@")
}
parallel() {
    local tp=$1 pp=${2:-1}
    add --tensor-model-parallel-size $tp --pipeline-model-parallel-size $pp
}
FLAGS=()
declare -A HEADS_OF=([768]=12 [2048]="16")
HEADS_OF[4096]=32
case "$SIZE" in
    small|125m) LAYERS=12; HIDDEN=768; parallel 1 ;;
    1b)
        LAYERS=24 HIDDEN=2048
        parallel 2
        ;;
    *) echo "unknown size $SIZE" >&2; exit 2 ;;
esac
for flag in --swiglu --disable-bias-linear; do
    add "$flag"
done
if (( LAYERS > 12 )); then add --recompute-activations; fi
HEADS=${HEADS_OF[$HIDDEN]}
function launch {
    torchrun --nproc-per-node=4 "$@"
}
launch pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS \
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 --train-iters 100 --lr 1e-4 \
    --mock-data --vocab-size 50304 --bf16 "${FLAGS[@]}"
