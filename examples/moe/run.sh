#!/bin/sh
# A mixture of experts and a dense model with as many active parameters, trained on the same text with the
# same flags, on four ranks each; the experts over two of them. Each command is printed before it runs.
# Arguments of this script go to both training commands:
#   examples/moe/run.sh --train-iters 2000
# Environment variables: PYTHON, MOE_DIR (runs/moe; an earlier run's results in it are removed), NPROC (4).
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
out=${MOE_DIR:-runs/moe}
data=$out/data

say() { printf '\n== %s\n' "$1"; }
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
# train NAME FLAGS: the model NAME in $out/NAME
train() {
    name=$1
    shift
    rm -rf "${out:?}/$name"
    mkdir -p "$out/$name"
    run "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "${NPROC:-4}" \
        pretrain_gpt.py @examples/quickstart/gpt.args --ffn-hidden-size 384 --use-distributed-optimizer \
        --micro-batch-size 4 --global-batch-size 16 --train-iters 300 --eval-interval 25 --save-interval 300 \
        --data-path "$data/shakespeare_text_document" --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" \
        --save "$out/$name/checkpoints" --metrics-file "$out/$name/metrics.jsonl" "$@"
}

say "1. Text, tokenizer and token ids of examples/quickstart"
DATA=$data PYTHON=$python run sh examples/parallel/prepare.sh

say "2. The dense model"
train dense "$@"

say "3. The mixture of experts"
# Two of eight experts, each half as wide as the dense MLP, compute a token: as many active parameters, but for the
# routers. Two ranks share the experts of each layer; two such pairs have the same ones.
train moe --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 192 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-per-layer-logging \
    --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "$@"

say "4. Both curves, and the experts' load"
run "$python" examples/moe/draw.py "$out/dense" "$out/moe" --data "$data/shakespeare_text_document" --output "$out/moe.png"

say "What next"
cat <<TEXT
picture        $out/moe.png
generate       $python tools/generate.py $out/moe/checkpoints "HAMLET" --max-new-tokens 100
all flags      docs/moe.md
TEXT
