#!/bin/sh
# The quickstart's text as token ids, once, where all nodes can read it: $DATA (runs/quickstart/data).
# May be set: DATA, PYTHON.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
data=${DATA:-runs/quickstart/data}
[ -f "$data/shakespeare_text_document.idx" ] && exit 0
"$python" tools/fetch_quickstart_data.py "$data" --text-only
"$python" tools/train_tokenizer.py --input "$data/shakespeare.jsonl" --vocab-size 2048 --output-dir "$data" --overwrite
"$python" tools/preprocess_data.py --input "$data/shakespeare.jsonl" --output-prefix "$data/shakespeare" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" \
    --append-eod --workers 2
