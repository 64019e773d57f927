#!/bin/sh
# One bad document in the quickstart's text: the loss spikes, the spike is found, explained and skipped; and a run that does
# all that by itself (README.md).
#     spike.sh [repeats | noise | language] [flags for every training]
# May be set: PYTHON, DATA, RUNS (runs/auroragpt_skip).
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
data=${DATA:-runs/auroragpt_skip/data}
runs=${RUNS:-runs/auroragpt_skip}
kind=${1:-language}
[ "$#" -eq 0 ] || shift
out=$runs/$kind

say() { printf '\n== %s\n' "$1"; }
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
train() { # name, flags; the log goes to a file
    name=$1
    shift
    printf '\n$ pretrain_gpt.py ... %s > %s\n' "$*" "$out/$name.txt"
    "$python" pretrain_gpt.py @examples/auroragpt_skip/spike.args \
        --data-path "$data/${kind}_text_document" --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" \
        --save "$out/$name" "$@" >"$out/$name.txt"
}
analyze() { # 10: found
    printf '\n$ tools/spikes.py analyze %s\n' "$*"
    "$python" tools/spikes.py analyze "$@" && code=0 || code=$?
    [ "$code" -eq 0 ] || [ "$code" -eq 10 ] || exit "$code"
}

PYTHON=$python DATA=$data examples/auroragpt_skip/prepare.sh
rm -rf "$out"
mkdir -p "$out"
say "1. Train on the text with the bad document ($kind)"
train bad "$@"

say "2. Where is the spike?"
analyze "$out/bad.txt" --load "$out/bad" --plot "$out/spike.png"
[ "$code" -eq 10 ] || exit 1
"$python" tools/spikes.py analyze "$out/bad.txt" --load "$out/bad" --json >"$out/events.json" || true
peak=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["events"][0]["peak"])' "$out/events.json")
flags=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["restart"])' "$out/events.json")

say "3. What was read there?"
run "$python" tools/spikes.py docs --iteration "$peak" --top 1 "$out/bad"

say "4. Is it the data, or the data in this state of the model?"
run "$python" tools/spikes.py replay --load "$out/bad" --iterations "$peak" --other-ckpt 50

say "5. Start again with the flags of step 2"
train left_out $flags "$@"
analyze "$out/left_out.txt"
[ "$code" -eq 0 ] || exit 1

say "6. The same by itself, from the first iteration on"
train rewind --spike-action rewind "$@"
grep '^spike at\|^rewind from\|^skipping' "$out/rewind.txt"
last=$(ls "$out/left_out" | grep iter_ | tail -n 1)
run cmp "$out/left_out/$last/weights_00000.safetensors" "$out/rewind/$last/weights_00000.safetensors"
echo "weights and optimizer of the two runs are the same bytes"
