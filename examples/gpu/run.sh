#!/bin/sh
# A run on the GPUs of this node: examples/gpu/run.sh gpt_124m|llama_1b [flags that win over the file]
# Without --data-path it trains on mock data, for its speed. May be set: NPROC (default: all GPUs), PYTHON, CACHE (a folder on
# a disk of this node for compiled kernels; /tmp/megatron-$USER), and what NCCL and torch read.
set -eu
cd "$(dirname "$0")/../.."
model=${1:?give gpt_124m or llama_1b}
shift
case " $* " in
*" --data-path "*) ;;
*) set -- --mock-data --vocab-size "$([ "$model" = gpt_124m ] && echo 50257 || echo 32000)" "$@" ;;
esac
nproc=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[ "$nproc" -gt 0 ] || { echo "error: nvidia-smi lists no GPU; set NPROC" >&2; exit 1; }
cache=${CACHE:-/tmp/megatron-$(id -un)}
# Home folders are often on NFS, where the ranks of all nodes would wait for each other's locks.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$cache/triton}" TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
exec "${PYTHON:-$(command -v .venv/bin/python || echo python)}" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$nproc" \
    pretrain_gpt.py "@examples/gpu/$model.args" "$@"
