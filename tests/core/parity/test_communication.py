"""What every rank of real runs sends in a step: against numbers worked out by hand, and the plan's
formulas against that.

The model: 2 layers of width h = 32 (4 heads of 8, MLP 128), sequence 32, micro-batches of 2
samples: 64 tokens; hidden states of a micro-batch are 64 x 32 x 4 = 8192 bytes in float32. 8
samples a step are 4 micro-batches on one replica.

Parameters of a layer, split over tensor-parallel ranks: QKV 96 x 32 and 96, projection 32 x 32, MLP
128 x 32 and 128 and 32 x 128, together 12512; whole on every rank: two norms 4 x 32, biases 32 +
32, together 192. Embedding: 216 rows of 32 (211 padded to a multiple of 8; 224 with TP 2 and 4) =
6912, positions 32 x 32 = 1024, final norm 64. All: 6912 + 1024 + 2 x 12704 + 64 = 33408 elements =
133632 bytes.
"""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from megatron.arguments import config_from, parse_typed
from megatron.config import command_line
from megatron.config.plan import transfers
from megatron.config.plan.plan import embedding_stages, make_plan
from megatron.features.registry import RunConfig
from tests import recorder
from tests.core.parity.layouts import (
    GATED_DELTA,
    LAYOUT,
    LEVELS,
    MLA,
    MTP,
    MUON,
    TIED_MTP,
    UP_AGAIN,
    ZERO2,
    ZERO3,
)
from tests.runs import NO_DROPOUT, SMALL, train, with_flags, write_text

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
A2A = ("--moe-token-dispatcher-type", "alltoall")
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
CP = "--context-parallel-size"
SP = "--sequence-parallel"
SHARDED = ("--use-distributed-optimizer",)
EXPERTS = (
    "--disable-bias-linear",
    "--num-experts",
    "8",
    "--moe-ffn-hidden-size",
    "24",
    "--moe-shared-expert-intermediate-size",
    "16",
    "--moe-aux-loss-coeff",
    "0.1",
)
FULL = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
)
# (operation, ranks, dtype, bytes): calls in a step
Sent = dict[tuple[str, tuple[int, ...], str, int], int]
F32 = "float32"
F64 = "float64"


class Case(NamedTuple):
    """`flags` on `world` ranks; `sent`: all that a rank of these sends and receives in a step."""

    world: int
    flags: tuple[str, ...]
    sent: dict[int, Sent]


def sums(ranks: tuple[int, ...], *nbytes: int, dtype: str = F32) -> Sent:
    """One all-reduce of each of these sizes."""
    return dict(Counter(("all-reduce", ranks, dtype, size) for size in nbytes))


def loss_of(ranks: tuple[int, ...], micro_batches: int, tokens: int = 64) -> Sent:
    """Of a vocabulary in parts: the largest logit of each token, then its sum and its label's
    logit, in float32."""
    return {
        ("all-reduce", ranks, F32, 4 * tokens): micro_batches,
        ("all-reduce", ranks, F32, 8 * tokens): micro_batches,
    }


def links(
    me: int, peer: int, nbytes: int, sends: int, receives: int | None = None, dtype: str = F32
) -> Sent:
    """Messages to and from a neighbour."""
    return {
        ("send", (me, peer), dtype, nbytes): sends,
        ("receive", (me, peer), dtype, nbytes): receives or sends,
    }


