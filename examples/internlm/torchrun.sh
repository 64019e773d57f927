#!/bin/sh
# InternLM's demos on the GPUs of this node, or of two: examples/internlm/torchrun.sh 7b|20b|30b [flags that win over the file]
# The 20b and 30b demos are laid out for 16 ranks; on the first of two nodes: NNODES=2 NODE_RANK=0 MASTER_ADDR=... (and
# NODE_RANK=1 on the other). May be set too: NPROC (ranks of a node, 8), PYTHON, ARGS (folder of the .args files).
set -eu
cd "$(dirname "$0")/../.."
model=${1:?give 7b, 20b or 30b}
shift
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "${NPROC:-8}" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    pretrain_gpt.py "@${ARGS:-examples/internlm}/$model.args" "$@"
