"""The models that the step benchmark trains: their sizes, and each as flags of pretrain_gpt.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP = 1.0
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}  # of losses in the warm-up steps, relative


@dataclass(frozen=True)
class Size:
    """One model and one batch. family: `gpt` (GPT-2: learned positions, LayerNorm, tanh GELU,
    biases, tied output), `llama` (rotary positions, RMSNorm, SwiGLU, no biases, output matrix of
    its own) or `deepseek` (the same with latent attention). window: positions that a token sees in
    three of four layers; 0 for all."""

    name: str
    layers: int
    hidden: int
    heads: int
    seq: int
    micro_batch: int
    vocab: int
    family: str = "gpt"
    ffn: int = 0
    micro_batches: int = 1
    window: int = 0

    @property
    def ffn_size(self) -> int:
        """Width of the MLP: 4 x hidden where none was given."""
        return self.ffn or 4 * self.hidden

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.seq * self.micro_batch * self.micro_batches


CPU_SIZES = (
    # nanoGPT's configuration of the Shakespeare characters for a CPU
    Size("nano", 4, 128, 4, seq=64, micro_batch=12, vocab=65),
    Size("gpt10m", 6, 384, 6, seq=256, micro_batch=16, vocab=256),
    Size("llama30m", 8, 512, 8, seq=512, micro_batch=8, vocab=4096, family="llama", ffn=1376),
    Size("gpt124m", 12, 768, 12, seq=1024, micro_batch=4, vocab=50304),
)
_WINDOWS = Size("windows30m", 8, 512, 8, 2048, 1, 4096, family="llama", ffn=1376, window=256)
_LATENT = Size("mla30m", 6, 512, 8, 512, 4, 4096, family="deepseek", ffn=1376)
# The shapes of GPT-3 (Brown et al. 2020, table 2.1); 760M and 1.3B with 16 heads, as 24 do not
# divide their widths well.
CUDA_SIZES = (
    Size("125m", 12, 768, 12, seq=2048, micro_batch=32, vocab=50304, micro_batches=2),
    Size("350m", 24, 1024, 16, seq=2048, micro_batch=16, vocab=50304, micro_batches=4),
    Size("760m", 24, 1536, 16, seq=2048, micro_batch=16, vocab=50304, micro_batches=4),
    Size("1.3b", 24, 2048, 16, seq=2048, micro_batch=8, vocab=50304, micro_batches=8),
    Size("2.7b", 32, 2560, 32, seq=2048, micro_batch=4, vocab=50304, micro_batches=8),
    Size("6.7b", 32, 4096, 32, seq=2048, micro_batch=1, vocab=50304, micro_batches=32),
)
SMALL = "tiny:layers=1,hidden=32,heads=2,seq=16,micro_batch=2,vocab=64"
NAMED = {size.name: size for size in (*CPU_SIZES, _WINDOWS, _LATENT, *CUDA_SIZES)}


def parse_size(text: str) -> Size:
    """A size by name, changed or not (`gpt10m`, `gpt10m:layers=2,seq=128`), or a new one:
    `name:layers=..,hidden=..`.

    Raises ValueError for a name or a field that does not exist and for a new size that lacks one.
    """
    name, _, changes = text.partition(":")
    try:
        words = dict(word.split("=") for word in filter(None, changes.split(",")))
        values: dict[str, Any] = {k: v if k == "family" else int(v) for k, v in words.items()}
        size = replace(NAMED[name], **values) if name in NAMED else Size(name, **values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{text}: not one of {', '.join(NAMED)}, nor a new size: {error}"
        ) from None
    if size.family not in ("gpt", "llama", "deepseek"):
        raise ValueError(f"{text}: family is gpt, llama or deepseek, not {size.family!r}")
    return size


def command_line(
    size: Size, dtype: str, device: str, extra: Sequence[str] = (), iterations: int = 100_000
) -> list[str]:
    """Flags of pretrain_gpt.py that train this size on mock data without dropout; `extra` ones are
    added."""
    words = (
        f"--num-layers {size.layers} --hidden-size {size.hidden} --num-attention-heads "
        f"{size.heads} --ffn-hidden-size {size.ffn_size} --seq-length {size.seq} "
        f"--max-position-embeddings {size.seq} --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size {size.vocab} --make-vocab-size-divisible-by 1 --micro-batch-size "
        f"{size.micro_batch} --global-batch-size {size.micro_batch * size.micro_batches} "
        f"--attention-dropout 0 --hidden-dropout 0 --train-iters {iterations} --eval-iters 0 "
        f"--log-interval 1 --lr {LEARNING_RATE} --lr-decay-style constant --weight-decay "
        f"{WEIGHT_DECAY} --clip-grad {CLIP} --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} "
        f"--log-throughput --device {device} --num-workers {0 if device == 'cpu' else 2}"
    ).split()
    if size.family != "gpt":
        words += (
            "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
            "--untie-embeddings-and-output-weights"
        ).split()
    if size.family == "deepseek":
        words += (
            "--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 "
            "--qk-pos-emb-head-dim 32 --v-head-dim 64 --qk-layernorm --latent-norm-epsilon 1e-6"
        ).split()
    if size.window:
        words += f"--window-size {size.window - 1} 0 --window-attn-skip-freq 4".split()
    return [*words, *["--bf16"] * (dtype == "bf16"), *extra]
