#!/bin/sh
# The whole path in small: text, a tokenizer, training, a crash, a resume, generated text, curves.
# Each command is printed before it runs. Arguments of this script go to every training command:
#   examples/quickstart/run.sh --train-iters 2000
# Environment variables: PYTHON, QUICKSTART_DIR (runs/quickstart; an earlier run's results in it are
# removed), QUICKSTART_KILL (the iteration at which the first training process is killed; 700),
# QUICKSTART_TEXT (a file of text, as tools/preprocess_data.py takes it, instead of the plays).
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
out=${QUICKSTART_DIR:-runs/quickstart}
data=$out/data
kill_at=${QUICKSTART_KILL:-700}
newest=$out/checkpoints/latest_checkpointed_iteration.txt

say() { printf '\n== %s\n' "$1"; }
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
# Also keeps the output in $out/log.txt and the process id in $out/pid.
run_logged() {
    printf '\n$ %s\n' "$*" | tee -a "$out/log.txt"
    { sh -c 'echo $$ >"$0" && exec "$@"' "$out/pid" "$@" 2>&1 && echo 0 >"$out/status" || echo $? >"$out/status"; } |
        tee -a "$out/log.txt"
    return "$(cat "$out/status")"
}
iteration() { # of the last line of the metrics file, 0 without one
    tail -n 1 "$out/metrics.jsonl" 2>/dev/null | sed -n 's/^{"iteration": \([0-9]*\),.*/\1/p' | grep . || echo 0
}
# While training runs: the text that each new checkpoint generates.
show_samples() {
    shown=none
    while [ -e "$out/training" ]; do
        sleep 0.5
        last=$(cat "$newest" 2>/dev/null) && [ "$last" != "$shown" ] || continue
        shown=$last
        text=$("$python" tools/generate.py "$out/checkpoints" "ROMEO" --ckpt-step "$last" --max-new-tokens 40 \
            --temperature 0.8 --top-p 0.9 --seed 1 2>/dev/null) || continue
        printf '\n-- generated at iteration %s:\n%s\n\n' "$last" "$text"
    done
}
kill_training() { # kill -9 once iteration $kill_at is in the metrics file
    while [ -e "$out/training" ] && [ "$(iteration)" -lt "$kill_at" ]; do sleep 0.1; done
    [ -e "$out/training" ] || return 0
    kill -9 "$(cat "$out/pid")"
}
trap 'rm -f "$out/training"' EXIT # ends both functions above
trap 'exit 130' INT
trap 'exit 143' TERM

mkdir -p "$data"
text=${QUICKSTART_TEXT:-$data/shakespeare.jsonl}
if [ -z "${QUICKSTART_TEXT:-}" ]; then
    say "1. Text: 38 plays of Shakespeare, 5 MB"
    if ! run "$python" tools/fetch_quickstart_data.py --text-only "$data"
    then
        say "1. NO PLAYS: the text is this project's own source and documents, so losses and generated text differ from README.md"
        text=$data/source.jsonl
        "$python" - "$text" <<'PYTHON'
import json, pathlib, sys
folders = ("docs", "examples", "megatron", "tests", "tools")
files = sorted(path for folder in folders for path in pathlib.Path(folder).rglob("*.*"))
with open(sys.argv[1], "w", encoding="utf-8") as output:
    for path in files:
        if path.suffix in (".md", ".py", ".cpp"):
            output.write(json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n")
PYTHON
    fi
fi

say "2. A tokenizer: byte-level BPE with 2,048 tokens, trained on that text"
run "$python" tools/train_tokenizer.py --input "$text" --vocab-size 2048 --output-dir "$data" --overwrite

say "3. Text to token ids"
run "$python" tools/preprocess_data.py --input "$text" --output-prefix "$data/shakespeare" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" \
    --append-eod --workers 2 --overwrite

rm -rf "$out/checkpoints" "$out/tensorboard" "$out/metrics.jsonl" "$out/log.txt" "$out/curves.png"
set -- "$python" pretrain_gpt.py @examples/quickstart/muon.args \
    --data-path "$data/shakespeare_text_document" \
    --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" \
    --save "$out/checkpoints" --load "$out/checkpoints" \
    --tensorboard-dir "$out/tensorboard" --metrics-file "$out/metrics.jsonl" "$@"

say "4. Train, with some text from each checkpoint; at iteration $kill_at the process is killed"
touch "$out/training"
show_samples &
kill_training &
killer=$!
run_logged "$@" && code=0 || code=$?
if [ "$code" -eq 137 ]; then
    at=$(iteration)
    wait "$killer"
    say "5. Killed (kill -9) after iteration $at; the same command resumes from the checkpoint of iteration $(cat "$newest")"
    run_logged "$@"
elif [ "$code" -ne 0 ]; then
    exit "$code"
fi
rm -f "$out/training"
wait

say "6. Generate text"
run "$python" tools/generate.py "$out/checkpoints" "HAMLET" --max-new-tokens 200 --temperature 0.8 --top-p 0.9 --seed 1

say "7. Plot the curves"
run "$python" tools/plot.py "$out" --output "$out/curves.png"

say "What next"
cat <<TEXT
result         $(grep '^ final validation' "$out/log.txt" | tail -n 1 | sed 's/^ //')
curves         $out/curves.png; $python -m tensorboard.main --logdir $out/tensorboard
checkpoints    $out/checkpoints (last: iteration $(cat "$newest"))
metrics, log   $out/metrics.jsonl (JSON Lines, one per iteration); $out/log.txt
generate       $python tools/generate.py $out/checkpoints "JULIET"
train longer   the command of step 4 with --train-iters 2000 --override-opt_param-scheduler --allow-data-order-change
two processes  the same with $(dirname "$python")/torchrun --nproc-per-node 2 instead of $python: losses agree to rounding
your own text  docs/getting_started.md
a real model   examples/gpt2_345m
TEXT
