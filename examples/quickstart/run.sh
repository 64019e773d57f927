#!/bin/sh
# The main job in small: real text, real vocabulary, training, a resume, a sample. Each command is printed before it runs.
# Extra words go to every training command: examples/quickstart/run.sh --train-iters 300
# May be set: PYTHON, QUICKSTART_DIR (runs/quickstart; what an earlier run trained there is removed) and
# QUICKSTART_STOP (100), the iteration at which the first part of the training stops.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
out=${QUICKSTART_DIR:-runs/quickstart}
data=$out/data
stop=${QUICKSTART_STOP:-100}
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
say() { printf '\n== %s\n' "$1"; }

say "1. Text and vocabulary: 38 plays of Shakespeare, GPT-2's vocab.json and merges.txt"
run "$python" tools/fetch_quickstart_data.py "$data"

say "2. Text to token ids: $data/shakespeare_text_document.bin and .idx"
run "$python" tools/preprocess_data.py --input "$data/shakespeare.jsonl" --output-prefix "$data/shakespeare" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$data/gpt2-vocab.json" --merge-file "$data/gpt2-merges.txt" \
    --append-eod --workers 2

run rm -rf "$out/checkpoints" "$out/tensorboard" "$out/metrics.jsonl"
set -- "$python" pretrain_gpt.py @examples/quickstart/gpt.args --data-path "$data/shakespeare_text_document" \
    --vocab-file "$data/gpt2-vocab.json" --merge-file "$data/gpt2-merges.txt" --save "$out/checkpoints" \
    --tensorboard-dir "$out/tensorboard" --metrics-file "$out/metrics.jsonl" "$@"

say "3. What a model that learned nothing knows: a loss near ln(50257) = 10.8"
run "$@" --skip-train

say "4. Train; stop at iteration $stop, as a machine might"
run "$@" --exit-interval "$stop"

say "5. The same command with --load goes on where that stopped"
run "$@" --load "$out/checkpoints"

say "6. Let it talk"
run "$python" tools/generate.py "$out/checkpoints" "ROMEO:" --max-new-tokens 80 --temperature 0.8 --top-p 0.9 --seed 1

say "What now"
cat <<TEXT
checkpoints    $out/checkpoints (the newest: iteration $(cat "$out/checkpoints/latest_checkpointed_iteration.txt"))
every number   $out/metrics.jsonl, one JSON object per iteration
pictures       $python -m tensorboard.main --logdir $out/tensorboard
talk           $python tools/generate.py $out/checkpoints "JULIET:"
train on       repeat the command of step 5 with --train-iters 300 --override-opt_param-scheduler
two processes  ${python%/*}/torchrun --nproc-per-node 2 pretrain_gpt.py and the rest of that command: the same losses
your text      one {"text": "..."} a line; repeat step 2 with it, then step 4
a real model   examples/gpt2_345m
TEXT
