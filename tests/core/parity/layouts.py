"""The layouts that are compared with one process, with the flags that make them. Runs nothing."""

from pathlib import Path
from typing import NamedTuple

from tests.runs import NO_DROPOUT, SMALL, with_flags

TP = "--tensor-model-parallel-size"
SP = "--sequence-parallel"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
A2A = ("--moe-token-dispatcher-type", "alltoall")
CP = "--context-parallel-size"
COMM = "--cp-comm-type"
GATHER = (COMM, "all_gather")
HEADS = (COMM, "a2a")
LEVELS = ("--hierarchical-context-parallel-sizes", "2", "2")
BOTH = (COMM, "a2a+p2p", *LEVELS)
PP = "--pipeline-model-parallel-size"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"
COUNTED = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
NO_OVERLAP = "--no-overlap-p2p-communication"
GPT2 = ()
UNTIED = (
    "--untie-embeddings-and-output-weights",
    "--qk-layernorm",
    "--reset-attention-mask",
    "--reset-position-ids",
    "--eod-mask-loss",
)
LLAMA = (
    "--untie-embeddings-and-output-weights",
    "--position-embedding-type",
    "rope",
    "--swiglu",
    "--normalization",
    "RMSNorm",
    "--disable-bias-linear",
    "--group-query-attention",
    "--num-query-groups",
    "4",
    "--num-attention-heads",
    "8",
)
MQA = with_flags(LLAMA, "--num-query-groups", "1")
# Options of single Hugging Face families.
OPTIONS = (
    *LLAMA,
    "--use-parallel-residual",
    "--post-self-attn-layernorm",
    "--post-mlp-layernorm",
    "--no-rope-freq",
    "[0,1]",
    "--embedding-multiplier",
    "3",
    "--residual-multiplier",
    "0.5",
    "--softmax-scale",
    "0.4",
    "--logits-scaling",
    "0.7",
)
# Sliding windows in two of three layers, wider than a chunk of cp2 and not a multiple of anything, with
# a rotary base of their own; the layer between has YaRN.
WINDOW = ("--window-size", "8", "0")
WINDOWS = (
    *(*LLAMA, "--num-layers", "3", *WINDOW, "--window-attn-skip-freq", "[1,0,1]"),
    *("--window-rotary-base", "500", "--rope-type", "yarn", "--rotary-scaling-factor", "4"),
    *("--original-max-position-embeddings", "16"),
)
# Attention sinks, caps of scores and logits that are reached, and a z-loss of capped logits.
SINKS = ("--softmax-type", "learnable")
CAPS = ("--attn-logit-softcapping", "0.5", "--final-logit-softcapping", "0.4")
SCORES = (
    *(*LLAMA, *SINKS, *CAPS, "--z-loss-coeff", "0.01", "--softmax-scale", "0.8"),
    *(*WINDOW, "--window-attn-skip-freq", "2"),
)
# Gemma 3: norms around attention and MLP, weights minus one, two rotary bases, a scaled embedding.
GEMMA = (
    *with_flags(LLAMA, "--num-layers", "3"),
    *("--post-self-attn-layernorm", "--post-mlp-layernorm", "--apply-layernorm-1p"),
    *("--qk-layernorm", "--embedding-multiplier", "8", "--softmax-scale", "0.4", *WINDOW),
    *("--window-attn-skip-freq", "[1,0,1]", "--window-rotary-base", "500"),
    *("--rotary-seq-len-interpolation-factor", "4"),
)
GEMMA = tuple("--geglu" if flag == "--swiglu" else flag for flag in GEMMA)
# Multi-head latent attention with YaRN, values of another width than keys; with experts as DeepSeek-V3.
MLA = (
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope", "--swiglu"),
    *("--normalization", "RMSNorm", "--disable-bias-linear", "--num-attention-heads", "4"),
    *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "12", "--qk-layernorm"),
    *("--qk-head-dim", "8", "--qk-pos-emb-head-dim", "6", "--v-head-dim", "10"),
    *("--rotary-scaling-factor", "4", "--original-max-position-embeddings", "16"),
    *("--mscale", "0.7", "--mscale-all-dim", "1.3"),
)
# Multi-token prediction, two depths, of which masked documents are shorter than a chunk of cp2.
DOCUMENTS = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
MTP = (*LLAMA, "--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.7")
# A gated delta net, behind it attention; documents are shorter and longer than its convolution.
DELTA = (
    *("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "2"),
    *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
    *("--linear-key-head-dim", "6", "--linear-value-head-dim", "4"),
)
GATED_DELTA = (*LLAMA, *DELTA, *DOCUMENTS)
# Norms behind attention and MLP only, and norms of all heads together (OLMo 2).
OLMO = (
    *LLAMA,
    "--no-pre-layernorm",
    "--post-self-attn-layernorm",
    "--post-mlp-layernorm",
    "--qk-layernorm",
    "--qk-layernorm-all-heads",
)
# xIELU (Apertus), norm weights minus one (Nemotron), biases and rotary positions of families.
XIELU = (
    "--xielu",
    "--qk-layernorm",
    "--apply-layernorm-1p",
    "--position-embedding-type",
    "rope",
    "--rotary-percent",
    "0.5",
    "--rotary-interleaved",
    "--disable-bias-linear",
    "--add-qkv-bias",
    "--add-attention-output-bias",
    "--add-mlp-bias",
)
MOE = (
    *LLAMA,
    "--eod-mask-loss",
    "--num-experts",
    "6",
    "--moe-layer-freq",
    "[0,1]",
    "--moe-ffn-hidden-size",
    "24",
    "--moe-shared-expert-intermediate-size",
    "16",
    "--moe-shared-expert-gate",
    "--moe-aux-loss-coeff",
    "0.05",
    "--moe-z-loss-coeff",
    "0.01",
    "--moe-per-layer-logging",
)
# Norms of rotated queries and keys, another base; softmax scores with a bias in groups of experts.
HUNYUAN = (
    *(*LLAMA, "--qk-layernorm", "--qk-layernorm-after-rope", "--rotary-ntk-alpha", "3"),
    *("--num-experts", "6", "--moe-router-topk", "3", "--moe-ffn-hidden-size", "24"),
    *("--moe-shared-expert-intermediate-size", "32", "--moe-router-enable-expert-bias"),
    *("--moe-router-num-groups", "2", "--moe-router-group-topk", "2"),
    *("--moe-router-group-score-topk", "2", "--moe-router-bias-update-rate", "0.01"),
    *("--moe-aux-loss-coeff", "0.05", "--moe-z-loss-coeff", "0.01", "--moe-per-layer-logging"),
)
# gpt-oss: biases everywhere, of router and experts too, and their own gated MLP.
GPT_OSS = (
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "4"),
    *("--num-attention-heads", "8", *WINDOW, "--window-attn-skip-freq", "2"),
    *("--quick-geglu", "--activation-func-clamp-value", "0.05", "--glu-linear-offset", "1"),
    *("--num-experts", "6", "--moe-router-topk", "3", "--moe-ffn-hidden-size", "24", *SINKS),
    *("--moe-aux-loss-coeff", "0.05", "--moe-z-loss-coeff", "0.01", "--moe-per-layer-logging"),
)
DEEP_MOE = (*with_flags(MOE, "--moe-layer-freq", "1"), "--num-layers", "4")
GLOBAL_BALANCE = ("--moe-router-load-balancing-type", "global_aux_loss")
SIGMOID_MOE = (
    *MOE,
    "--moe-router-score-function",
    "sigmoid",
    "--moe-router-topk-scaling-factor",
    "2",
)
EP_MOE = (
    *with_flags(
        SIGMOID_MOE,
        *("--num-experts", "8", "--moe-router-topk", "4"),
        *("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss"),
        *("--moe-aux-loss-coeff", "0.05", "0.03"),
    ),
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate",
    "0.01",
    "--moe-router-num-groups",
    "4",
    "--moe-router-group-topk",
    "2",
)
MLA_MOE = (*with_flags(EP_MOE, *MLA),)
DELTA_MOE = (*EP_MOE, *DELTA)
MTP_MOE = (*EP_MOE, "--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.7")
TIED_MTP = tuple(flag for flag in MTP if flag != "--untie-embeddings-and-output-weights")
# Output gates of attention; layers of one block each, on stages of two, one, one and two of them.
GATES = (*LLAMA, "--qk-layernorm", "--attention-output-gate")
BLOCKS = "--hybrid-layer-pattern"
PATTERN = (
    *with_flags(EP_MOE, "--moe-layer-freq", "1", "--num-layers", "6", BLOCKS, "*E|*|-|*E"),
    *("--qk-layernorm", "--attention-output-gate"),
)
DELTA_PATTERN = (
    *with_flags((*GATES, *DOCUMENTS), "--num-layers", "5", BLOCKS, "G-|*G-"),
    *DELTA[4:],
)
DEEP_EP_MOE = (*with_flags(EP_MOE, "--moe-layer-freq", "1"), "--num-layers", "4")
GLOBAL_MOE = (
    *with_flags(DEEP_MOE, "--moe-aux-loss-coeff", "0.05", "0.1", "0.02"),
    "--moe-router-load-balancing-type",
    "global_aux_loss",
    "seq_aux_loss",
    "aux_loss",
)
CAPACITY = ("--moe-expert-capacity-factor", "0.8")
DEEP = ("--num-layers", "4")
DEEPER = ("--num-layers", "8")
ODD = ("--num-layers", "7")
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
SELECTIVE = ("--recompute-activations",)
UP_AGAIN = ("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj")
FULL = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)
TWO_LAYERS = ("--recompute-num-layers", "2")
DISTRIBUTED = ("--use-distributed-optimizer",)
BUCKETS = (*DISTRIBUTED, "--overlap-grad-reduce", "--ddp-bucket-size", "3000")
OVERLAP = (*BUCKETS, "--overlap-param-gather")
WHOLE = ("--zero-partition", "whole-params")
SHARDING = "--data-parallel-sharding-strategy"
ZERO2 = (SHARDING, "optim_grads", "--overlap-grad-reduce")
ZERO3 = (SHARDING, "optim_grads_params", "--overlap-grad-reduce", "--overlap-param-gather")
INSTANCES = ("--num-distributed-optimizer-instances", "2")
MUON = (
    *("--optimizer", "muon", "--muon-momentum", "0.95", "--muon-use-nesterov"),
    *("--muon-extra-scale-factor", "0.2"),
)
# Runs that are stopped and resumed: the step after which they stop, and the last. Two steps behind a
# resume: the first shows what was read of weights, samples and masks, the second of the optimizer.
STOP, LAST = 2, 4
STOPPED = ("--exit-interval", str(STOP))
# Columns of the metrics that a resume in the same layout repeats exactly.
EXACT = ("iteration", "lm_loss", "grad_norm", "loss_scale", "consumed_samples")


