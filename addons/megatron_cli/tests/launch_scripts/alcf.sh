#!/bin/bash --login
# PBS; what counts the hosts is given: NGPUS=24.
#PBS -l select=2
cd "${PBS_O_WORKDIR:-.}" || exit
HERE=$(pwd)
setup() {
    export TP="${TP:-2}"
    export MICRO="${MICRO:-1}"
    [ "${USE_FLASH:-1}" == "1" ] && FLASH_ARG="--use-flash-attn" || FLASH_ARG=""
}
setup
run=(
    mpiexec --envall -n "${NGPUS}" --ppn 12 --depth=8 python3 pretrain_gpt.py
    "--tensor-model-parallel-size=${TP}" "${FLASH_ARG}"
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024
    "--micro-batch-size=${MICRO}" --train-iters 100 --lr 1e-4 --bf16 --mock-data --vocab-size 50304
)
"${run[@]}" |& tee run.log
