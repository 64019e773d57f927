#!/bin/sh
# Eight ranks on one machine, a laptop too: two stages, each layer split over two ranks, two replicas of that, which share
# the optimizer's state. Trains on the quickstart's text, evaluates, saves; run again, it resumes from the last checkpoint.
# May be set: NPROC (8), LAYOUT (the flags that split the work), DATA, OUT (runs/parallel), PYTHON.
# Words given to this script win over the flags below: examples/parallel/one_node.sh --exit-interval 50
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
data=${DATA:-runs/quickstart/data}
out=${OUT:-runs/parallel}
: "${LAYOUT=--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer}"

DATA=$data PYTHON=$python sh examples/parallel/prepare.sh
mkdir -p "$out"
exec "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "${NPROC:-8}" \
    pretrain_gpt.py @examples/quickstart/gpt.args $LAYOUT \
    --micro-batch-size 1 --global-batch-size 8 \
    --train-iters 100 --lr-warmup-iters 20 --save-interval 50 --eval-interval 50 --log-interval 5 \
    --data-path "$data/shakespeare_text_document" \
    --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" \
    --save "$out/checkpoints" --load "$out/checkpoints" --metrics-file "$out/metrics.jsonl" \
    "$@"