def world(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


def ends_of(ranks: tuple[int, ...], everyone: int) -> Sent:
    """The gradient norm's square (8 bytes) over the ranks that share a model; loss, tokens and 5
    requests (56) over all."""
    return dict(Counter(sums(ranks, 8, dtype=F64)) + Counter(sums(world(everyone), 56, dtype=F64)))


TWO = (0, 1)
CASES = {
    # One sum of all gradients.
    "dp2": Case(2, (), {1: sums(TWO, 133632) | sums(TWO, 56, dtype=F64)}),
    # A micro-batch sums 2 results forward and 2 gradients backward in each of 2 layers, the
    # embedding's result and the output layer's gradient: 10, times 4 micro-batches.
    "tp2": Case(
        2, (TP, "2"), {0: {("all-reduce", TWO, F32, 8192): 40} | loss_of(TWO, 4) | ends_of(TWO, 2)}
    ),
    # Each layer gathers 2 inputs forward and the same again backward, and 2 gradients: 6; the
    # embedding 1 gradient, the output layer its input twice: 15. Scattered sums: 2 results and 2
    # gradients of a layer, 1 + 1: 10. Gradients of what is whole on both ranks: 2 x 192 + 1024 + 64
    # = 1472 elements.
    "tp2 sp": Case(
        2,
        (TP, "2", SP),
        {
            1: {("all-gather", TWO, F32, 8192): 60, ("reduce-scatter", TWO, F32, 8192): 40}
            | sums(TWO, 5888)
            | loss_of(TWO, 4)
            | ends_of(TWO, 2)
        },
    ),
    # Forward again, but for the last sum of a layer: one more for each of 2 layers: 12, times 4. In
    # bf16 hidden states are half as large, the loss is in float32.
    "tp2, full recompute, bf16": Case(
        2,
        (TP, "2", *FULL, "1", "--bf16"),
        {0: {("all-reduce", TWO, "bfloat16", 4096): 48} | loss_of(TWO, 4) | ends_of(TWO, 2)},
    ),
    # 216 rows of the embedding on both stages are summed: 27648 bytes. 4 hidden states there, 4
    # gradients back.
    # The 32 + 2 x 8 queries, keys and values of both ranks are gathered in each of 2 layers, forward and
    # again, and their gradients summed, times 4.
    "tp2, one query group, full recompute": Case(
        2,
        (TP, "2", *FULL, "1", "--group-query-attention"),
        {
            0: {
                ("all-reduce", TWO, F32, 8192): 48,
                ("all-gather", TWO, F32, 12288): 16,
                ("reduce-scatter", TWO, F32, 12288): 8,
            }
            | loss_of(TWO, 4)
            | ends_of(TWO, 2)
        },
    ),
    "pp2": Case(
        2,
        (PP, "2"),
        {
            0: links(0, 1, 8192, 4) | sums(TWO, 27648) | ends_of(TWO, 2),
            1: links(1, 0, 8192, 4) | sums(TWO, 27648) | ends_of(TWO, 2),
        },
    ),
    # All gradients go to where they are needed, each rank's half of the weights to the other (gloo
    # gathers by messages).
    "dp2, distributed optimizer": Case(
        2,
        SHARDED,
        {0: {("reduce-scatter", TWO, F32, 133632): 1} | links(0, 1, 66816, 1) | ends_of(TWO, 2)},
    ),
    # K and V of 16 positions of 2 samples, 2 x 16 x 2 x 32 elements, go over in 2 parts of 4096
    # bytes: forward, backward and the gradients of them: 6 a layer, times 2 layers and 4
    # micro-batches.
    "cp2": Case(
        2, (CP, "2"), {0: links(0, 1, 4096, 48) | sums(TWO, 133632) | sums(TWO, 56, dtype=F64)}
    ),
}
MORE = {
    "dp8": Case(
        8,
        ("--global-batch-size", "16"),
        {5: sums(world(8), 133632) | sums(world(8), 56, dtype=F64)},
    ),
    # One run of 2 layers: 4 gathers and 3 scattered sums again.
    "tp2 sp, full recompute of 2 layers": Case(
        2,
        (TP, "2", SP, *FULL, "2"),
        {
            0: {("all-gather", TWO, F32, 8192): 76, ("reduce-scatter", TWO, F32, 8192): 52}
            | sums(TWO, 5888)
            | loss_of(TWO, 4)
            | ends_of(TWO, 2)
        },
    ),
    "tp2 sp, selective recompute": Case(
        2,
        (TP, "2", SP, "--recompute-activations"),
        {
            0: {("all-gather", TWO, F32, 8192): 60, ("reduce-scatter", TWO, F32, 8192): 40}
            | sums(TWO, 5888)
            | loss_of(TWO, 4)
            | ends_of(TWO, 2)
        },
    ),
    # fp16: the ranks also agree on the largest overflow flag, and with --log-num-zeros-in-grad on
    # the zeros.
    "tp2, fp16, zeros counted": Case(
        2,
        (TP, "2", "--fp16", "--initial-loss-scale", "16", "--log-num-zeros-in-grad"),
        {
            0: {("all-reduce", TWO, "float16", 4096): 40}
            | loss_of(TWO, 4)
            | {("all-reduce", TWO, F64, 8): 3, ("all-reduce", TWO, F64, 56): 1}
        },
    ),
    # 2 replicas of 4 ranks, 2 micro-batches each. A quarter of the embedding 224 x 32 and of what
    # is split of 2 layers; 24 of the 96 QKV biases take the room of 32: 1792 + 2 x (768 + 32 + 256
    # + 1024 + 32 + 1024) = 8064 elements.
    "tp4 sp dp2": Case(
        8,
        (TP, "4", SP),
        {
            6: {
                ("all-gather", (4, 5, 6, 7), F32, 8192): 30,
                ("reduce-scatter", (4, 5, 6, 7), F32, 8192): 20,
            }
            | sums((4, 5, 6, 7), 5888)
            | sums((2, 6), 32256, 5888)
            | loss_of((4, 5, 6, 7), 2)
            | ends_of((4, 5, 6, 7), 8)
        },
    ),
    "tp4 dp1": Case(
        4,
        (TP, "4"),
        {
            3: {("all-reduce", world(4), F32, 8192): 40}
            | loss_of(world(4), 4)
            | ends_of(world(4), 4)
        },
    ),
    # 8 layers in 4 stages of 2 chunks: 8 hidden states (of 2 chunks and 4 micro-batches) to the
    # next stage; the last one sends those of its first chunk to the first, and so on with
    # gradients.
    "pp4 vpp2, untied": Case(
        4,
        (
            PP,
            "4",
            "--num-layers",
            "8",
            "--num-layers-per-virtual-pipeline-stage",
            "1",
            "--untie-embeddings-and-output-weights",
        ),
        {
            0: links(0, 1, 8192, 8) | links(0, 3, 8192, 4) | ends_of(world(4), 4),
            1: links(1, 2, 8192, 8) | links(1, 0, 8192, 8) | ends_of(world(4), 4),
            3: links(3, 2, 8192, 8) | links(3, 0, 8192, 4) | ends_of(world(4), 4),
        },
    ),
    # Hidden states between stages are split over the tensor-parallel ranks too: 4096 bytes.
    "tp2 sp pp2": Case(
        4,
        (TP, "2", SP, PP, "2"),
        {
            # stage 0, per micro-batch: gathers 6 + 1, scattered sums 4 + 1. Its whole parameters:
            # 192 + 1024; embedding 112 x 32
            0: {("all-gather", TWO, F32, 8192): 28, ("reduce-scatter", TWO, F32, 8192): 20}
            | links(0, 2, 4096, 4)
            | sums(TWO, 4864)
            | sums((0, 2), 14336)
            | ends_of(world(4), 4),
            # stage 1: gathers 6 + 2, scattered sums 4 + 1, the loss. Whole: 192 + 64
            3: {("all-gather", (2, 3), F32, 8192): 32, ("reduce-scatter", (2, 3), F32, 8192): 20}
            | links(3, 1, 4096, 4)
            | sums((2, 3), 1024)
            | sums((1, 3), 14336)
            | loss_of((2, 3), 4)
            | ends_of(world(4), 4),
        },
    ),
    # Gradients in float32, weights in bf16: a quarter of 66816 bytes to each of 3 others.
    "dp4, distributed optimizer, bf16": Case(
        4,
        (*SHARDED, "--bf16"),
        {
            2: {("reduce-scatter", world(4), F32, 133632): 1}
            | ends_of(world(4), 4)
            | {
                (kind, (2, peer), "bfloat16", 16704): 1
                for kind in ("send", "receive")
                for peer in (0, 1, 3)
            }
        },
    ),
    "dp8, distributed optimizer": Case(
        8,
        (*SHARDED, "--global-batch-size", "16"),
        {
            0: {("reduce-scatter", world(8), F32, 133632): 1}
            | ends_of(world(8), 8)
            | {
                (kind, (0, peer), F32, 16704): 1
                for kind in ("send", "receive")
                for peer in range(1, 8)
            }
        },
    ),
    # Two pairs; the halves of the sums are added up between the pairs. The model's norm is summed
    # in a pair.
    "dp4, distributed optimizer in 2 instances": Case(
        4,
        (*SHARDED, "--num-distributed-optimizer-instances", "2"),
        {
            3: {("reduce-scatter", (2, 3), F32, 133632): 1}
            | sums((1, 3), 66816)
            | links(3, 2, 66816, 1)
            | ends_of((2, 3), 4)
        },
    ),
    # Two layers of experts and a shared one: the plan's formulas.
    "experts, tp2": Case(2, (TP, "2", *EXPERTS), {}),
    "experts, tp2 sp cp2": Case(4, (TP, "2", SP, CP, "2", *EXPERTS), {}),
    "experts, tp2 sp pp2": Case(4, (TP, "2", SP, PP, "2", *SHARDED, *EXPERTS), {}),
    "experts, ep2 dp4, all-to-all": Case(4, (EP, "2", *A2A, *SHARDED, *EXPERTS), {}),
    "experts, ep2 cp2 dp2": Case(4, (EP, "2", CP, "2", *EXPERTS), {}),
    "experts, ep2 tp2 sp cp2, capacity": Case(
        4, (EP, "2", TP, "2", SP, CP, "2", *EXPERTS, "--moe-expert-capacity-factor", "2"), {}
    ),
    "experts, tp2 sp cp2, sinkhorn": Case(
        4,
        (
            *(TP, "2", SP, CP, "2"),
            *with_flags(EXPERTS, "--moe-aux-loss-coeff", "0"),
            "--moe-router-load-balancing-type",
            "sinkhorn",
        ),
        {},
    ),
    "experts, cp2 dp2, two balancing losses": Case(
        4,
        (
            CP,
            "2",
            *with_flags(EXPERTS, "--moe-aux-loss-coeff", "0.1", "0.1"),
            "--moe-router-load-balancing-type",
            "global_aux_loss",
            "seq_aux_loss",
        ),
        {},
    ),
    "experts, ep2 dp2, all-to-all, recomputed": Case(
        2, (EP, "2", *A2A, *EXPERTS, "--moe-layer-recompute"), {}
    ),
    "experts, ep2 tp2 dp2, recomputed": Case(
        4, (EP, "2", TP, "2", *EXPERTS, "--moe-layer-recompute"), {}
    ),
    "experts, ep2 tp2 sp dp2, recomputed": Case(
        4, (EP, "2", TP, "2", SP, *EXPERTS, "--moe-layer-recompute"), {}
    ),
    "experts, etp1 tp2 sp dp2": Case(4, (ETP, "1", TP, "2", SP, *SHARDED, *EXPERTS), {}),
    "experts, etp2 ep2 dp4, all-to-all": Case(4, (ETP, "2", EP, "2", *A2A, *SHARDED, *EXPERTS), {}),
    "experts, ep2 tp2 sp dp4": Case(
        8, (EP, "2", TP, "2", SP, *SHARDED, "--overlap-grad-reduce", *EXPERTS), {}
    ),
    # The same bytes, whether they travel during backward and forward or after.
    "dp2, distributed optimizer, overlap": Case(
        2,
        (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"),
        {0: {("reduce-scatter", TWO, F32, 133632): 1} | links(0, 1, 66816, 1) | ends_of(TWO, 2)},
    ),
    # Each rank's range goes to it once and comes from it once, however large it is.
    "dp2, whole parameters": Case(
        2,
        (
            *SHARDED,
            "--zero-partition",
            "whole-params",
            "--overlap-grad-reduce",
            "--ddp-bucket-size",
            "9000",
        ),
        {},
    ),
    # In each of 2 micro-batches: reduced are the embedding (7936 elements, which the tied output layer
    # uses), 2 layers (12704) and the final norm (64); a half of each is gathered, of the embedding and
    # the first layer twice, which are freed between forward and backward.
    "dp2, ZeRO-3": Case(
        2,
        ZERO3,
        {
            0: {
                ("reduce-scatter", TWO, F32, 31744): 2,
                ("reduce-scatter", TWO, F32, 50816): 4,
                ("reduce-scatter", TWO, F32, 256): 2,
            }
            | links(0, 1, 15872, 4)
            | links(0, 1, 25408, 6)
            | links(0, 1, 128, 2)
            | ends_of(TWO, 2)
        },
    ),
    # Not tied: the output layer (6912) is of the final norm's unit, which stays between forward and
    # backward, as the last layer does; the gradient of the embedding takes no weights.
    "dp2, ZeRO-3, untied": Case(
        2,
        (*ZERO3, "--untie-embeddings-and-output-weights"),
        {
            0: {
                ("reduce-scatter", TWO, F32, 31744): 2,
                ("reduce-scatter", TWO, F32, 50816): 4,
                ("reduce-scatter", TWO, F32, 27904): 2,
            }
            | links(0, 1, 15872, 2)
            | links(0, 1, 25408, 6)
            | links(0, 1, 13952, 2)
            | ends_of(TWO, 2)
        },
    ),
    "dp2, ZeRO-3, multi-token prediction": Case(2, (*ZERO3, *MTP), {}),
    "pp2 dp2, ZeRO-3, multi-token prediction, tied": Case(4, (PP, "2", *ZERO3, *TIED_MTP), {}),
    "tp2 sp dp4, ZeRO-2 in 2 instances": Case(
        8, (TP, "2", SP, *ZERO2, "--num-distributed-optimizer-instances", "2"), {}
    ),
    "pp2 dp2, ZeRO-3, full recompute": Case(4, (PP, "2", *ZERO3, *FULL, "1"), {}),
    "experts, ep2 dp4, all-to-all, ZeRO-3, Muon": Case(
        4, (EP, "2", *A2A, *ZERO3, *EXPERTS, *MUON), {}
    ),
    # Tensor-parallel ranks gather the momenta of all matrices, or of those that a rank owns, of
    # which each has as many here.
    "tp2 sp, Muon": Case(2, (TP, "2", SP, *MUON), {}),
    "tp2 sp, NorMuon": Case(2, (TP, "2", SP, *MUON, "--muon-neuron-beta2", "0.95"), {}),
    "tp2 dp2, distributed optimizer, Muon": Case(4, (TP, "2", *SHARDED, *MUON), {}),
    "experts, ep2 dp4, distributed optimizer, Muon": Case(
        4, (EP, "2", *A2A, *SHARDED, *EXPERTS, *MUON), {}
    ),
    "experts, etp2 dp4, distributed optimizer, Muon": Case(
        4, (ETP, "2", *A2A, *SHARDED, *EXPERTS, *MUON), {}
    ),
    "tp2 sp, multi-token prediction": Case(2, (TP, "2", SP, *MTP), {}),
    "pp2 tp2, multi-token prediction": Case(4, (PP, "2", TP, "2", *MTP), {}),
    "pp3 tp2 sp, multi-token prediction, layout Ett|mm|L": Case(
        6, (PP, "3", TP, "2", SP, LAYOUT, "Ett|mm|L", *MTP), {}
    ),
    "tp2 sp, latent attention": Case(2, (TP, "2", SP, *MLA), {}),
    "tp2 sp, gated delta nets": Case(2, (TP, "2", SP, *GATED_DELTA), {}),
    "tp2 pp2, gated delta nets, full recompute": Case(
        4, (TP, "2", PP, "2", *GATED_DELTA, *FULL, "1"), {}
    ),
    "tp2, latent attention, up projections again": Case(2, (TP, "2", *MLA, *UP_AGAIN), {}),
    "cp2 tp2 sp, latent attention, latents and core again": Case(
        4, (CP, "2", TP, "2", SP, *MLA, *UP_AGAIN, "core_attn"), {}
    ),
    # Parts of 8 positions: 2048 bytes, 3 hops: 2 x 3 forward, twice that backward, 2 layers, 4
    # micro-batches.
    "cp4": Case(
        4,
        (CP, "4"),
        {
            1: {("send", (1, 2), F32, 2048): 144, ("receive", (1, 0), F32, 2048): 144}
            | sums(world(4), 133632)
            | sums(world(4), 56, dtype=F64)
        },
    ),
    # 4 positions see 3 before them: chunk 0 is seen by chunk 1, and chunk 2 by chunk 3, on the other
    # rank: 3 rows of 2 samples, 2 x 3 x 2 x 32 elements, forward and backward, and their gradients.
    "cp2, windows": Case(
        2,
        (CP, "2", "--window-size", "3", "0"),
        {0: links(0, 1, 1536, 24) | sums(TWO, 133632) | sums(TWO, 56, dtype=F64)},
    ),
    # 2 rows of 2 samples of an early chunk to the next rank, and of a late one to the rank before.
    "cp4, windows": Case(
        4,
        (CP, "4", "--window-size", "2", "0"),
        {
            0: links(0, 1, 1024, 24) | sums(world(4), 133632) | sums(world(4), 56, dtype=F64),
            1: links(1, 0, 1024, 24)
            | links(1, 2, 1024, 24)
            | sums(world(4), 133632)
            | sums(world(4), 56, dtype=F64),
        },
    ),
    # A window of two and a half chunks; and every second layer is a ring.
    "cp4, windows wider than chunks": Case(
        4,
        (CP, "4", "--window-size", "9", "0", "--window-attn-skip-freq", "2"),
        {},
    ),
    # Q, K and V of 16 positions of 2 samples, 32 channels each: 12288 bytes there, the result's 4096
    # back; forward and backward, 2 layers, 4 micro-batches.
    "cp2, a2a": Case(
        2,
        (CP, "2", "--cp-comm-type", "a2a"),
        {
            0: {("reduce-scatter", TWO, F32, nbytes): 16 for nbytes in (12288, 4096)}
            | sums(TWO, 133632)
            | sums(TWO, 56, dtype=F64)
        },
    ),
    "cp2 tp2 sp, a2a, latent attention, latents and core again": Case(
        4,
        (CP, "2", TP, "2", SP, "--cp-comm-type", "a2a", *MLA, *UP_AGAIN, "core_attn"),
        {},
    ),
    "cp2, a2a, full recompute, bf16": Case(
        2, (CP, "2", "--cp-comm-type", "a2a", "--bf16", *FULL, "1"), {}
    ),
    "cp4, another communication in each layer": Case(
        4,
        (
            *(CP, "4", "--num-layers", "4", "--window-size", "9", "0"),
            *("--window-attn-skip-freq", "[0,0,0,1]"),
            *("--cp-comm-type", "p2p", "a2a", "a2a+p2p", "a2a+p2p", *LEVELS),
        ),
        {},
    ),
    # K and V of both ranks, 16384 bytes, forward and backward; their gradients back once.
    "cp2, all_gather": Case(
        2,
        (CP, "2", "--cp-comm-type", "all_gather"),
        {
            1: {("all-gather", TWO, F32, 16384): 16, ("reduce-scatter", TWO, F32, 16384): 8}
            | sums(TWO, 133632)
            | sums(TWO, 56, dtype=F64)
        },
    ),
    # 2 key/value heads instead of 4: half as much to send; in bf16 half again, but not gradients.
    "cp2, GQA, bf16, full recompute": Case(
        2,
        (CP, "2", "--group-query-attention", "--num-query-groups", "2", "--bf16", *FULL, "1"),
        {
            # forward twice and backward once: 3 x 2 parts of 1024 bytes; gradients in float32 2 x
            # 2048. QKV has 64 rows instead of 96: 2 x 32 x 33 parameters less, 31296
            0: links(0, 1, 1024, 48, dtype="bfloat16")
            | links(0, 1, 2048, 16)
            | sums(TWO, 125184)
            | sums(TWO, 56, dtype=F64)
        },
    ),
    # 2 micro-batches. Buckets of stage 0: split weights 6256 padded to 2 x 16: 6272 elements;
    # embedding 3584; whole 1216.
    "tp2 sp pp2 dp2, distributed optimizer": Case(
        8,
        (TP, "2", SP, PP, "2", *SHARDED),
        {
            0: {("all-gather", TWO, F32, 8192): 14, ("reduce-scatter", TWO, F32, 8192): 10}
            | links(0, 4, 4096, 2)
            | sums(TWO, 4864)
            | sums((0, 4), 14336)
            | {("reduce-scatter", (0, 2), F32, size): 1 for size in (25088, 14336, 4864)}
            | links(0, 2, 12544, 1)
            | links(0, 2, 7168, 1)
            | links(0, 2, 2432, 1)
            | ends_of(world(8), 8)
        },
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 100)


def check(case: Case, folder: Any, data: str) -> None:
    """Each step of the run sends what the case says, and every rank what the plan says."""
    flags = with_flags(
        [
            *SMALL,
            *NO_DROPOUT,
            "--data-path",
            data,
            "--split",
            "90,10,0",
            "--train-iters",
            "2",
            "--lr-warmup-iters",
            "0",
        ],
        *case.flags,
    )
    train(
        folder,
        flags,
        case.world,
        hook=recorder.watch_balanced if "--num-experts" in flags else recorder.watch,
    )
    messages = []
    for rank in range(case.world):
        first, second = map(recorder.totals, recorder.read(folder, rank))
        assert first == second
        if rank in case.sent:
            assert dict(second) == case.sent[rank], f"rank {rank}"
        sent, plan = wire(second), planned(flags, case.world, rank)
        assert sent[0] == plan[0], f"rank {rank}: the plan says something else"
        messages.append((sent[1], plan[1]))
    if "--window-size" in flags:  # the plan's are those of the rank that sends most
        messages = [tuple(map(max, zip(*messages, strict=True)))]
    assert all(sent == plan for sent, plan in messages), (
        f"rank {[sent == plan for sent, plan in messages].index(False)}: the plan says something "
        "else"
    )


def wire(calls: Counter) -> tuple[Counter, int]:
    """Bytes that a rank sends in collectives, by the ranks that take part, and in messages.

    In a ring of d ranks each sends 2 n (d - 1) / d of an all-reduce of n bytes, and half of it to
    gather or scatter.
    """
    groups = Counter()
    messages = 0
    for (operation, ranks, _, nbytes), count in calls.items():
        if operation == "send":
            messages += count * nbytes
        elif operation != "receive":
            groups[ranks] += (
                count
                * nbytes
                * (len(ranks) - 1)
                * (2 if operation == "all-reduce" else 1)
                // len(ranks)
            )
    return groups, messages


def planned(flags: list[str], world: int, rank: int) -> tuple[Counter, int]:
    """The same by config/plan/transfers.py; gloo gathers the weights of a sharded optimizer by
    messages."""
    config = config_from(RunConfig, parse_typed(command_line.parser(RunConfig), flags))
    plan = make_plan(config, world, 211)
    p = config.parallel
    axes = transfers.axis_sizes(config, plan)
    tp = p.tensor_model_parallel_size
    replicas = axes["shard"] * axes["instances"]
    stage = rank // (tp * replicas)
    place = rank // tp % replicas
    part = rank % tp
    ep = axes["ep"]
    etp = axes["etp"]
    fold = ep * etp
    here = place * tp + part
    assert axes["optimizer"] in (world, tp * axes["pp"] * axes["shard"])

    def among(axis: str) -> tuple[int, ...]:
        """The ranks of an axis, in Megatron's order: tensor, replicas (context, then data),
        pipeline."""
        first = place - place % axes["shard"]
        shard = range(first, first + axes["shard"])
        share = range(tp * first, tp * (first + axes["shard"]))

        def folded(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
            return [(stage, i // tp, i % tp) for i in ranks]

        found = {
            "tp": [(stage, place, i) for i in range(tp)],
            "shard": [(stage, i, part) for i in shard],
            "ep": folded(here - here % fold + here % etp + i * etp for i in range(ep)),
            "etp": folded(here - here % etp + i for i in range(etp)),
            "expert_shard": folded(i for i in share if i % fold == here % fold),
            "expert_instances": folded(
                i
                for i in range(tp * replicas)
                if i % fold == here % fold
                and (i - share[0]) % len(share) // fold == (here - share[0]) // fold
            ),
            "dp": [(stage, i, part) for i in range(place % axes["cp"], replicas, axes["cp"])],
            "cp": [(stage, place - place % axes["cp"] + i, part) for i in range(axes["cp"])],
            "cp_heads": [
                (stage, place - place % axes["cp_heads"] + i, part) for i in range(axes["cp_heads"])
            ],
            "instances": [
                (stage, i, part) for i in range(place % axes["shard"], replicas, axes["shard"])
            ],
            "ends": [(i, place, part) for i in embedding_stages(config)],
            "optimizer": [
                (i, j, k)
                for i in range(axes["pp"])
                for j in (range(replicas) if p.folds_experts else shard)
                for k in range(tp)
            ],
            "world": [
                (i, j, k) for i in range(axes["pp"]) for j in range(replicas) for k in range(tp)
            ],
        }[axis]
        return tuple((i * replicas + j) * tp + k for i, j, k in found)

    groups = Counter()
    messages = 0
    for transfer in transfers.transfers(config, plan, stage):
        sent = transfer.sent(axes[transfer.axis])
        weights = transfer.axis.endswith("shard") and transfer.operation == "all-gather"
        if transfer.operation == "send" or weights:
            messages += sent
        else:
            groups[among(transfer.axis)] += sent
    return groups, messages


QUICK = ("tp2 sp", "pp2", "dp2, distributed optimizer", "cp2")
# What sends the same as others, on more ranks or at once.
RARE = (
    *("dp8", "tp4 sp dp2", "tp4 dp1", "dp8, distributed optimizer"),
    *("tp2 sp, full recompute of 2 layers", "tp2 sp, selective recompute", "cp4", "cp4, windows"),
    *("experts, tp2 sp pp2", "experts, ep2 tp2 dp2, recomputed", "experts, etp1 tp2 sp dp2"),
    *("experts, ep2 tp2 sp dp2, recomputed", "experts, ep2 tp2 sp dp4"),
    *("tp2 sp dp4, ZeRO-2 in 2 instances", "pp2 dp2, ZeRO-3, full recompute", "tp2 sp, NorMuon"),
    *("pp2 dp2, ZeRO-3, multi-token prediction, tied", "tp2 dp2, distributed optimizer, Muon"),
    *("experts, etp2 dp4, distributed optimizer, Muon", "tp2 sp, multi-token prediction"),
    *("pp3 tp2 sp, multi-token prediction, layout Ett|mm|L", "tp2 sp, gated delta nets"),
    *(
        "tp2 sp, latent attention",
        "cp4 tp2, a2a, one shared query group, largest scores, core again",
    ),
    *(
        "cp2 tp2 sp, a2a, latent attention, latents and core again",
        "cp2, a2a, full recompute, bf16",
    ),
)


def mark(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """The tier of a case."""
    if name in RARE:
        return (pytest.mark.sweep,)
    return () if name in QUICK else (pytest.mark.campaign,)


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in CASES | MORE])
def test_a_step_sends_what_was_worked_out(name, tmp_path, data):
    check((CASES | MORE)[name], tmp_path / "run", data)


def another_reduction() -> None:
    """The gradients are summed once more than they should be, and the recorder watches."""
    from megatron.parallel import collectives, ddp

    reduce = ddp.GradBuffers.reduce

    def twice(self: ddp.GradBuffers) -> None:
        reduce(self)
        collectives.all_reduce_(self.flat, self.reduction._ctx.dp_cp)

    ddp.GradBuffers.reduce = twice
    recorder.watch()


def unseen_call() -> None:
    """A collective that parallel/collectives.py has no function for, and the recorder watches."""
    import torch
    import torch.distributed as dist

    from megatron.parallel import ddp

    reduce = ddp.GradBuffers.reduce

    def gathering(self: ddp.GradBuffers) -> None:
        reduce(self)
        dist.all_gather(
            [torch.empty(1) for _ in range(int(os.environ["WORLD_SIZE"]))], torch.zeros(1)
        )

    ddp.GradBuffers.reduce = gathering
    recorder.watch()


@pytest.mark.parametrize(
    ("hook", "says"),
    [(another_reduction, "rank 0"), (unseen_call, "all_gather in a training step")],
)
def test_a_call_too_many_is_seen(hook, says, tmp_path, data, monkeypatch):
    monkeypatch.setattr(recorder, "watch", hook)
    with pytest.raises(AssertionError, match=says):
        check(CASES["dp2"], tmp_path / "run", data)
