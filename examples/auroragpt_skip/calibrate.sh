#!/bin/sh
# Six healthy runs of 2,000 iterations, two kinds of text, and what the spike detector flags in them
# (docs/features/spikes.md). A run takes some two minutes of one core.
# May be set: PYTHON, DATA, RUNS (runs/auroragpt_skip/healthy). Words given to this script go to every run.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
data=${DATA:-runs/auroragpt_skip/data}
runs=${RUNS:-runs/auroragpt_skip/healthy}
DATA=$data examples/auroragpt_skip/prepare.sh
mkdir -p "$runs"
healthy() { # name, text, learning rate, seed
    name=$1 text=$2 lr=$3 seed=$4
    shift 4
    rm -f "$runs/$name.jsonl"
    "$python" pretrain_gpt.py @examples/auroragpt_skip/small.args --data-path "$data/${text}_text_document" \
        --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" --lr "$lr" --seed "$seed" \
        --metrics-file "$runs/$name.jsonl" "$@" >"$runs/$name.txt"
}
healthy plays-1e-3 shakespeare 1e-3 1 "$@"
healthy plays-6e-3 shakespeare 6e-3 2 "$@"
healthy code-3e-3 code 3e-3 3 "$@"
healthy plays-3e-3 shakespeare 3e-3 4 "$@"
healthy code-1e-3 code 1e-3 5 "$@"
healthy code-6e-3 code 6e-3 6 "$@"
for log in "$runs"/*.jsonl; do
    "$python" tools/spikes.py analyze "$log" || [ "$?" -eq 10 ]
done
