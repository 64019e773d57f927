#!/bin/sh
# The walk-through's second half: GPT-2 345M, its flags unchanged but for the backend. Run preprocess.sh first.
# Run again, it resumes from the last checkpoint in the work folder ($WORK): --save and --load are the same place.
# May be set: WORK (runs/gpt2_345m), PYTHON, DISTRIBUTED_BACKEND (nccl with an NVIDIA GPU, else gloo), MASTER_PORT (a
# free port otherwise, so that several runs on one machine do not collide).
# Extra words win over the flags below: examples/gpt2_345m/train.sh --train-iters 2 --initial-loss-scale 65536
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "${WORK:-$root/runs/gpt2_345m}"
if command -v nvidia-smi >/dev/null 2>&1; then backend=nccl; else backend=gloo; fi

meeting="--standalone --local_addr 127.0.0.1"
[ -z "${MASTER_PORT:-}" ] || meeting="--node_rank 0 --master_addr localhost --master_port $MASTER_PORT"

export CUDA_DEVICE_MAX_CONNECTIONS=1
export LOCAL_RANK=0

exec "${PYTHON:-$(command -v "$root/.venv/bin/python" || echo python)}" -m torch.distributed.launch \
    --nproc_per_node 1 \
    --nnodes 1 \
    $meeting \
    "$root/pretrain_gpt.py" \
    --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 1 \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --micro-batch-size 4 \
    --global-batch-size 8 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --train-iters 1000 \
    --lr-decay-iters 320000 \
    --save ./checkpoints/gpt-2 \
    --load ./checkpoints/gpt-2 \
    --data-path ./data/meg-gpt2_text_document \
    --vocab-file ./data/gpt2-vocab.json \
    --merge-file ./data/gpt2-merges.txt \
    --split 949,50,1 \
    --distributed-backend "${DISTRIBUTED_BACKEND:-$backend}" \
    --lr 0.00015 \
    --lr-decay-style cosine \
    --min-lr 1.0e-5 \
    --weight-decay 1e-2 \
    --clip-grad 1.0 \
    --lr-warmup-fraction .01 \
    --recompute-activations \
    --log-interval 10 \
    --save-interval 1 \
    --eval-interval 1 \
    --eval-iters 10 \
    --fp16 \
    --log-format megatron \
    "$@"
