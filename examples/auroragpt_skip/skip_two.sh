#!/bin/sh
# The post's check in small: four iterations, and the same without the second and third; both as tables, and what the two
# runs read (README.md). May be set: PYTHON, DATA, RUNS (runs/auroragpt_skip). Words given to this script go to both runs.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
data=${DATA:-runs/auroragpt_skip/data}
runs=${RUNS:-runs/auroragpt_skip}
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
train() { # name, flags
    name=$1
    shift
    rm -rf "${runs:?}/$name" "$runs/$name.ledger"
    printf '\n$ pretrain_gpt.py ... %s > %s\n' "$*" "$runs/$name.txt"
    "$python" pretrain_gpt.py @examples/auroragpt_skip/seed.args --data-path "$data/clean_text_document" \
        --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" --save "$runs/$name" --save-interval 4 \
        --data-ledger "$runs/$name.ledger" "$@" >"$runs/$name.txt"
}
mkdir -p "$runs"
PYTHON=$python DATA=$data examples/auroragpt_skip/prepare.sh
train unskipped "$@"
train skipped --train-range-to-skip 2 3 "$@"
run "$python" examples/auroragpt_skip/tables.py "$runs/unskipped.txt" "$runs/skipped.txt"

printf '\n== What was read: iteration 3 is not, and iteration 4 is the same in both runs\n'
run "$python" tools/inspect_data.py at --iteration 3 "$runs/skipped" | head -n 6
run "$python" tools/spikes.py verify --reference "$runs/unskipped.ledger" "$runs/skipped"
