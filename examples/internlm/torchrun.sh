#!/bin/sh
# InternLM's demos on the GPUs of this node, or of two: examples/internlm/torchrun.sh 7b|20b|30b [flags that win over the file]
# The 20b and 30b demos are laid out for 16 ranks; on the first of two nodes: NNODES=2 NODE_RANK=0 MASTER_ADDR=... (and
# NODE_RANK=1 on the other; MASTER_PORT, 29500, on both). One node takes a free port.
# May be set too: NPROC (ranks per node, 8), PYTHON, ARGS (folder of the .args files).
set -eu
cd "$(dirname "$0")/../.."
model=${1:?give 7b, 20b or 30b}
shift
python=${PYTHON:-$(command -v .venv/bin/python || echo python)} port=${MASTER_PORT:-29500}
meeting="--standalone --local-addr 127.0.0.1"
if [ "${NNODES:-1}" != 1 ]; then
    meeting="--nnodes $NNODES --node-rank ${NODE_RANK:-0} --master-addr ${MASTER_ADDR:?give the first node's address}"
    meeting="$meeting --master-port $port"
    [ "${NODE_RANK:-0}" != 0 ] || "$python" -c "import socket; socket.create_server(('', $port)).close()" 2>/dev/null ||
        { echo "error: port $port of this machine is in use: set another MASTER_PORT on all nodes" >&2; exit 1; }
fi
exec "$python" -m torch.distributed.run $meeting --nproc-per-node "${NPROC:-8}" \
    pretrain_gpt.py "@${ARGS:-examples/internlm}/$model.args" "$@"
