#!/bin/sh
# A model trained to a fixed validation loss, and the time that it took as a row of the table in docs/benchmarks.md.
#   examples/speedrun/run.sh cpu                              1 million parameters, 38 plays of Shakespeare, a minute
#   TEXT=/data/fineweb examples/speedrun/run.sh gpt_124m      GPT-2 124M on the GPUs of this node, to 3.28
# Words after the size go to pretrain_gpt.py. May be set: TEXT (a file, or a folder of JSON Lines or text; default: the plays),
# TARGET (the loss), PEAK (TFLOP/s of one device, for MFU; default: 989 for gpt_124m), SPEEDRUN_DIR, PYTHON, NPROC.
set -eu
cd "$(dirname "$0")/../.."
size=${1:?give cpu or gpt_124m}
shift
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
out=${SPEEDRUN_DIR:-runs/speedrun/$size}
data=$out/data
mkdir -p "$data"
case $size in
cpu) target=${TARGET:-4.8} peak=${PEAK:-} ;;
gpt_124m) target=${TARGET:-3.28} peak=${PEAK:-989} ;;
*) echo "error: $size: give cpu or gpt_124m" >&2; exit 2 ;;
esac
if [ "$size" = gpt_124m ]; then # with GPT-2's vocabulary
    "$python" tools/fetch_quickstart_data.py "$data"
    vocab=$data/gpt2-vocab.json merges=$data/gpt2-merges.txt
else
    [ -n "${TEXT:-}" ] || "$python" tools/fetch_quickstart_data.py --text-only "$data"
    vocab=$data/vocab.json merges=$data/merges.txt
    "$python" tools/train_tokenizer.py --input "${TEXT:-$data/shakespeare.jsonl}" --vocab-size 2048 \
        --output-dir "$data" --overwrite
fi
"$python" tools/preprocess_data.py --input "${TEXT:-$data/shakespeare.jsonl}" --output-prefix "$data/corpus" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$vocab" --merge-file "$merges" --append-eod \
    --workers "$("$python" -c 'import os; print(os.cpu_count())')" --overwrite
rm -f "$out/metrics.jsonl"
set -- --data-path "$data/corpus_text_document" --vocab-file "$vocab" --merge-file "$merges" \
    --metrics-file "$out/metrics.jsonl" "$@"
if [ "$size" = cpu ]; then
    "$python" pretrain_gpt.py @examples/speedrun/cpu.args --device cpu "$@"
else
    PYTHON=$python examples/gpu/run.sh gpt_124m "$@"
fi
"$python" examples/speedrun/row.py "$out/metrics.jsonl" "$size" "$target" "$peak"
