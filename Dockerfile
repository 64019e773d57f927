# CPU:   docker build -t megatron-gpt --build-arg TORCH_INDEX=URL .       (URL: an index with CPU builds of torch)
# CUDA:  docker build -t megatron-gpt --build-arg BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 \
#            --build-arg MEGATRON_CPU_KERNELS=0 .       (CUDA 13, as PyPI's torch; the host's driver: 580 or newer)
# Use:   docker run --rm megatron-gpt megatron-pretrain --help            (CUDA: docker run --gpus all ...)
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH_INDEX=
ARG MEGATRON_CPU_KERNELS=

# A compiler for the C++ helpers; Python where the base image has none.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && (python3 -m venv --help >/dev/null 2>&1 && python3 -c 'import ensurepip' \
        || apt-get install -y --no-install-recommends python3 python3-dev python3-venv) \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
RUN python3 -m venv /venv \
    && /venv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c requirements/constraints.txt torch \
    && /venv/bin/pip install --no-cache-dir -c requirements/constraints.txt .
ENV PATH=/venv/bin:$PATH
# Runs as nobody in particular; to write a mounted directory: docker run --user $(id -u):$(id -g) -v ...
RUN useradd --create-home --uid 10001 megatron && install -d -o megatron -g megatron /workspace
USER megatron
WORKDIR /workspace
CMD ["megatron-pretrain", "--help"]
