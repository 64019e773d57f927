#!/bin/sh
# The main job in small: real text, real vocabulary, training, a resume, a sample. Each command is printed before it
# runs. Words given to this script go to every training command: examples/quickstart/run.sh --train-iters 1000
# May be set: PYTHON, QUICKSTART_DIR (runs/quickstart; what an earlier run trained there is removed) and
# QUICKSTART_STOP (300), the iteration at which the first part of the training stops.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
out=${QUICKSTART_DIR:-runs/quickstart}
data=$out/data
stop=${QUICKSTART_STOP:-300}

say() { printf '\n== %s\n' "$1"; }
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
# The same, with a copy in $out/log.txt.
run_logged() {
    printf '\n$ %s\n' "$*" | tee -a "$out/log.txt"
    { "$@" 2>&1 && echo 0 >"$out/status" || echo $? >"$out/status"; } | tee -a "$out/log.txt"
    return "$(cat "$out/status")"
}
validation_loss() { # first or last, out of the log
    awk -F ' \\| loss ' '/^ validation at iteration/ { print $2 + 0 }' "$out/log.txt" | "$1" -n 1
}

mkdir -p "$data"
say "1. Text and vocabulary: 38 plays of Shakespeare, GPT-2's vocab.json and merges.txt"
run "$python" tools/fetch_quickstart_data.py "$data"

say "2. Text to token ids: $data/shakespeare_text_document.bin and .idx"
run "$python" tools/preprocess_data.py --input "$data/shakespeare.jsonl" --output-prefix "$data/shakespeare" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$data/gpt2-vocab.json" --merge-file "$data/gpt2-merges.txt" \
    --append-eod --workers 2

run rm -rf "$out/checkpoints" "$out/tensorboard" "$out/metrics.jsonl" "$out/log.txt"
set -- "$python" pretrain_gpt.py @examples/quickstart/gpt.args --data-path "$data/shakespeare_text_document" \
    --vocab-file "$data/gpt2-vocab.json" --merge-file "$data/gpt2-merges.txt" --save "$out/checkpoints" \
    --tensorboard-dir "$out/tensorboard" --metrics-file "$out/metrics.jsonl" "$@"

say "3. What a model that learned nothing knows: a loss near ln(50257) = 10.8"
run_logged "$@" --skip-train

say "4. Train; stop at iteration $stop, as a machine might"
run_logged "$@" --exit-interval "$stop"

say "5. The same command with --load goes on where that stopped"
run_logged "$@" --load "$out/checkpoints"

say "6. Let it talk"
run "$python" tools/generate.py "$out/checkpoints" "ROMEO" --max-new-tokens 80 --temperature 0.8 --top-p 0.9 --seed 1

say "What now"
cat <<TEXT
learned        validation loss $(validation_loss head) before training, $(validation_loss tail) now
checkpoints    $out/checkpoints (the newest: iteration $(cat "$out/checkpoints/latest_checkpointed_iteration.txt"))
all numbers    $out/metrics.jsonl, one JSON object an iteration; all that was printed: $out/log.txt
curves         $python -m tensorboard.main --logdir $out/tensorboard
talk           $python tools/generate.py $out/checkpoints "JULIET"
train on       the command of step 5 with --train-iters 1000 --override-opt_param-scheduler
two processes  the same command, $(dirname "$python")/torchrun --nproc-per-node 2 in place of $python: the same losses to rounding
your own text  one {"text": "..."} a line: step 2 and the command of step 4 with it
a real model   examples/gpt2_345m
TEXT
