#!/bin/sh
# The run of one_node.sh on two machines with four ranks each; start it on both, with the number of the machine and the
# address of the first:
#   first machine:  examples/parallel/two_nodes.sh 0 10.0.0.1
#   second machine: examples/parallel/two_nodes.sh 1 10.0.0.1
# Text ($DATA, made by prepare.sh) and checkpoints ($OUT) are in a directory that both see under the same name.
# May be set, alike on both: NPROC (4), LAYOUT, DATA, OUT (runs/parallel), MASTER_PORT (29500), PYTHON.
# Words after the address win over the flags below.
set -eu
[ $# -ge 2 ] || { echo "usage: two_nodes.sh NUMBER_OF_THIS_MACHINE ADDRESS_OF_THE_FIRST [flags]" >&2; exit 2; }
node=$1 first=$2
shift 2
cd "$(dirname "$0")/../.."
data=${DATA:-runs/quickstart/data}
out=${OUT:-runs/parallel}
python=${PYTHON:-$(command -v .venv/bin/python || echo python)} port=${MASTER_PORT:-29500}
: "${LAYOUT=--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer}"

[ "$node" != 0 ] || "$python" -c "import socket; socket.create_server(('', $port)).close()" 2>/dev/null ||
    { echo "error: port $port of this machine is in use: set another MASTER_PORT on both" >&2; exit 1; }
mkdir -p "$out"
exec "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node "${NPROC:-4}" \
    --node-rank "$node" --master-addr "$first" --master-port "$port" \
    pretrain_gpt.py @examples/quickstart/gpt.args $LAYOUT \
    --micro-batch-size 1 --global-batch-size 8 \
    --train-iters 100 --lr-warmup-iters 20 --save-interval 50 --eval-interval 50 --log-interval 5 \
    --data-path "$data/shakespeare_text_document" \
    --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" \
    --save "$out/checkpoints" --load "$out/checkpoints" --metrics-file "$out/metrics.jsonl" \
    "$@"
