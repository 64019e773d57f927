"""`--model NAME`: published architectures, each as the flags that describe it.

The flags are those of the model's own configuration; the parameters are its publisher's count.
"""

import difflib
import shlex
from typing import NamedTuple


class NamedModel(NamedTuple):
    """`parameters` as published, with a vocabulary of `vocab_size` ids; `flags` of pretrain_gpt.py,
    with a length of sequences to train with. `gpus` of 80 GiB hold its training, by the plan: bf16,
    distributed optimizer, micro-batches of 1, if need be recomputation and parallel layers."""

    parameters: int
    vocab_size: int
    gpus: int
    flags: str

    @property
    def words(self) -> list[str]:
        """The flags as words of a command line."""
        return shlex.split(self.flags)


_GPT2 = "--seq-length 1024 --max-position-embeddings 1024"
_PYTHIA = (
    "--seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope "
    "--rotary-percent 0.25 --use-parallel-residual --no-bias-gelu-fusion "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
_ROPE = (
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0"
)
_LLAMA = f"{_ROPE} --swiglu"
_UNTIED = "--untie-embeddings-and-output-weights"
_LLAMA2 = f"--seq-length 4096 --max-position-embeddings 4096 {_UNTIED} {_LLAMA}"
_LLAMA3 = f"--seq-length 8192 --max-position-embeddings 8192 --rotary-base 500000 {_LLAMA}"
_SMOLLM2 = f"--seq-length 2048 --max-position-embeddings 8192 {_LLAMA}"
_QWEN25 = (
    "--seq-length 4096 --max-position-embeddings 32768 --rotary-base 1000000 --norm-epsilon 1e-6 "
    f"--add-qkv-bias {_LLAMA}"
)
_QWEN3 = (
    "--kv-channels 128 --seq-length 4096 --max-position-embeddings 40960 --rotary-base 1000000 "
    f"--norm-epsilon 1e-6 --qk-layernorm {_LLAMA}"
)
_QWEN3_NEXT = (
    "--kv-channels 256 --seq-length 4096 --max-position-embeddings 262144 --rotary-base 10000000 "
    f"--rotary-percent 0.25 --norm-epsilon 1e-6 --apply-layernorm-1p --qk-layernorm {_LLAMA} "
    "--attention-output-gate --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 4 --num-experts 512 --moe-ffn-hidden-size 512 --moe-router-topk 10 "
    "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate"
)
_MISTRAL = f"--seq-length 8192 --max-position-embeddings 32768 {_UNTIED} {_LLAMA}"
_OLMOE = (
    f"--seq-length 4096 --max-position-embeddings 4096 {_UNTIED} {_LLAMA} "
    "--qk-layernorm --qk-layernorm-all-heads --num-experts 64 --moe-router-topk 8 "
    "--moe-router-pre-softmax"
)
_GEMMA2 = (
    f"--kv-channels 256 --seq-length 8192 --max-position-embeddings 8192 {_ROPE} --geglu "
    "--norm-epsilon 1e-6 --apply-layernorm-1p --post-self-attn-layernorm --post-mlp-layernorm "
    "--window-size 4095 0 --window-attn-skip-freq 2 --attn-logit-softcapping 50 "
    "--final-logit-softcapping 30 --softmax-scale 0.0625"
)
_GPT_OSS = (
    f"--kv-channels 64 --seq-length 4096 --max-position-embeddings 131072 {_UNTIED} {_ROPE} "
    "--rotary-base 150000 --rope-type yarn --rotary-scaling-factor 32 "
    "--no-yarn-correction-range-round-to-int --window-size 127 0 --window-attn-skip-freq 2 "
    "--softmax-type learnable --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1 "
    "--add-qkv-bias --add-attention-output-bias --add-mlp-bias --moe-router-topk 4"
)


def _model(
    parameters: int,
    vocab_size: int,
    gpus: int,
    shape: tuple[int, int, int, int, int],
    flags: str,
) -> NamedModel:
    """`shape`: layers, hidden size, FFN size, heads, heads of keys and values."""
    layers, hidden, ffn, heads, groups = shape
    grouped = f" --group-query-attention --num-query-groups {groups}" if groups != heads else ""
    return NamedModel(
        parameters,
        vocab_size,
        gpus,
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} "
        f"--num-attention-heads {heads}{grouped} {flags}",
    )


