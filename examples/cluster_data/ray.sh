#!/bin/sh
# A corpus tokenized by Ray (pip install ray): on the cluster of RAY_ADDRESS or of this machine, else on this machine alone, in
# a minute. After a kill start it again: parts that are whole are kept. Run it from the root of the repository.
set -eu
data=${DATA:-runs/quickstart/data}
input=${INPUT:-$data/shakespeare.jsonl}
prefix=${PREFIX:-$data/corpus}

exec "${PYTHON:-$(command -v .venv/bin/python || echo python)}" tools/preprocess_data.py --input $input --output-prefix "$prefix" \
    --cluster ray --append-eod \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$data/vocab.json" --merge-file "$data/merges.txt" \
    "$@"
