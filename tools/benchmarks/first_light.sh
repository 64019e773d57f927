#!/usr/bin/env bash
# What a first eight minutes on a GPU should tell: which kernels there are and how fast, whether ours are right, the
# training step beside a bare loop, a resume bit for bit. Needs no network and no installation: python3 with torch, numpy
# and pytest. `first_light.sh cpu` runs the same steps in small on a CPU. Exit code 1 if a step failed.
#     OUT=DIR tools/benchmarks/first_light.sh [cuda | cpu]     (default: cuda; results in runs/first_light)
cd "$(dirname "$0")/../.." || exit 2
OUT=$(realpath -m "${OUT:-runs/first_light}")
exec "${PYTHON:-python3}" -u tools/benchmarks/first_light/run.py "${1:-cuda}" "$OUT"
