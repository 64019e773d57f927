#!/bin/sh
# Text, vocabulary and token ids of this example, in $DATA (runs/auroragpt_skip/data). May be set: DATA, PYTHON.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v .venv/bin/python || echo python)}
data=${DATA:-runs/auroragpt_skip/data}
[ -f "$data/language_text_document.idx" ] && exit 0
"$python" tools/fetch_quickstart_data.py "$data"
"$python" examples/auroragpt_skip/corpus.py "$data"
for name in shakespeare code clean repeats noise language; do
    "$python" tools/preprocess_data.py --input "$data/$name.jsonl" --output-prefix "$data/$name" --append-eod --overwrite \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" --workers 1
done
