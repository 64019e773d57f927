#!/bin/sh
# A model with a tool: a tiny model is trained to call a tool in the form of Lagent's ReAct, served, and asked by
# Lagent (make serve && .venv/bin/pip install lagent==0.2.4). Each command is printed before it runs.
# Arguments of this script go to the training command:
#   examples/lagent/run.sh --train-iters 2000
# Environment variables: PYTHON, LAGENT_DIR (runs/lagent; an earlier run's results in it are removed), SEED (of the
# numbers that the tool knows: 7).
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
out=${LAGENT_DIR:-runs/lagent}

say() { printf '\n== %s\n' "$1"; }
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

for module in fastapi uvicorn lagent; do
    if ! "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)"; then
        echo "error: $module is not installed; run: make serve && .venv/bin/pip install lagent==0.2.4" >&2
        exit 2
    fi
done
vocabulary="--vocab-file $out/data/vocab.json --merge-file $out/data/merges.txt"
mkdir -p "$out/data"

say "1. Conversations: a question, a call of the tool, its result, the answer"
run "$python" examples/lagent/agent.py data "$out/data"
sed -n 1p "$out/data/calls.jsonl"

say "2. A tokenizer of their words and numbers"
run "$python" tools/train_tokenizer.py --input "$out/data/text.jsonl" --vocab-size 640 --output-dir "$out/data" --overwrite

say "3. Token ids with a loss mask: the model learns the assistant's turns alone"
# shellcheck disable=SC2086 # several words
run "$python" tools/preprocess_data.py --input "$out/data/calls.jsonl" --output-prefix "$out/data/calls" \
    --chat --chat-template zephyr --tokenizer-type GPT2BPETokenizer $vocabulary --overwrite
# shellcheck disable=SC2086
run "$python" tools/inspect_data.py show "$out/data/calls_chat_document" --document 0 \
    --tokenizer-type GPT2BPETokenizer $vocabulary

say "4. Train"
rm -rf "$out/checkpoints" "$out/metrics.jsonl"
# Large initial values let so narrow a model learn within 300 iterations to copy what the tool said.
# shellcheck disable=SC2086
run "$python" pretrain_gpt.py --packed-samples --pad-samples --train-data-path "$out/data/calls_chat_document" $vocabulary \
    --num-layers 2 --hidden-size 96 --num-attention-heads 4 --seq-length 96 --max-position-embeddings 256 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --init-method-std 0.1 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 16 --global-batch-size 16 --train-iters 300 \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --adam-beta2 0.95 --weight-decay 0.01 \
    --eval-iters 0 --num-workers 0 --save "$out/checkpoints" --save-interval 10000 --metrics-file "$out/metrics.jsonl" \
    --log-interval 50 "$@"

say "5. Serve it, and ask by Lagent; what the tool says is in no conversation"
printf '\n$ %s\n' "$python tools/serve.py $out/checkpoints --port 0 --served-model-name internlm-stock --chat-template zephyr &"
"$python" tools/serve.py "$out/checkpoints" --port 0 --served-model-name internlm-stock --chat-template zephyr \
    2>"$out/server.log" &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
url=
while [ -z "$url" ] && kill -0 $server 2>/dev/null; do
    url=$(sed -n 's/.* at \(http:[^ ]*\) .*/\1/p' "$out/server.log")
    [ -n "$url" ] || sleep 0.2
done
if [ -z "$url" ]; then
    cat "$out/server.log" >&2
    exit 1
fi
run "$python" examples/lagent/agent.py ask "$url" --seed "${SEED:-7}"
kill $server
wait $server
trap - EXIT
