#!/bin/sh
# InternLM's demos as it starts them, one task a GPU, two nodes of eight: examples/internlm/srun.sh 20b|30b [flags that win]
# May be set: NODES (2; 1 for 7b), TASKS (16; 8 for 7b), PER_NODE (8), PARTITION, PYTHON, ARGS (folder of the .args files).
set -eu
cd "$(dirname "$0")/../.."
model=${1:?give 7b, 20b or 30b}
shift
[ "$model" = 7b ] && nodes=1 tasks=8 || nodes=2 tasks=16
exec srun ${PARTITION:+-p "$PARTITION"} -N "${NODES:-$nodes}" -n "${TASKS:-$tasks}" --ntasks-per-node="${PER_NODE:-8}" \
    --gpus-per-task=1 --kill-on-bad-exit=1 \
    "${PYTHON:-$(command -v .venv/bin/python || echo python)}" pretrain_gpt.py "@${ARGS:-examples/internlm}/$model.args" "$@"