MODELS: dict[str, NamedModel] = {
    "gpt2": _model(124_439_808, 50257, 1, (12, 768, 3072, 12, 12), _GPT2),
    "gpt2-medium": _model(354_823_168, 50257, 1, (24, 1024, 4096, 16, 16), _GPT2),
    "gpt2-large": _model(774_030_080, 50257, 1, (36, 1280, 5120, 20, 20), _GPT2),
    "gpt2-xl": _model(1_557_611_200, 50257, 1, (48, 1600, 6400, 25, 25), _GPT2),
    "pythia-160m": _model(162_322_944, 50304, 1, (12, 768, 3072, 12, 12), _PYTHIA),
    "pythia-1b": _model(1_011_781_632, 50304, 1, (16, 2048, 8192, 8, 8), _PYTHIA),
    "smollm2-135m": _model(
        134_515_008, 49152, 1, (30, 576, 1536, 9, 3), f"--rotary-base 100000 {_SMOLLM2}"
    ),
    "smollm2-360m": _model(
        361_821_120, 49152, 1, (32, 960, 2560, 15, 5), f"--rotary-base 100000 {_SMOLLM2}"
    ),
    "smollm2-1.7b": _model(
        1_711_376_384, 49152, 1, (24, 2048, 8192, 32, 32), f"--rotary-base 130000 {_SMOLLM2}"
    ),
    "llama2-7b": _model(6_738_415_616, 32000, 2, (32, 4096, 11008, 32, 32), _LLAMA2),
    "llama2-13b": _model(13_015_864_320, 32000, 4, (40, 5120, 13824, 40, 40), _LLAMA2),
    "llama2-70b": _model(68_976_648_192, 32000, 16, (80, 8192, 28672, 64, 8), _LLAMA2),
    "llama3-8b": _model(8_030_261_248, 128256, 2, (32, 4096, 14336, 32, 8), f"{_LLAMA3} {_UNTIED}"),
    "llama3-70b": _model(
        70_553_706_496, 128256, 32, (80, 8192, 28672, 64, 8), f"{_LLAMA3} {_UNTIED}"
    ),
    "llama3.1-405b": _model(
        405_853_388_800, 128256, 128, (126, 16384, 53248, 128, 8), f"{_LLAMA3} {_UNTIED}"
    ),
    "llama3.2-1b": _model(1_235_814_400, 128256, 1, (16, 2048, 8192, 32, 8), _LLAMA3),
    "llama3.2-3b": _model(3_212_749_824, 128256, 1, (28, 3072, 8192, 24, 8), _LLAMA3),
    "qwen2.5-0.5b": _model(494_032_768, 151936, 1, (24, 896, 4864, 14, 2), _QWEN25),
    "qwen2.5-7b": _model(
        7_615_616_512, 152064, 2, (28, 3584, 18944, 28, 4), f"{_QWEN25} {_UNTIED}"
    ),
    "qwen3-0.6b": _model(596_049_920, 151936, 1, (28, 1024, 3072, 16, 8), _QWEN3),
    "qwen3-1.7b": _model(1_720_574_976, 151936, 1, (28, 2048, 6144, 16, 8), _QWEN3),
    "qwen3-4b": _model(4_022_468_096, 151936, 1, (36, 2560, 9728, 32, 8), _QWEN3),
    "qwen3-8b": _model(8_190_735_360, 151936, 2, (36, 4096, 12288, 32, 8), f"{_QWEN3} {_UNTIED}"),
    "qwen3-14b": _model(14_768_307_200, 151936, 4, (40, 5120, 17408, 40, 8), f"{_QWEN3} {_UNTIED}"),
    "qwen3-32b": _model(32_762_123_264, 151936, 8, (64, 5120, 25600, 64, 8), f"{_QWEN3} {_UNTIED}"),
    "qwen3-30b-a3b": _model(
        30_532_122_624,
        151936,
        8,
        (48, 2048, 6144, 32, 4),
        f"{_QWEN3} {_UNTIED} --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8",
    ),
    "qwen3-next-80b-a3b": _model(
        79_674_391_296, 151936, 32, (48, 2048, 5120, 16, 2), f"{_QWEN3_NEXT} {_UNTIED}"
    ),
    "mistral-7b": _model(
        7_241_732_096, 32000, 2, (32, 4096, 14336, 32, 8), f"{_MISTRAL} --window-size 4095 0"
    ),
    "mixtral-8x7b": _model(
        46_702_792_704,
        32000,
        16,
        (32, 4096, 14336, 32, 8),
        f"{_MISTRAL} --rotary-base 1000000 --num-experts 8",
    ),
    "olmoe-1b-7b": _model(6_919_161_856, 50304, 2, (16, 2048, 1024, 16, 16), _OLMOE),
    "gemma2-2b": _model(
        2_614_341_888,
        256000,
        1,
        (26, 2304, 9216, 8, 4),
        f"{_GEMMA2} --embedding-multiplier 48",
    ),
    "gpt-oss-20b": _model(
        20_914_757_184, 201088, 8, (24, 2880, 2880, 64, 8), f"{_GPT_OSS} --num-experts 32"
    ),
    "gpt-oss-120b": _model(
        116_829_156_672, 201088, 32, (36, 2880, 2880, 64, 8), f"{_GPT_OSS} --num-experts 128"
    ),
}


def named_model(name: str) -> NamedModel:
    """The model of that name. Raises ValueError, which names the nearest."""
    if name in MODELS:
        return MODELS[name]
    last = name.lower().rpartition("/")[2].replace("_", "-")
    close = difflib.get_close_matches(last, MODELS, 3, 0.55)
    best = f"did you mean {' or '.join(close)}? " if close else ""
    raise ValueError(
        f"there is no model of that name; {best}--help models lists all [model-unknown]"
    )


def listing() -> str:
    """All of them as a table."""
    rows = [
        f"  {name:<15} {model.parameters:>15,} {model.vocab_size:>11,} {model.gpus:>6}"
        for name, model in MODELS.items()
    ]
    return "\n".join(
        [
            "--model NAME sets the flags of a published architecture; flags that follow win, and a",
            "dry run prints them. The vocabulary is that of the run's tokenizer, and that of the",
            "model with NullTokenizer. GPUs: those of 80 GiB that hold its training, by the plan",
            "of --bf16 --use-distributed-optimizer --micro-batch-size 1, with parallel layers",
            "and recomputation where needed: --dry-run --world-size N --device-memory 80 says so.",
            "",
            f"  {'name':<15} {'parameters':>15} {'vocabulary':>11} {'GPUs':>6}",
            *rows,
            "",
        ]
    )
