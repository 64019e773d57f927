#!/bin/sh
# From a pretrained model to one that answers: conversations to tokens with a loss mask, fine-tuning,
# and a chat. It starts from the model of examples/quickstart. Each command is printed before it runs.
# Arguments of this script go to the training command:
#   examples/chat/run.sh --train-iters 800
# Environment variables: PYTHON, QUICKSTART_DIR (runs/quickstart), CHAT_DIR (runs/chat; an earlier
# run's results in it are removed).
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
base=${QUICKSTART_DIR:-runs/quickstart}
out=${CHAT_DIR:-runs/chat}

say() { printf '\n== %s\n' "$1"; }
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

if [ ! -e "$base/checkpoints/latest_checkpointed_iteration.txt" ]; then
    echo "error: $base has no checkpoint; run examples/quickstart/run.sh first (or set QUICKSTART_DIR)" >&2
    exit 2
fi
vocabulary="--vocab-file $base/data/vocab.json --merge-file $base/data/merges.txt"
mkdir -p "$out"

say "1. Conversations to token ids with a loss mask; zephyr is a template that needs no special tokens of its own"
# shellcheck disable=SC2086 # several words
run "$python" tools/preprocess_data.py --input examples/chat/conversations.jsonl --output-prefix "$out/shakespeare" \
    --chat --chat-template zephyr --tokenizer-type GPT2BPETokenizer $vocabulary --overwrite

say "2. What is trained: the assistant's turns, each with its end token"
# shellcheck disable=SC2086
run "$python" tools/inspect_data.py show "$out/shakespeare_chat_document" --document 4 \
    --tokenizer-type GPT2BPETokenizer $vocabulary

say "3. Fine-tune"
rm -rf "$out/checkpoints" "$out/metrics.jsonl"
# The shape of the model comes from the checkpoint. With --pad-samples each conversation starts a sequence of its own.
# shellcheck disable=SC2086
run "$python" pretrain_gpt.py --load "$base/checkpoints" --finetune --use-checkpoint-args \
    --packed-samples --pad-samples --train-data-path "$out/shakespeare_chat_document" --seq-length 128 $vocabulary \
    --micro-batch-size 4 --global-batch-size 8 --train-iters 300 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine \
    --lr-warmup-iters 10 --adam-beta2 0.95 --weight-decay 0.1 --eval-iters 0 --num-workers 0 \
    --save "$out/checkpoints" --save-interval 300 --metrics-file "$out/metrics.jsonl" --log-interval 50 "$@"

say "4. Chat: two questions, the second about the first answer"
printf 'Is Hamlet a comedy or a tragedy?\nAnd where is it set?\n' >"$out/questions.txt"
printf '\n$ %s\n' "$python tools/generate.py $out/checkpoints --chat --chat-template zephyr --temperature 0 <$out/questions.txt"
"$python" tools/generate.py "$out/checkpoints" --chat --chat-template zephyr --temperature 0 \
    --max-new-tokens 40 <"$out/questions.txt"

say "What next"
cat <<TEXT
chat           $python tools/generate.py $out/checkpoints --chat --chat-template zephyr --temperature 0
your own data  docs/data.md, "Chat data"
evaluate       $python tools/evaluate.py $out/checkpoints FILE (docs/evaluation.md)
TEXT