class Case(NamedTuple):
    """`layout` on `world` ranks against the same `model` in one process; `only` are flags of the
    layout's run alone. `saves`: the last step is saved, and its weights compared."""

    model: tuple[str, ...]
    world: int
    layout: tuple[str, ...]
    steps: int = 4
    only: tuple[str, ...] = ()
    precision: str = "--fp64"
    saves: bool = False


def muon(model: tuple[str, ...], world: int, layout: tuple[str, ...]) -> Case:
    """A case with Muon. The fifth step still shows a wrong momentum of the first four: what a
    rank does otherwise than one process is in the loss of the next step."""
    return Case((*model, *MUON), world, layout, steps=5, saves=True)


def normuon(model: tuple[str, ...], world: int, layout: tuple[str, ...]) -> Case:
    """A case with NorMuon and as many steps as its second moments take to count."""
    flags = (*model, *MUON, "--muon-neuron-beta2", "0.95")
    return Case(flags, world, layout, steps=20, saves=True)


CASES = {
    "tp2": Case(GPT2, 2, (TP, "2")),
    "tp2 sp dp2, rotary swiglu RMSNorm GQA": Case(LLAMA, 4, (TP, "2", SP)),
    "dp2, distributed optimizer": Case(GPT2, 2, DISTRIBUTED),
    "dp4, distributed optimizer in 2 instances, overlap": Case(
        UNTIED, 4, (*OVERLAP, *INSTANCES, "--micro-batch-size", "1")
    ),
    "dp2, ZeRO-3": Case(GPT2, 2, ZERO3),
    "cp2, untied, masked documents": Case(UNTIED, 2, (CP, "2")),
    "cp2 a2a, untied, masked documents": Case(UNTIED, 2, (CP, "2", *HEADS)),
    "pp2": Case(GPT2, 2, (PP, "2")),
    "tp2 sp, options of families": Case(OPTIONS, 2, (TP, "2", SP)),
    "cp2 tp2 sp, windows": Case(WINDOWS, 4, (CP, "2", TP, "2", SP)),
    "cp2 tp2 sp, sinks, caps": Case(SCORES, 4, (CP, "2", TP, "2", SP)),
    "cp2, latent attention": Case(MLA, 2, (CP, "2")),
    "tp2 sp, gated delta nets, masked documents": Case(GATED_DELTA, 2, (TP, "2", SP)),
    "cp2, multi-token prediction, masked documents": Case((*MTP, *DOCUMENTS), 2, (CP, "2")),
    "pp2 dp2, stages numbered before replicas": Case(
        UNTIED, 4, (PP, "2", *OVERLAP, "--use-tp-pp-dp-mapping")
    ),
    "ep2, experts, all-to-all": Case(MOE, 2, (EP, "2", *A2A)),
    "ep2, experts, all-gather": Case(MOE, 2, (EP, "2")),
    "pp2 vpp2, a pattern of blocks, output gates": Case(PATTERN, 2, (PP, "2")),
    "tp2 sp, Gemma 3": Case(GEMMA, 2, (TP, "2", SP)),
    "tp2 sp, experts, gpt-oss": Case(GPT_OSS, 2, (TP, "2", SP)),
    "ep2 cp2, all-to-all, experts, gpt-oss": Case(GPT_OSS, 2, (EP, "2", *A2A, CP, "2")),
    "ep2 tp2 sp, all-to-all, experts, latent attention": Case(
        MLA_MOE, 2, (ETP, "1", EP, "2", *A2A, TP, "2", SP)
    ),
    "cp2 tp2 sp, experts, Hunyuan, ERNIE": Case(HUNYUAN, 4, (CP, "2", TP, "2", SP)),
    "tp2 sp, experts": Case(MOE, 2, (TP, "2", SP)),
    "tp2, experts": Case(MOE, 2, (TP, "2")),
    "cp2, experts": Case(MOE, 2, (CP, "2")),
    "dp2, experts": Case(MOE, 2, OVERLAP),
    "ep2 cp2 tp2 sp, all-to-all, experts, capacity": Case(
        (*MOE, *CAPACITY), 4, (EP, "2", *A2A, CP, "2", TP, "2", SP)
    ),
    "ep2 tp2 dp2, all-gather, experts, capacity": Case((*MOE, *CAPACITY), 4, (EP, "2", TP, "2")),
    "etp2 dp2, experts, distributed optimizer, overlap": Case(EP_MOE, 2, (ETP, "2", *OVERLAP)),
    "ep2, all-to-all, experts, their layers recomputed": Case(
        EP_MOE, 2, (EP, "2", *A2A), only=("--moe-layer-recompute",)
    ),
    "ep2 cp2 tp2 sp, experts, sinkhorn": Case(
        (
            *with_flags(MOE, "--moe-aux-loss-coeff", "0"),
            "--moe-router-load-balancing-type",
            "sinkhorn",
        ),
        4,
        (EP, "2", CP, "2", TP, "2", SP),
    ),
    # one micro-batch in both: its tokens are those of all data-parallel ranks
    "dp2, experts, global balancing loss": Case(
        (*with_flags(MOE, "--micro-batch-size", "8"), *GLOBAL_BALANCE),
        2,
        ("--micro-batch-size", "4"),
    ),
    "pp2 vpp2, experts, three balancing losses": Case(GLOBAL_MOE, 2, (PP, "2", CHUNKS, "2")),
    "ep2 cp2 tp2 sp, experts, three balancing losses, full recompute": Case(
        GLOBAL_MOE, 4, (EP, "2", *A2A, CP, "2", TP, "2", SP), only=FULL
    ),
    "pp2 vpp2, layout E|tt|t|tL": Case(DEEP, 2, (PP, "2", LAYOUT, "E|tt|t|tL")),
    "tp2, one query group": Case((*MQA, "--add-qkv-bias"), 2, (TP, "2")),
    "tp4 sp, two query groups, norms of queries and keys, full recompute": Case(
        (*with_flags(LLAMA, "--num-query-groups", "2"), "--qk-layernorm"),
        4,
        (TP, "4", SP),
        only=FULL,
    ),
    "tp2 sp, Muon": muon(LLAMA, 2, (TP, "2", SP)),
    "dp2, distributed optimizer, overlap, Muon": muon(LLAMA, 2, OVERLAP),
    "etp1 ep2 tp2 sp, all-to-all, distributed optimizer, Muon, experts": muon(
        EP_MOE, 2, (ETP, "1", EP, "2", *A2A, TP, "2", SP, *DISTRIBUTED)
    ),
}
CAMPAIGN = {
    "dp2, ZeRO-2": Case(GPT2, 2, ZERO2),
    "dp2, ZeRO-3, 4 micro-batches, two layers recomputed together": Case(
        (*LLAMA, *DEEP), 2, (*ZERO3, "--micro-batch-size", "1"), only=with_flags(FULL, *TWO_LAYERS)
    ),
    "dp2, ZeRO-3, latent attention, latents alone kept": Case(MLA, 2, ZERO3, only=UP_AGAIN),
    "dp4, ZeRO-3 in 2 instances": Case(GPT2, 4, (*ZERO3, *INSTANCES, "--micro-batch-size", "1")),
    "tp2 sp dp2, ZeRO-3": Case(LLAMA, 4, (TP, "2", SP, *ZERO3)),
    "pp2 vpp2 dp2, ZeRO-3": Case(DEEP, 4, (PP, "2", CHUNKS, "2", *ZERO3)),
    "cp2, ZeRO-3": Case(WINDOWS, 2, (CP, "2", *ZERO3)),
    "ep2, all-to-all, experts, ZeRO-2": Case(MOE, 2, (EP, "2", *A2A, *ZERO2)),
    "ep2 dp2, experts, ZeRO-3 in 2 instances": Case(EP_MOE, 4, (EP, "2", *ZERO3, *INSTANCES)),
    "dp2, ZeRO-3, Muon": muon(LLAMA, 2, ZERO3),
    "etp1 ep2 tp2 sp dp2, all-to-all, ZeRO-3, Muon, experts": muon(
        EP_MOE, 4, (ETP, "1", EP, "2", *A2A, TP, "2", SP, *ZERO3)
    ),
    "etp1 ep2 tp2 sp, all-to-all, a pattern of blocks, output gates": Case(
        PATTERN, 2, (ETP, "1", EP, "2", *A2A, TP, "2", SP)
    ),
    "pp2 dp2, distributed optimizer, overlap, a pattern of blocks, multi-token prediction": Case(
        (*with_flags(PATTERN, BLOCKS, "*E|*-*E/*E"), "--mtp-num-layers", "1"),
        4,
        (PP, "2", *OVERLAP),
        only=FULL,
    ),
    "tp4 sp, two query groups, output gates": Case(
        (*with_flags(GATES, "--num-query-groups", "2"),), 4, (TP, "4", SP), only=SELECTIVE
    ),
    "tp2 sp, output gates, Muon": muon(GATES, 2, (TP, "2", SP)),
    "pp2, a pattern of blocks, gated delta nets, masked documents": Case(
        DELTA_PATTERN, 2, (PP, "2")
    ),
    "cp4, windows, masked documents": Case((*UNTIED, *WINDOW), 4, (CP, "4")),
    "cp2 all_gather, a score of 0, selective recompute": Case(
        (*LLAMA, "--softmax-type", "off-by-one"), 2, (CP, "2", *GATHER), only=SELECTIVE
    ),
    "tp2, latent attention": Case(MLA, 2, (TP, "2")),
    "tp4 sp, latent attention, latents alone kept": Case(MLA, 4, (TP, "4", SP), only=UP_AGAIN),
    "pp2 vpp2, gated delta nets, masked documents, selective recompute": Case(
        (*GATED_DELTA, *DEEP), 2, (PP, "2", CHUNKS, "2"), only=SELECTIVE
    ),
    "dp2, ZeRO-3, gated delta nets, masked documents": Case(GATED_DELTA, 2, ZERO3),
    "ep2 tp2 sp, all-to-all, distributed optimizer, experts, gated delta nets": Case(
        DELTA_MOE, 2, (ETP, "1", EP, "2", *A2A, TP, "2", SP, *DISTRIBUTED)
    ),
    "tp2 sp, gated delta nets, Muon": muon((*LLAMA, *DELTA), 2, (TP, "2", SP)),
    "tp2, multi-token prediction, dp2": Case((*MTP, *DOCUMENTS), 4, (TP, "2")),
    "pp2, multi-token prediction, layout Ett|mmL": Case(
        MTP, 2, (PP, "2", LAYOUT, "Ett|mmL"), only=FULL
    ),
    "pp2 vpp2, multi-token prediction, tied, masked documents": Case(
        (*TIED_MTP, *DEEP, *DOCUMENTS), 2, (PP, "2", CHUNKS, "2")
    ),
    "pp3, multi-token prediction, layout Ett|mm|L": Case(MTP, 3, (PP, "3", LAYOUT, "Ett|mm|L")),
    "ep2 pp2, all-to-all, experts, multi-token prediction, distributed optimizer": Case(
        MTP_MOE, 4, (EP, "2", *A2A, PP, "2", *OVERLAP)
    ),
    "pp2 vpp2, latent attention, full recompute": Case(
        (*MLA, *DEEP), 2, (PP, "2", CHUNKS, "2"), only=FULL
    ),
    "tp2 sp dp2, distributed optimizer, latent attention, LayerNorm, queries of hidden states": Case(
        tuple(
            word
            for word in with_flags(MLA, "--normalization", "LayerNorm")
            if word not in ("--q-lora-rank", "24")
        ),
        4,
        (TP, "2", SP, *DISTRIBUTED),
    ),
    "ep2 cp2, all-to-all, experts, latent attention": Case(MLA_MOE, 2, (EP, "2", *A2A, CP, "2")),
    "pp3, Gemma 3": Case(GEMMA, 3, (PP, "3")),
    "etp1 ep2 tp2 sp dp2, all-to-all, distributed optimizer, overlap, experts, gpt-oss": Case(
        GPT_OSS, 4, (ETP, "1", EP, "2", *A2A, TP, "2", SP, *OVERLAP)
    ),
    "tp2 sp, norms of OLMo 2": Case(OLMO, 2, (TP, "2", SP), only=FULL),
    "tp2 sp, xielu": Case(XIELU, 2, (TP, "2", SP), only=FULL),
    "cp2, experts, capacity by position": Case(
        (*MOE, *CAPACITY, "--moe-token-drop-policy", "position"), 2, (CP, "2")
    ),
    "pp2 vpp2, experts, input jitter, full recompute": Case(
        (*DEEP_MOE, "--moe-input-jitter-eps", "0.1"),
        2,
        (PP, "2", CHUNKS, "2"),
        only=FULL,
    ),
    "tp2 sp dp2, fp32": Case(GPT2, 4, (TP, "2", SP), precision=""),
    "cp4 a2a, one query group": Case((*MQA,), 4, (CP, "4", *HEADS)),
    "cp2 tp2 sp a2a, two query groups, norms of queries and keys, full recompute": Case(
        (*with_flags(LLAMA, "--num-query-groups", "2"), "--qk-layernorm"),
        4,
        (CP, "2", TP, "2", SP, *HEADS),
        only=FULL,
    ),
    "cp2 a2a, sinks, caps, selective recompute": Case(SCORES, 2, (CP, "2", *HEADS), only=SELECTIVE),
    "cp2 pp2 vpp2 a2a, untied, masked documents": Case(
        UNTIED + DEEP, 4, (CP, "2", PP, "2", CHUNKS, "2", *HEADS)
    ),
    "cp2 tp2 sp a2a, latent attention, masked documents": Case(
        (*MLA, "--reset-attention-mask", "--reset-position-ids"),
        4,
        (CP, "2", TP, "2", SP, *HEADS),
    ),
    "cp4 a2a+p2p, windows, masked documents": Case((*UNTIED, *WINDOW), 4, (CP, "4", *BOTH)),
    "cp4, another communication in each layer, windows, masked documents": Case(
        (*UNTIED, *DEEP, *WINDOW, "--window-attn-skip-freq", "2"),
        4,
        (CP, "4", COMM, "p2p", "all_gather", "a2a", "a2a+p2p", *LEVELS),
    ),
    "pp4 vpp2": Case(DEEPER, 4, (PP, "4", CHUNKS, "2")),
    "pp4 vpp2, no overlap": Case(DEEPER, 4, (PP, "4", CHUNKS, "2", NO_OVERLAP)),
    "tp2 sp pp2": Case(GPT2, 4, (TP, "2", SP, PP, "2")),
    "pp2 vpp2, uneven: 1 + 2 and 2 + 2 layers": Case(ODD, 2, (PP, "2", CHUNKS, "2")),
    "pp2 vpp4, layout E|t*2|(t|)*5,L, full recompute": Case(
        ODD, 2, (PP, "2", LAYOUT, "E|t*2|(t|)*5,L"), only=FULL
    ),
    "pp2 vpp2, groups of 3 micro-batches": Case(
        DEEP, 2, (PP, "2", CHUNKS, "2", GROUP, "3", "--micro-batch-size", "1")
    ),
    "pp2 vpp2, dropout": Case(DEEP + DROPOUT, 2, (PP, "2", CHUNKS, "2")),
    "tp2 sp pp2 vpp2 dp2, distributed optimizer, experts": Case(
        DEEP_EP_MOE, 8, (TP, "2", SP, PP, "2", CHUNKS, "2", *DISTRIBUTED)
    ),
    "ep2 dp4, distributed optimizer in 2 instances, overlap, experts": Case(
        EP_MOE, 4, (EP, "2", *OVERLAP, *INSTANCES)
    ),
    "ep2 etp1 tp2 sp dp2, experts, activation functions recomputed": Case(
        EP_MOE,
        4,
        (ETP, "1", EP, "2", TP, "2", SP),
        only=(
            *("--recompute-granularity", "selective"),
            *("--recompute-modules", "moe_act", "shared_experts", "mlp"),
        ),
    ),
    "etp4 tp2 sp cp2, experts, full recompute": Case(
        EP_MOE, 4, (ETP, "4", TP, "2", SP, CP, "2"), only=FULL
    ),
    "tp2 sp dp2, distributed optimizer, overlap, rotary swiglu RMSNorm GQA": Case(
        LLAMA, 4, (TP, "2", SP, *OVERLAP)
    ),
    "tp2 sp, Muon, QKV not split": muon((*LLAMA, "--muon-no-split-qkv"), 2, (TP, "2", SP)),
    "tp2 sp, NorMuon": normuon(LLAMA, 2, (TP, "2", SP)),
    "ep2 dp4, distributed optimizer in 2 instances, overlap, Muon, experts": muon(
        EP_MOE, 4, (EP, "2", *OVERLAP, *INSTANCES)
    ),
    "tp4 sp, untied, masked documents": Case(UNTIED, 4, (TP, "4", SP)),
    "tp2 sp, latent attention": Case(MLA, 2, (TP, "2", SP)),
    "pp2 dp2, ZeRO-3": Case(GPT2, 4, (PP, "2", *ZERO3)),
    "ep2 dp2, all-to-all, experts, ZeRO-3": Case(MOE, 4, (EP, "2", *A2A, *ZERO3)),
    "tp4, gated delta nets": Case((*LLAMA, *DELTA), 4, (TP, "4"), only=FULL),
    "cp2 tp2 sp a2a, windows": Case(WINDOWS, 4, (CP, "2", TP, "2", SP, *HEADS)),
    "pp4": Case(DEEP, 4, (PP, "4")),
    "etp2 ep2 dp4, all-to-all, distributed optimizer, Muon, experts": muon(
        EP_MOE, 4, (ETP, "2", EP, "2", *A2A, *DISTRIBUTED)
    ),
}
# Rows of the table that only `make test-all` runs.
RARE = {
    "dp2, ZeRO-3 in 2 instances": Case(GPT2, 2, (*ZERO3, *INSTANCES)),
    "tp2 sp, ZeRO-3": Case(GPT2, 2, (TP, "2", SP, *ZERO3)),
    "cp2 a2a dp2, ZeRO-3, windows": Case(WINDOWS, 4, (CP, "2", *HEADS, *ZERO3)),
    "cp2 tp2 sp, output gates, masked documents": Case(
        (*GATES, *DOCUMENTS), 4, (CP, "2", TP, "2", SP)
    ),
    "pp3, windows": Case(WINDOWS, 3, (PP, "3")),
    "cp2 ep2, windows, experts": Case((*MOE, *WINDOW), 2, (CP, "2", EP, "2", *A2A)),
    "tp2 sp, sinks, caps": Case(SCORES, 2, (TP, "2", SP), only=FULL),
    "cp2 ep2, sinks, caps, experts": Case((*MOE, *SINKS, *CAPS), 2, (CP, "2", EP, "2", *A2A)),
    "tp2 sp, sinks, caps, Muon": muon(SCORES, 2, (TP, "2", SP)),
    "pp2, latent attention": Case(MLA, 2, (PP, "2")),
    "pp2, gated delta nets, masked documents": Case(GATED_DELTA, 2, (PP, "2")),
    "dp2, distributed optimizer, overlap, gated delta nets, masked documents": Case(
        GATED_DELTA, 2, OVERLAP
    ),
    "ep2, all-to-all, experts, gated delta nets": Case(DELTA_MOE, 2, (EP, "2", *A2A)),
    "pp2 dp2, distributed optimizer, overlap, multi-token prediction, layout Ettmm|L": Case(
        (*MTP, *DOCUMENTS), 4, (PP, "2", LAYOUT, "Ettmm|L", *OVERLAP), only=FULL
    ),
    "pp4 vpp2, multi-token prediction, tied, masked documents, layout E|(tt|)*3,(t|)*2mm|L": Case(
        (*TIED_MTP, *DEEPER, *DOCUMENTS), 4, (PP, "4", LAYOUT, "E|(tt|)*3,(t|)*2mm|L")
    ),
    "pp3 tp2 sp, experts, multi-token prediction, layout E|ttmm|L": Case(
        MTP_MOE, 6, (PP, "3", TP, "2", SP, LAYOUT, "E|ttmm|L")
    ),
    "cp2 tp2 sp, multi-token prediction, masked documents": Case(
        (*MTP, *DOCUMENTS), 4, (CP, "2", TP, "2", SP)
    ),
    "pp2 dp2, distributed optimizer, overlap, experts, latent attention": Case(
        MLA_MOE, 4, (PP, "2", *OVERLAP)
    ),
    "ep2 pp2, all-to-all, experts, Hunyuan, ERNIE": Case(
        HUNYUAN, 4, (EP, "2", *A2A, PP, "2"), only=FULL
    ),
    "cp2 tp2 sp, Gemma 3": Case(GEMMA, 4, (CP, "2", TP, "2", SP), only=FULL),
    "pp2, experts, gpt-oss": Case(GPT_OSS, 2, (PP, "2"), only=FULL),
    "cp2 all_gather": Case(GPT2, 2, (CP, "2", *GATHER)),
    "ep2 cp2 a2a, all-to-all, experts, gpt-oss": Case(GPT_OSS, 2, (EP, "2", *A2A, CP, "2", *HEADS)),
    "ep2 cp4 a2a+p2p, all-to-all, experts, latent attention": Case(
        MLA_MOE, 4, (EP, "2", *A2A, CP, "4", *BOTH)
    ),
    "tp2 sp pp2 vpp2 dp2, layout E|tt|tt|L, distributed optimizer, overlap": Case(
        DEEP, 8, (TP, "2", SP, PP, "2", LAYOUT, "E|tt|tt|L", *OVERLAP)
    ),
    "ep2 pp2 vpp2 dp2, all-to-all, experts": Case(
        DEEP_EP_MOE, 4, (EP, "2", *A2A, PP, "2", CHUNKS, "2")
    ),
    "ep2 tp2 cp2 pp2, experts, stages numbered before replicas": Case(
        EP_MOE, 8, (EP, "2", TP, "2", CP, "2", PP, "2", "--use-tp-pp-dp-mapping")
    ),
    "etp2 ep2 dp8, all-gather, distributed optimizer in 2 instances, overlap, experts": Case(
        (*EP_MOE, "--micro-batch-size", "1"),
        8,
        (ETP, "2", EP, "2", *OVERLAP, *INSTANCES),
    ),
    "tp2 cp2 pp2, options of families": Case(OPTIONS, 8, (TP, "2", CP, "2", PP, "2"), only=FULL),
    "dp4, distributed optimizer in 2 instances, overlap, Muon": muon(
        LLAMA, 4, (*OVERLAP, *INSTANCES)
    ),
    "tp2 sp pp2 vpp2 dp2, distributed optimizer, overlap, Muon": muon(
        (*LLAMA, *DEEP), 8, (TP, "2", SP, PP, "2", CHUNKS, "2", *OVERLAP)
    ),
    "dp2, distributed optimizer, overlap, NorMuon": normuon(LLAMA, 2, OVERLAP),
    "ep2, all-to-all, distributed optimizer, NorMuon, experts": normuon(
        EP_MOE, 2, (EP, "2", *A2A, *DISTRIBUTED)
    ),
    "dp2, ZeRO-2, no overlap": Case(UNTIED, 2, ZERO2[:2]),
    "dp2, ZeRO-3, no overlap, full recompute": Case(UNTIED, 2, ZERO3[:2], only=FULL),
    "dp2, ZeRO-3, selective recompute": Case(UNTIED, 2, ZERO3, only=SELECTIVE),
    "dp2, ZeRO-2 in 2 instances": Case(GPT2, 2, (*ZERO2, *INSTANCES)),
    "dp4, ZeRO-2 in 2 instances": Case(UNTIED, 4, (*ZERO2, *INSTANCES, "--micro-batch-size", "1")),
    "tp2 sp dp2, ZeRO-2": Case(GPT2, 4, (TP, "2", SP, *ZERO2)),
    "pp2 dp2, ZeRO-2": Case(GPT2, 4, (PP, "2", *ZERO2)),
    "pp2 vpp2 dp2, ZeRO-2": Case(DEEP, 4, (PP, "2", CHUNKS, "2", *ZERO2)),
    "cp2 dp2, ZeRO-2": Case(UNTIED, 4, (CP, "2", *ZERO2)),
    "dp2, ZeRO-2, Muon": muon(LLAMA, 2, ZERO2),
    "tp2 sp dp2, ZeRO-3, Muon": muon(LLAMA, 4, (TP, "2", SP, *ZERO3)),
    "pp2 vpp2": Case(DEEP, 2, (PP, "2", CHUNKS, "2")),
    "pp2 vpp2, experts": Case(DEEP_MOE, 2, (PP, "2", CHUNKS, "2")),
    "etp1 ep2 tp2 sp, all-to-all, experts": Case(MOE, 2, (ETP, "1", EP, "2", *A2A, TP, "2", SP)),
    "tp2 sp, windows": Case(WINDOWS, 2, (TP, "2", SP)),
    "cp2, windows, all_gather": Case(WINDOWS, 2, (CP, "2", *GATHER), only=SELECTIVE),
    "dp2, distributed optimizer, overlap, windows": Case(WINDOWS, 2, OVERLAP),
    "cp4, sinks, caps, masked documents": Case((*UNTIED, *SINKS, *CAPS), 4, (CP, "4")),
    "dp2, distributed optimizer, overlap, sinks, caps": Case(SCORES, 2, OVERLAP),
    "pp2, sinks, caps": Case(SCORES, 2, (PP, "2")),
    "cp2 tp2, latent attention, latents and core": Case(
        MLA, 4, (CP, "2", TP, "2"), only=(*UP_AGAIN, "core_attn")
    ),
    "cp2 all_gather, latent attention, masked documents": Case(
        (*MLA, "--reset-attention-mask", "--reset-position-ids"), 2, (CP, "2", *GATHER)
    ),
    "tp2 sp, multi-token prediction": Case(MTP, 2, (TP, "2", SP)),
    "dp2, distributed optimizer, overlap, multi-token prediction": Case(
        (*MTP, *DOCUMENTS), 2, OVERLAP
    ),
    "ep2, all-to-all, experts, multi-token prediction": Case(MTP_MOE, 2, (EP, "2", *A2A)),
    "tp2 sp, multi-token prediction, Muon": muon(MTP, 2, (TP, "2", SP)),
    "dp2, distributed optimizer, overlap, latent attention": Case(MLA, 2, OVERLAP),
    "tp2 sp, latent attention, Muon": muon(MLA, 2, (TP, "2", SP)),
    "dp2, distributed optimizer, overlap, experts, Hunyuan, ERNIE": Case(HUNYUAN, 2, OVERLAP),
    "dp2, distributed optimizer, overlap, Gemma 3": Case(GEMMA, 2, OVERLAP),
    "cp2 all_gather, Gemma 3, selective recompute": Case(
        GEMMA, 2, (CP, "2", *GATHER), only=SELECTIVE
    ),
    "tp2 sp, Gemma 3, Muon": muon(GEMMA, 2, (TP, "2", SP)),
    "tp2, experts, gpt-oss": Case(GPT_OSS, 2, (TP, "2")),
    "cp2, experts, gpt-oss": Case(GPT_OSS, 2, (CP, "2")),
    "dp2, distributed optimizer, overlap, experts, gpt-oss": Case(GPT_OSS, 2, OVERLAP),
    "etp2 ep2 dp4, all-gather, distributed optimizer, experts, gpt-oss": Case(
        GPT_OSS, 4, (ETP, "2", EP, "2", *DISTRIBUTED)
    ),
    "tp2 sp": Case(GPT2, 2, (TP, "2", SP)),
    "dp4, distributed optimizer in 2 instances": Case(GPT2, 4, (*DISTRIBUTED, *INSTANCES)),
    "dp4, whole parameters, overlap, rotary swiglu RMSNorm GQA": Case(LLAMA, 4, (*OVERLAP, *WHOLE)),
    "dp4, whole parameters in 2 instances": Case(GPT2, 4, (*DISTRIBUTED, *INSTANCES, *WHOLE)),
    "tp2 sp dp2, whole parameters, rotary swiglu RMSNorm GQA": Case(
        LLAMA, 4, (TP, "2", SP, *DISTRIBUTED, *WHOLE)
    ),
    "dp2, distributed optimizer, overlap, 1 micro-batch": Case(
        GPT2, 2, (*OVERLAP, "--micro-batch-size", "4")
    ),
    "dp4, distributed optimizer in 2 instances, overlap, rotary swiglu RMSNorm GQA, fp32": Case(
        LLAMA, 4, (*OVERLAP, *INSTANCES), precision=""
    ),
    "cp4, untied, masked documents": Case(UNTIED, 4, (CP, "4")),
    "cp2 a2a": Case(GPT2, 2, (CP, "2", *HEADS)),
    "cp2 dp2 a2a, distributed optimizer, overlap": Case(GPT2, 4, (CP, "2", *OVERLAP, *HEADS)),
    "cp2 a2a, latent attention, latents again": Case(
        MLA, 2, (CP, "2", *HEADS), only=(*UP_AGAIN, "core_attn")
    ),
    "cp2 a2a, rotary swiglu RMSNorm GQA, fp32": Case(LLAMA, 2, (CP, "2", *HEADS), precision=""),
    "cp4 a2a+p2p, sinks, caps": Case(SCORES, 4, (CP, "4", *BOTH)),
    "cp2, selective recompute": Case(UNTIED, 2, (CP, "2"), only=SELECTIVE),
    "cp2 tp2 sp, rotary swiglu RMSNorm GQA, fp32": Case(
        LLAMA, 4, (CP, "2", TP, "2", SP), precision=""
    ),
    "pp4, uneven: 1, 2, 2 and 2 layers": Case(ODD, 4, (PP, "4")),
    "pp4, layout E|(tt|)*2,L": Case(DEEP, 4, (PP, "4", LAYOUT, "E|(tt|)*2,L")),
    "pp2 vpp2, embedding and loss counted": Case(
        ("--num-layers", "6"), 2, (PP, "2", CHUNKS, "2", *COUNTED)
    ),
    "pp4, embedding and loss counted, untied, masked documents": Case(
        UNTIED, 4, (PP, "4", *COUNTED)
    ),
    "pp2 vpp2, full recompute": Case(DEEP, 2, (PP, "2", CHUNKS, "2"), only=FULL),
    "tp2 sp dp2, distributed optimizer, overlap, experts": Case(
        SIGMOID_MOE, 4, (TP, "2", SP, *OVERLAP)
    ),
    "cp2 tp2 sp, experts, full recompute": Case(MOE, 4, (CP, "2", TP, "2", SP), only=FULL),
    "dp4, distributed optimizer in 2 instances, overlap, experts": Case(
        MOE, 4, (*OVERLAP, *INSTANCES)
    ),
    "ep4 dp4, all-to-all, distributed optimizer, experts": Case(
        EP_MOE, 4, (EP, "4", *A2A, *DISTRIBUTED)
    ),
    "ep2 dp4, overlapped gradient reduction, experts": Case(
        EP_MOE, 4, (EP, "2", "--overlap-grad-reduce", "--ddp-bucket-size", "3000")
    ),
    "ep2 cp2, all-to-all, experts": Case(EP_MOE, 2, (EP, "2", *A2A, CP, "2")),
    "ep4 cp2 dp2, all-gather, distributed optimizer, experts": Case(
        EP_MOE, 4, (EP, "4", CP, "2", *DISTRIBUTED)
    ),
    "ep2 tp2 sp pp2 dp2, all-to-all, distributed optimizer, overlap, experts": Case(
        EP_MOE, 8, (EP, "2", *A2A, TP, "2", SP, PP, "2", *OVERLAP)
    ),
    "ep2 tp2 sp cp2, all-to-all, experts, full recompute": Case(
        EP_MOE, 4, (EP, "2", *A2A, TP, "2", SP, CP, "2"), only=FULL
    ),
    "etp1 ep4 tp2 sp dp2, all-to-all, distributed optimizer, overlap, experts": Case(
        EP_MOE, 4, (ETP, "1", EP, "4", *A2A, TP, "2", SP, *OVERLAP)
    ),
    "etp1 tp2 sp dp2, distributed optimizer, experts": Case(
        EP_MOE, 4, (ETP, "1", TP, "2", SP, *DISTRIBUTED)
    ),
    "etp2 ep2 dp4, all-to-all, distributed optimizer, experts": Case(
        EP_MOE, 4, (ETP, "2", EP, "2", *A2A, *DISTRIBUTED)
    ),
    "etp1 ep2 tp2 sp cp2 pp2 vpp2, all-to-all, experts": Case(
        DEEP_EP_MOE,
        8,
        (ETP, "1", EP, "2", *A2A, TP, "2", SP, CP, "2", PP, "2", CHUNKS, "2"),
    ),
    "ep2 dp2, all-to-all, experts, fp32": Case(EP_MOE, 2, (EP, "2", *A2A), precision=""),
    "cp2 tp2 sp pp2 vpp2, untied, masked documents": Case(
        UNTIED + DEEP, 8, (CP, "2", TP, "2", SP, PP, "2", CHUNKS, "2")
    ),
    "tp4 sp, Muon": muon(LLAMA, 4, (TP, "4", SP)),
    "tp4 sp, two query groups, Muon": muon(
        with_flags(LLAMA, "--num-query-groups", "2"), 4, (TP, "4", SP)
    ),
    "tp2, Muon": muon(GPT2, 2, (TP, "2")),
    "dp2, Muon": muon(GPT2, 2, ()),
    "dp2, overlapped gradient reduction, Muon": muon(
        GPT2, 2, ("--overlap-grad-reduce", "--ddp-bucket-size", "3000")
    ),
    "dp4, distributed optimizer, Muon": muon(LLAMA, 4, DISTRIBUTED),
    "cp2, Muon": muon(LLAMA, 2, (CP, "2")),
    "cp2 dp2, distributed optimizer, Muon": muon(LLAMA, 4, (CP, "2", *DISTRIBUTED)),
    "pp2, Muon": muon(GPT2, 2, (PP, "2")),
    "pp2 vpp2, Muon": muon(DEEP, 2, (PP, "2", CHUNKS, "2")),
    "tp2 sp dp2, distributed optimizer, overlap, Muon": muon(LLAMA, 4, (TP, "2", SP, *OVERLAP)),
    "tp2 cp2, Muon": muon(LLAMA, 4, (TP, "2", CP, "2")),
    "pp2, NorMuon": normuon(LLAMA, 2, (PP, "2")),
    "ep2, all-to-all, Muon, experts": muon(MOE, 2, (EP, "2", *A2A)),
    "tp2 sp, Muon, experts": muon(MOE, 2, (TP, "2", SP)),
    "etp1 tp2 sp, Muon, experts": muon(EP_MOE, 2, (ETP, "1", TP, "2", SP)),
    "dp4, distributed optimizer, overlap, Muon, experts": muon(EP_MOE, 4, OVERLAP),
    "ep4 dp4, all-to-all, distributed optimizer, Muon, experts": muon(
        EP_MOE, 4, (EP, "4", *A2A, *DISTRIBUTED)
    ),
}
SWEEP = {
    "dp2, ZeRO-3, multi-token prediction, full recompute": Case(MTP, 2, ZERO3, only=FULL),
    "pp2 dp2, ZeRO-3, multi-token prediction, tied": Case(TIED_MTP, 4, (PP, "2", *ZERO3)),
    "ep2 dp2, all-to-all, experts, ZeRO-2, multi-token prediction": Case(
        MTP_MOE, 4, (EP, "2", *A2A, *ZERO2)
    ),
    "tp4": Case(GPT2, 4, (TP, "4")),
    "tp4 sp, rotary swiglu RMSNorm GQA": Case(LLAMA, 4, (TP, "4", SP)),
    "tp2 sp, full recompute": Case(LLAMA, 2, (TP, "2", SP), only=FULL),
    "dp4, distributed optimizer": Case(GPT2, 4, DISTRIBUTED),
    "dp2, distributed optimizer, overlap, 4 micro-batches": Case(
        GPT2, 2, (*OVERLAP, "--micro-batch-size", "1")
    ),
    "cp2": Case(GPT2, 2, (CP, "2")),
    "cp2 tp2 sp": Case(GPT2, 4, (CP, "2", TP, "2", SP)),
    "pp2, layout Ettt|tL": Case(DEEP, 2, (PP, "2", LAYOUT, "Ettt|tL")),
    "pp2, layout E|t*4,L": Case(DEEP, 2, (PP, "2", LAYOUT, "E|t*4,L")),
    "pp2 vpp2, layout Et|t|t|tL, rotary swiglu RMSNorm GQA": Case(
        LLAMA + DEEP, 2, (PP, "2", LAYOUT, "Et|t|t|tL")
    ),
    "pp2, untied, masked documents": Case(UNTIED, 2, (PP, "2")),
    "tp2 sp pp2, rotary swiglu RMSNorm GQA": Case(LLAMA, 4, (TP, "2", SP, PP, "2")),
    "tp2 cp2 pp2, experts": Case(SIGMOID_MOE, 8, (TP, "2", CP, "2", PP, "2")),
    "ep2 dp4, all-to-all, distributed optimizer, overlap, experts": Case(
        EP_MOE, 4, (EP, "2", *A2A, *OVERLAP)
    ),
    "ep2 dp8, all-to-all, distributed optimizer in 2 instances, experts": Case(
        (*EP_MOE, "--micro-batch-size", "1"),
        8,
        (EP, "2", *A2A, *DISTRIBUTED, *INSTANCES),
    ),
    "ep2 tp2 sp dp2, all-to-all, experts": Case(EP_MOE, 4, (EP, "2", *A2A, TP, "2", SP)),
    "ep2 tp2 dp2, all-gather, experts": Case(EP_MOE, 4, (EP, "2", TP, "2")),
    "etp1 tp2 sp, distributed optimizer, experts": Case(
        EP_MOE, 2, (ETP, "1", TP, "2", SP, *DISTRIBUTED)
    ),
    "etp1 ep2 tp2 sp dp2 pp2, experts, stages numbered before replicas": Case(
        EP_MOE, 8, (ETP, "1", EP, "2", TP, "2", SP, PP, "2", "--use-tp-pp-dp-mapping")
    ),
    "tp2 cp2 pp2, xielu": Case(XIELU, 8, (TP, "2", CP, "2", PP, "2")),
    "tp2 cp2 pp2, norms of OLMo 2": Case(OLMO, 8, (TP, "2", CP, "2", PP, "2")),
    "tp2 sp pp2 dp2, distributed optimizer, overlap": Case(
        GPT2, 8, (TP, "2", SP, PP, "2", *OVERLAP)
    ),
    "pp4 vpp2, fp32": Case(DEEPER, 4, (PP, "4", CHUNKS, "2"), precision=""),
    "tp4 sp": Case(GPT2, 4, (TP, "4", SP)),
    "tp2 dp2": Case(GPT2, 4, (TP, "2")),
    "tp2 sp dp2": Case(GPT2, 4, (TP, "2", SP)),
    "tp2, untied": Case(UNTIED, 2, (TP, "2")),
    "tp2 sp dp2, untied": Case(UNTIED, 4, (TP, "2", SP)),
    "tp2, rotary swiglu RMSNorm GQA": Case(LLAMA, 2, (TP, "2")),
    "tp2 sp, selective recompute": Case(GPT2, 2, (TP, "2", SP), only=SELECTIVE),
    "tp2 sp, one large micro-batch": Case(GPT2, 2, (TP, "2", SP, "--micro-batch-size", "8")),
    "tp4, rotary swiglu RMSNorm GQA, fp32": Case(LLAMA, 4, (TP, "4"), precision=""),
    "dp4, overlapped gradient reduction": Case(
        GPT2, 4, ("--overlap-grad-reduce", "--ddp-bucket-size", "3000")
    ),
    "dp4, distributed optimizer, overlap": Case(GPT2, 4, OVERLAP),
    "dp2, distributed optimizer, overlap, full recompute": Case(GPT2, 2, OVERLAP, only=FULL),
    "tp2 sp dp2, distributed optimizer, overlap": Case(GPT2, 4, (TP, "2", SP, *OVERLAP)),
    "pp2 dp2, distributed optimizer, overlap": Case(GPT2, 4, (PP, "2", *OVERLAP)),
    "cp2 dp2, distributed optimizer in 2 instances, overlap": Case(
        UNTIED, 4, (CP, "2", *OVERLAP, *INSTANCES)
    ),
    "cp2, distributed optimizer, untied, masked documents": Case(
        UNTIED, 2, (CP, "2", *DISTRIBUTED)
    ),
    "cp4": Case(GPT2, 4, (CP, "4")),
    "cp2 dp2": Case(GPT2, 4, (CP, "2")),
    "cp2 tp2 sp dp2": Case(GPT2, 8, (CP, "2", TP, "2", SP)),
    "cp8, one large micro-batch": Case(GPT2, 8, (CP, "8", "--micro-batch-size", "8")),
    "cp2, rotary swiglu RMSNorm GQA": Case(LLAMA, 2, (CP, "2")),
    "cp2 tp2, rotary swiglu RMSNorm GQA, all_gather": Case(LLAMA, 4, (CP, "2", TP, "2", *GATHER)),
    "cp2 tp2 sp, untied, masked documents, all_gather": Case(
        UNTIED, 4, (CP, "2", TP, "2", SP, *GATHER)
    ),
    "cp2 tp2 sp, full recompute": Case(LLAMA, 4, (CP, "2", TP, "2", SP), only=FULL),
    "cp4, fp32": Case(GPT2, 4, (CP, "4"), precision=""),
    "pp2 vpp4": Case(DEEPER, 2, (PP, "2", PER_CHUNK, "1")),
    "pp2, no overlap": Case(GPT2, 2, (PP, "2", NO_OVERLAP)),
    "pp2 dp2": Case(GPT2, 4, (PP, "2")),
    "tp2 sp pp2 vpp2 dp2": Case(DEEP, 8, (TP, "2", SP, PP, "2", CHUNKS, "2")),
    "pp2, uneven: 2 and 5 layers": Case(
        ODD, 2, (PP, "2", "--decoder-first-pipeline-num-layers", "2")
    ),
    "pp4, uneven: 2, 2, 2 and 1 layers": Case(
        ODD, 4, (PP, "4", "--decoder-last-pipeline-num-layers", "1")
    ),
    "pp2 vpp2, untied, masked documents": Case(UNTIED + DEEP, 2, (PP, "2", CHUNKS, "2")),
    "pp2, rotary swiglu RMSNorm GQA": Case(LLAMA, 2, (PP, "2")),
    "pp2 vpp2, selective recompute": Case(DEEP, 2, (PP, "2", CHUNKS, "2"), only=SELECTIVE),
    "pp2, one micro-batch": Case(GPT2, 2, (PP, "2", "--micro-batch-size", "8")),
    "pp4, one micro-batch": Case(DEEP, 4, (PP, "4", "--micro-batch-size", "8")),
    "pp2, dropout": Case(GPT2 + DROPOUT, 2, (PP, "2")),
    "pp2 vpp2 dp2, distributed optimizer, overlap": Case(DEEP, 4, (PP, "2", CHUNKS, "2", *OVERLAP)),
    "cp2 pp2": Case(GPT2, 4, (CP, "2", PP, "2")),
    "pp2, fp32": Case(GPT2, 2, (PP, "2"), precision=""),
}
LAYOUTS = CASES | CAMPAIGN | RARE | SWEEP


def argv(data: str, model: tuple[str, ...], steps: int, *more: str) -> list[str]:
    """The flags of one process. Gradients are clipped in every step, so that a wrong norm changes
    the loss too."""
    return with_flags(
        [
            *SMALL,
            *NO_DROPOUT,
            "--clip-grad",
            "0.25",
            "--eval-interval",
            "1000",
            "--log-num-zeros-in-grad",
            "--data-path",
            data,
            "--split",
            "90,10,0",
            "--train-iters",
            str(steps),
        ],
        *model,
        *more,
    )


def saved(folder: Path) -> tuple[str, ...]:
    """Flags that save every STOP steps where `Finished` looks for it."""
    return ("--save", str(folder / "save"), "--save-interval", str(STOP))
