#!/bin/sh
# The walk-through's first half: text to data/meg-gpt2_text_document.{bin,idx} in the work folder ($WORK).
#   examples/gpt2_345m/preprocess.sh                   fetches 38 plays of Shakespeare and GPT-2's vocabulary
#   INPUT=oscar-1GB.jsonl examples/gpt2_345m/preprocess.sh     takes your text, one {"text": "..."} a line
# May be set: WORK (runs/gpt2_345m), INPUT, PYTHON, WORKERS (8). Extra words go to tools/preprocess_data.py.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$(command -v "$root/.venv/bin/python" || echo python)}
case "${INPUT:-}" in "" | /*) ;; *) INPUT=$PWD/$INPUT ;; esac
mkdir -p "${WORK:-$root/runs/gpt2_345m}"
cd "${WORK:-$root/runs/gpt2_345m}"

"$python" "$root/tools/fetch_quickstart_data.py" data
"$python" "$root/tools/preprocess_data.py" \
    --input "${INPUT:-data/shakespeare.jsonl}" \
    --output-prefix data/meg-gpt2 \
    --vocab-file data/gpt2-vocab.json \
    --tokenizer-type GPT2BPETokenizer \
    --merge-file data/gpt2-merges.txt \
    --append-eod \
    --overwrite \
    --workers "${WORKERS:-8}" \
    "$@"
ls -l data/meg-gpt2_text_document.*
