#!/usr/bin/env bash
# What a first seven minutes on a GPU should tell: which kernels there are and how fast, whether ours are right, training
# steps and decoding beside peers and beside what an H200 needed. Needs no network and no installation: python3 with torch,
# numpy and pytest. `first_light.sh cpu` runs all of it in small on a CPU. Ends by itself; exit code 1 if a step failed.
#     bench/first_light.sh [cuda | cpu] [--seconds 420] [--out runs/first_light]
cd "$(dirname "$0")/../.." || exit 2
exec "${PYTHON:-python3}" -u bench/first_light/run.py "$@"
