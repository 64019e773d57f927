#!/bin/bash
# Llama 3 8B in FP8 on one node: arrays with comments, parameters with defaults, a guard.
SAVE=${1:-"out/llama3"}
TOKENIZER=${2:-"MOCK"}  # a model's folder, or "MOCK"
NODE_GPUS=8
NODES=1
PRECISION="fp8"
ENTRY="pretrain_gpt.py"
mkdir -p "$(dirname "$SAVE")"
RENDEZVOUS=(--nproc_per_node $NODE_GPUS --nnodes $NODES --node_rank ${NODE_RANK:-0}
    --master_addr ${MASTER_ADDR:-localhost} --master_port ${MASTER_PORT:-6000})
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000  # Llama 3's
    --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAIN=(
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1000000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --clip-grad 1.0
    --bf16 --manual-gc --empty-unused-memory-level 1
)
PRECISION_FLAGS=()
if [[ "$PRECISION" == "fp8" ]]; then
    PRECISION_FLAGS+=("--fp8-format hybrid" "--fp8-amax-history-len 1024" "--fp8-amax-compute-algo max")
elif [[ "$PRECISION" == "fp16" ]]; then
    PRECISION_FLAGS+=(--fp16)
fi
TRAIN+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
if [[ "$TOKENIZER" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    DATA=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    DATA=("--data-path $TOKENIZER.data" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER")
fi
if [ ! -f "$ENTRY" ]; then
    echo "error: pretrain_gpt.py is not at $ENTRY"
    exit 1
fi
echo "starting pretrain_gpt.py"
torchrun ${RENDEZVOUS[@]} \
    "$ENTRY" \
    ${MODEL[@]} \
    ${TRAIN[@]} \
    ${PRECISION_FLAGS[@]} \
    --tensor-model-parallel-size 1 --sequence-parallel \
    ${DATA[@]} \
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --save "$SAVE" --load "$SAVE"
