"""What first_light.sh measures, as tables, the most valuable first: training steps with what one
H200 needed for them, and tiny runs whose losses are compared.

`h200`: milliseconds on one H200, 2026-11-28, commit 2eb27ecc, torch 2.11, cuDNN 9.19.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sizes import Size, parse_size

LLAMA_3B = (
    "llama3b:layers=28,hidden=3072,heads=24,seq=4096,micro_batch=2,micro_batches=4,vocab=128256,"
    "family=llama,ffn=8192"
)
LLAMA_1B = "llama1b:layers=16,hidden=2048,heads=16,vocab=32000,family=llama,ffn=5632"
LLAMA_0_5B = "llama0.5b:layers=8,hidden=2048,heads=16,seq=2048,vocab=32000,family=llama,ffn=5632"
SIZES = {
    "124m": "gpt124m:micro_batch=32,micro_batches=4",
    "124m-2k": "gpt124m:micro_batch=2,micro_batches=16",
    "124m-1k": "gpt124m:micro_batch=1,micro_batches=32",
    "1b": f"{LLAMA_1B},seq=2048,micro_batch=8,micro_batches=2",
    "1b-s4096": f"{LLAMA_1B},seq=4096,micro_batch=4,micro_batches=2",
    "3b": LLAMA_3B,
    "7b": "llama7b:layers=32,hidden=4096,heads=32,seq=4096,micro_batch=1,micro_batches=2,"
    "vocab=32000,family=llama,ffn=11008",
    "1.3b": "1.3b:seq=1024,micro_batch=8,micro_batches=4",
    "1.5b": "gpt1558m:layers=48,hidden=1600,heads=25,seq=1024,micro_batch=16,micro_batches=2,"
    "vocab=50304",
    "olmoe": "olmoe:layers=8,hidden=2048,heads=16,seq=4096,micro_batch=4,micro_batches=2,"
    "vocab=50304,family=llama,ffn=1024",
    "0.5b": f"{LLAMA_0_5B},micro_batch=1",
    "0.5b-16": f"{LLAMA_0_5B},micro_batch=16",
}


@dataclass(frozen=True)
class Cell:
    """A training step. kind: `ours`, `bare`, `transformers`, `liger` (its kernels in transformers'
    model) or `olmoe` (transformers'), and `-compiled`; a peer has the first weights and samples of
    ours of its size, which stands before it. Or, of `decode` and `decode-transformers` (compiled:
    with a static cache), a token of each text of a batch, in bf16. `at_most`: ms that are expected
    where the code was changed since the H200 ran it."""

    name: str
    kind: str
    size: str
    flags: str = ""
    h200: float | None = None
    at_most: float | None = None


EIGHT_GROUPS = "--group-query-attention --num-query-groups 8"
EXPERTS = (
    "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024 --moe-aux-loss-coeff 0.01 "
    "--moe-grouped-gemm"
)
FORCED = "--moe-router-force-load-balancing"
FP8 = f"{EIGHT_GROUPS} --fp8-format hybrid --fp8-recipe"
# recorded in the second step
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"
CELLS = (
    Cell("124M", "ours", "124m", h200=262.9),
    Cell("1B", "ours", "1b", h200=364.7),
    Cell("3B", "ours", "3b", EIGHT_GROUPS, 1310.2),
    Cell("3B FP8", "ours-compiled", "3b", f"{FP8} tensorwise", at_most=1139.0),
    Cell("1B Muon", "ours", "1b", "--optimizer muon --muon-momentum 0.95", 1248.9, 456.0),
    Cell("124M, 2k tokens", "ours", "124m-2k", h200=678.5),
    # 300,000 tokens/s
    Cell("124M, 2k tokens, graphs", "ours", "124m-2k", GRAPHS, at_most=109.2),
    Cell("experts", "ours", "olmoe", EXPERTS, 483.3, 367.0),
    # evenly loaded: no slower than with natural routing
    Cell("experts, forced", "ours", "olmoe", f"{EXPERTS} {FORCED}", at_most=367.0),
    Cell(
        "1B documents",
        "ours",
        "1b-s4096",
        "--reset-attention-mask --reset-position-ids",
        416.5,
        385.0,
    ),
    Cell(
        "124M dropout", "ours", "124m", "--attention-dropout 0.1 --hidden-dropout 0.1", 307.6, 283.9
    ),
    # in fp32 then, as transformers: 10.3 and 12.3
    Cell("0.5B", "decode", "0.5b", h200=8.8, at_most=1.0),
    Cell("0.5B, batch 16", "decode", "0.5b-16", h200=11.8, at_most=1.6),
    Cell("124M, 2k tokens", "ours-compiled", "124m-2k", h200=675.7),
    Cell("124M", "ours-compiled", "124m", h200=247.6),
    Cell("124M", "bare-compiled", "124m", h200=259.0),
    Cell("1B", "ours-compiled", "1b", h200=359.8),
    Cell("experts", "olmoe", "olmoe", h200=600.0),
    Cell("0.5B", "decode-transformers", "0.5b", h200=11.9),
    Cell("0.5B, batch 16", "decode-transformers", "0.5b-16", h200=10.8),
    Cell("0.5B", "decode-transformers-compiled", "0.5b"),
    Cell("0.5B, batch 16", "decode-transformers-compiled", "0.5b-16"),
    Cell("1B", "liger", "1b"),
    Cell("1B", "transformers", "1b"),
    Cell("3B FP8 delayed", "ours", "3b", f"{FP8} delayed"),
    Cell(
        "1B, 4 groups",
        "ours",
        "1b-s4096",
        "--group-query-attention --num-query-groups 4",
        355.0,
    ),
    Cell("1B", "bare-compiled", "1b", h200=367.8),
    Cell("124M, 1k tokens", "ours", "124m-1k"),
    Cell("124M, 1k tokens, graphs", "ours", "124m-1k", GRAPHS, at_most=109.2),
    Cell("1.5B", "ours", "1.5b", h200=668.7),
    Cell("7B", "ours", "7b", h200=697.2),
    Cell("1.3B", "ours", "1.3b", h200=508.1),
    Cell("1.3B", "ours-compiled", "1.3b", h200=500.2),
    Cell("1.3B", "bare-compiled", "1.3b", h200=526.2),
)


def flags_on(device: str, flags: str) -> str:
    """Those that this device has: a CPU has no graphs."""
    return flags.replace(GRAPHS, "") if device == "cpu" else flags


def size_of(name: str, small: bool) -> Size:
    """That model and batch; `small`: as a CPU trains it in a moment, with the same flags."""
    size = parse_size(SIZES[name])
    if not small:
        return size
    return replace(
        size,
        layers=2,
        hidden=64,
        heads=8,
        seq=32,
        micro_batch=2,
        micro_batches=min(2, size.micro_batches),
        vocab=128,
        ffn=size.ffn and 64,
    )


@dataclass(frozen=True)
class Run:
    """A tiny run on the CPU and on the device. `h200`: the largest relative difference of a loss
    there. `reference`: the run whose CPU losses are compared, where it is another one."""

    flags: str
    h200: float | None = None
    tolerance: float = 1e-3
    reference: str = ""


NARROW = 3e-2  # bf16 and fp16 on two devices round differently
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
TWO_OF_EIGHT = f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128"
DOCUMENTS = f"{LLAMA} --reset-attention-mask --reset-position-ids --eod-mask-loss"
DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
RUNS = {
    "gpt": Run("", 4.5e-7),
    "bf16": Run(f"{LLAMA} --bf16", 5.3e-4, NARROW),
    "fp8": Run(f"{LLAMA} --bf16 --fp8-format hybrid --fp8-recipe tensorwise", None, 5e-2),
    "fp8 delayed": Run(f"{LLAMA} --bf16 --fp8-format hybrid {DELAYED}", None, 5e-2),
    "moe": Run(
        f"{TWO_OF_EIGHT} --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3 --moe-grouped-gemm "
        "--moe-shared-expert-intermediate-size 128",
        2.9e-6,
    ),
    "sigmoid router": Run(
        f"{LLAMA} --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 64 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
        "--moe-layer-freq [0]*1+[1]*3 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32",
        2.7e-5,
    ),
    "moe bf16": Run(
        f"{TWO_OF_EIGHT} --bf16 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm", 1.8e-3, NARROW
    ),
    "capacity": Run(
        f"{TWO_OF_EIGHT} --moe-expert-capacity-factor 1.0 --moe-token-drop-policy probs", 2.1e-6
    ),
    "muon": Run(f"{LLAMA} --optimizer muon --muon-momentum 0.95", 2.8e-7, NARROW),
    "muon moe": Run(f"{TWO_OF_EIGHT} --optimizer muon --muon-momentum 0.95 --bf16", 5.8e-4, NARROW),
    "documents": Run(DOCUMENTS, 3.3e-6),
    "documents bf16": Run(f"{DOCUMENTS} --bf16", 4.8e-3, NARROW),
    "recompute": Run(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2.7e-7
    ),
    "qk norm": Run(
        f"{LLAMA} --qk-layernorm --rotary-percent 0.5 --rotary-base 500000 --use-rope-scaling",
        7.9e-6,
    ),
    "squared relu": Run(
        "--squared-relu --normalization RMSNorm --position-embedding-type rope", 3.1e-6
    ),
    "z loss": Run(f"{LLAMA} --z-loss-coeff 1e-4 --calculate-per-token-loss", 6.3e-6),
    "fp16": Run("--fp16 --initial-loss-scale 1024", 1.8e-4, NARROW),
    "distributed": Run(
        f"{LLAMA} --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        5.3e-4,
        NARROW,
    ),
    "compiled": Run(f"{LLAMA} --bf16 --torch-compile", 3.0e-3, NARROW, "bf16"),
    "graphs": Run(f"{LLAMA} --bf16 {GRAPHS}", None, NARROW, "bf16"),
    "fp8 compiled": Run(
        f"{LLAMA} --bf16 --fp8-format hybrid --fp8-recipe tensorwise --torch-compile",
        None,
        5e-2,
        "fp8",
    ),
}
PROBED = {
    "GEMM": 774.0,
    "copy": 4.26,
    "weight gradient": 709.0,
    "weight gradient added in fp32": 677.0,
    "attention d 64 forward": 282.0,
    "attention d 64 both": 160.0,
    "attention d 128 forward": 522.0,
    "attention d 128 both": 400.0,
    "FP8 precise": 1300.0,
    "FP8 fast": 1440.0,
}
