"""The time of a training step by formula: arrays of runs in, seconds by kind out.

Every field of `Runs` is a number or an array, and so are the results: one call judges a table of
measured runs or all layouts of a search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Numbers = Any  # a float, or an array of them that broadcasts with the others

TILE = (128, 256)  # rows and columns of a GEMM that one SM computes at a time
POWER = 4.0  # of two things that overlap: (a^4 + b^4)^(1/4), the longer, and more where near


@dataclass(kw_only=True)
class Runs:
    """Models, layouts and how they are computed; `dp` counts replicas of the model, EP is inside of
    it. `keys`: how many keys a query sees in the mean. `experts` 0: dense layers alone; the first
    `dense_layers` have no experts. `zero`: 0 to 3; `shard`: ranks that share by it. `again`: share
    of the layers whose forward is computed twice. `precision`: bf16, fp8 or fp4, as 0, 1, 2."""

    layers: Numbers
    losses: Numbers = 1  # with those of multi-token prediction, whose layers are among `layers`
    hidden: Numbers
    heads: Numbers
    groups: Numbers
    head_dim: Numbers
    value_dim: Numbers
    ffn: Numbers
    gated: Numbers
    vocab: Numbers
    tied: Numbers = 0  # one embedding for input and output
    experts: Numbers = 0
    topk: Numbers = 0
    moe_ffn: Numbers = 0
    shared_ffn: Numbers = 0
    dense_layers: Numbers = 0
    q_rank: Numbers = 0
    kv_rank: Numbers = 0
    seq: Numbers
    keys: Numbers
    batch: Numbers
    micro: Numbers
    tp: Numbers = 1
    pp: Numbers = 1
    vpp: Numbers = 1
    cp: Numbers = 1
    ep: Numbers = 1
    etp: Numbers = 1
    dp: Numbers = 1
    zero: Numbers = 0
    shard: Numbers = 1
    again: Numbers = 0
    precision: Numbers = 0
    element: Numbers = 2  # bytes of an activation, and of a weight that is sent
    grad_bytes: Numbers = 4
    node: Numbers = 8  # GPUs that NVLink joins
    network: Numbers = 50e9  # bytes a second of a GPU's share of what leaves a node
    # of the program
    eager: Numbers = 1.0  # memory-bound work, of that of eager kernels
    flash: Numbers = 0  # attention by flash-attn 2, not by kernels made for the device
    host: Numbers = 1.0  # time to launch a layer, of the machine's
    hides: Numbers = 0.0  # share of tensor parallelism's messages behind GEMMs
    behind: Numbers = -1  # share of the gradients' sum that may hide; below 0 the machine's `late`
    # 1: the last stage has so many layers less as its head takes; 2: by blocks; 3: embedding and
    # head count as a layer each
    balanced: Numbers = 0
    messages: Numbers = 1.0  # collectives in which a layer's weights or gradients are shared
    stall: Numbers = 0.0  # seconds a layer and tensor-parallel rank, with stages or polls, too
    polls: Numbers = 0.0  # seconds until a stage has seen a message for which it sleeps
    year: Numbers = 2026.5  # of its experts' kernels
    uneven: Numbers = 1.0  # tokens of the rank whose experts have most, of the mean
    frozen: Numbers = 0.0  # operations for a token of models beside the last stage: forward alone
    sequence: Numbers = 1  # tensor-parallel ranks share what norms and residual stream pass, too

    @property
    def tokens(self) -> Numbers:
        """Tokens of a micro-batch on a rank."""
        return self.micro * self.seq / self.cp

    @property
    def micro_batches(self) -> Numbers:
        """Of a step, on each replica."""
        return np.maximum(1, self.batch / (self.dp * self.micro))

    @property
    def of_stage(self) -> Numbers:
        """Layers of the stage that has most."""
        mean = self.layers / self.pp
        balanced = np.asarray(self.balanced)
        cut = np.where(balanced == 1, mean, np.ceil(mean))
        cut = np.where(
            (balanced == 3) & (np.asarray(self.pp) > 1), (self.layers + 2) / self.pp, cut
        )
        return np.where(balanced == 2, self.first_layers, cut)

    @property
    def products(self) -> Numbers:
        """Multiplications of a token in one of nanotron's layers."""
        return self.hidden * (4 * self.hidden + 3 * self.ffn)

    @property
    def share_of_stage(self) -> Numbers:
        """Of nanotron's stages in products, of which the head is one, in layers."""
        return (self.layers + self.vocab * self.hidden / self.products) / self.pp

    @property
    def first_layers(self) -> Numbers:
        """Layers of nanotron's first stage: a stage takes blocks until it has its share."""
        return np.minimum(np.ceil(self.share_of_stage - 1e-9), self.layers)

    @property
    def moe_layers(self) -> Numbers:
        """Layers with experts."""
        return np.where(np.asarray(self.experts) > 0, self.layers - self.dense_layers, 0)


def _attention_matrices(r: Runs) -> list[tuple[Numbers, Numbers]]:
    """(columns, inner dimension) on a rank; of latent attention those of its low ranks, too."""
    latent = np.asarray(r.kv_rank) > 0
    query = r.heads * r.head_dim / r.tp
    rope = 64 * latent
    down = np.where(latent, r.q_rank + r.kv_rank + rope, 0)
    up = np.where(latent, r.heads * (r.head_dim - rope + r.value_dim) / r.tp, 0)
    inner = np.where(np.asarray(r.q_rank) > 0, r.q_rank, r.hidden)
    pair = np.where(latent, 0, 2 * np.maximum(r.groups / r.tp, 1) * r.head_dim)
    return [
        (query + pair, inner),
        (down, r.hidden + 0 * down),
        (up, np.maximum(r.kv_rank, 1)),
        (r.hidden, r.heads * r.value_dim / r.tp),
    ]


def parameters(r: Runs) -> tuple[Numbers, Numbers, Numbers]:
    """(of a rank's dense layers, its experts, its share of one embedding), of a mean stage."""
    attention = sum(columns * inner for columns, inner in _attention_matrices(r))
    wide = 2 + np.asarray(r.gated)
    moe = r.moe_layers
    dense = (
        attention * r.layers
        + wide * r.hidden * ((r.layers - moe) * r.ffn + moe * r.shared_ffn) / r.tp
    )
    experts = moe * wide * r.hidden * r.moe_ffn * r.experts / (r.ep * r.etp)
    return dense / r.pp, experts / r.pp, r.vocab * r.hidden / r.tp


def flops(r: Runs, causal: bool = True) -> Numbers:
    """Of a step on one rank, without what is computed twice, and with attention's causal half or
    the full square."""
    whole = Runs(**{**vars(r), "tp": 1, "pp": 1, "ep": 1, "etp": 1})
    dense, _, embedding = parameters(whole)
    width = 2 + np.asarray(r.gated)
    active = dense + r.moe_layers * width * r.hidden * r.moe_ffn * r.topk + embedding
    keys = r.keys if causal else 2 * r.keys
    core = 2 * r.layers * keys * r.heads * (r.head_dim + r.value_dim)
    return (6 * active + 3 * core + r.frozen) * r.batch * r.seq / (r.dp * r.tp * r.pp * r.cp)


def _gemm(
    m: Mapping[str, Numbers],
    rows: Numbers,
    columns: Numbers,
    inner: Numbers,
    rate: Numbers,
    count: Numbers = 1,
) -> Numbers:
    """Seconds of `count` products at once: the rate of the device, less what the last wave of tiles
    leaves idle and what filling the pipeline of a tile costs."""
    tiles = count * np.ceil(rows / TILE[0]) * np.ceil(columns / TILE[1])
    waves = np.maximum(tiles / m["sms"], 1e-9)
    work = 2 * count * rows * columns * inner
    idle = (np.ceil(waves) / waves) ** m["wave"]
    return work / rate * idle * (1 + m["inner"] / np.maximum(inner, 1))


def _layer(
    m: Mapping[str, Numbers],
    rows: Numbers,
    columns: Numbers,
    inner: Numbers,
    rate: Numbers,
    count: Numbers = 1,
) -> tuple[Numbers, Numbers]:
    """(forward, backward) of a linear layer."""
    forward = _gemm(m, rows, columns, inner, rate, count)
    backward = _gemm(m, rows, inner, columns, rate, count) + _gemm(
        m, columns, inner, rows, rate, count
    )
    return forward, backward


def _ranks(r: Runs, size: Numbers, stride: Numbers) -> tuple[Numbers, Numbers]:
    """(of a group whose neighbours are `stride` apart the ranks in a node, its nodes)."""
    near = np.clip(np.floor(r.node / stride), 1, size)
    return near, np.ceil(size / near)


def collective(
    m: Mapping[str, Numbers],
    r: Runs,
    size: Numbers,
    stride: Numbers,
    nbytes: Numbers,
    exchange: bool = False,
    calls: Numbers = 0,
) -> Numbers:
    """Seconds of an all-gather or a reduce-scatter of `nbytes` (of whole tensors), or of an
    exchange in which each rank has `nbytes`; of `calls` rings, which go around all nodes."""
    near, nodes = _ranks(r, size, stride)
    inside = m["nvlink_bytes"] * m["nvlink"]
    outside = r.network * m["net"] * (1 if exchange else near)
    wire = nbytes * (size - 1) / size
    away = nbytes * (nodes - 1) / nodes if exchange else wire
    seconds = np.where(nodes > 1, np.maximum(away / outside, wire / inside), wire / inside)
    start = m["alpha_near"] * np.log2(size) + m["alpha_far"] * np.log2(nodes)
    return np.where(size > 1, seconds + start + calls * m["hop"] * (nodes - 1), 0.0)


def overlapped(a: Numbers, b: Numbers, power: float = POWER) -> Numbers:
    """Seconds of two things at the same time."""
    longer = np.maximum(np.maximum(a, b), 1e-12)
    return longer * ((a / longer) ** power + (b / longer) ** power) ** (1 / power)


def _aged(m: Mapping[str, Numbers], r: Runs) -> Numbers:
    """Share of layers with experts, times what their programs have become faster since 2026."""
    return np.exp(-m["aging"] * (np.asarray(r.year) - 2026)) * r.moe_layers / r.layers


def _linear(m: Mapping[str, Numbers], r: Runs, plain: Numbers) -> Numbers:
    """All GEMMs of a micro-batch on a stage but the head's; `plain`: the rate in 16 bits."""
    rate = np.choose(
        np.asarray(r.precision),
        [plain, m["tflops8"] * 1e12 * m["gemm8"], m["tflops4"] * 1e12 * m["gemm4"]],
    )
    moe = r.moe_layers / r.layers
    glu = 1 + np.asarray(r.gated)
    # (share of layers, rows, columns, inner dimension, rate, products at once)
    sizes = [(1, r.tokens, columns, inner, rate, 1) for columns, inner in _attention_matrices(r)]
    for width, share in ((r.ffn, 1 - moe), (r.shared_ffn, moe)):
        sizes.append((share, r.tokens, glu * width / r.tp, r.hidden, rate, 1))
        sizes.append((share, r.tokens, r.hidden, width / r.tp, rate, 1))
    local = np.maximum(np.where(np.asarray(r.experts) > 0, r.experts, 1) / r.ep, 1)
    copies = np.maximum(r.tokens * r.topk * r.etp / r.tp / local, 1e-9)
    width, rate = r.moe_ffn / r.etp, rate * m["grouped"]
    sizes.append((moe * r.uneven, copies, glu * width, r.hidden, rate, local))
    sizes.append((moe * r.uneven, copies, r.hidden, width, rate, local))
    seconds = 0.0
    for share, *size in sizes:
        forward, backward = _layer(m, *size)
        seconds = seconds + share * (forward * (1 + r.again) + backward)
    return seconds * r.of_stage


def _core(m: Mapping[str, Numbers], r: Runs) -> Numbers:
    """Attention's products of a micro-batch on a stage."""
    work = 2 * r.tokens * r.keys * r.heads / r.tp * (r.head_dim + r.value_dim)
    rate = m["tflops"] * 1e12 * np.where(np.asarray(r.flash) > 0, m["flash"], m["attention"])
    rate = rate * r.keys / (r.keys + m["keys"])
    rate = rate * (np.minimum(r.head_dim, 128) / 128) ** m["head"]
    return work / rate * (1 + r.again + m["core_backward"]) * r.of_stage


def _passes(m: Mapping[str, Numbers], r: Runs, hbm: Numbers) -> Numbers:
    """What memory limits in the layers of a micro-batch. Of a token and layer, in elements: what
    norms, residual stream, rotary positions and layouts of heads read and write, and what the
    activation, experts and casts do."""
    # without sequence parallelism half of it is not shared: heads' layouts and rotations are
    whole = np.where(np.asarray(r.sequence) > 0, 0, 0.5)
    stream = m["stream"] * r.hidden * (whole + (1 - whole) / r.tp)
    moe = r.moe_layers / r.layers
    width = ((1 - moe) * r.ffn + moe * (r.shared_ffn + r.topk * r.moe_ffn)) / r.tp
    wide = np.where(np.asarray(r.gated) > 0, 8, 6) * width
    routed = m["routed"] * _aged(m, r) * r.uneven * r.topk * r.hidden / r.tp
    cast = np.where(np.asarray(r.precision) > 0, m["cast"], 0) * (r.hidden + r.ffn / r.tp)
    of_layer = r.element * r.tokens * (r.eager * (stream + wide) + routed + cast)
    dense, experts, _ = parameters(r)
    gradients = 8 * (dense + experts)  # added in fp32
    return (of_layer * (1 + r.again / 3) * r.of_stage + gradients) / hbm


def _exchanged(
    m: Mapping[str, Numbers], r: Runs, attention: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Messages that a micro-batch waits for on a stage: of tensor, context and expert
    parallelism. Keys and values go around behind attention's products."""
    near = 2 * collective(m, r, r.tp, 1, r.tokens * r.hidden * r.element)
    # the embedding's, the head's, and two of a number a token for the loss
    ends = 2 * near + 4 * collective(m, r, r.tp, 1, 8 * r.tokens)
    tensor = (4 + 2 * r.again) * (1 - r.hides) * near * r.of_stage + ends / r.pp
    ring = r.element * r.tokens * r.groups * 2 * r.head_dim / np.minimum(r.tp, r.groups) * r.cp
    point = {**m, "alpha_near": m["alpha_pipe"], "alpha_far": m["alpha_pipe"]}
    around = (3 + r.again) * collective(point, r, r.cp, r.tp, ring) * r.of_stage
    context = overlapped(around, attention) - attention
    stride = np.where(np.asarray(r.etp) < r.tp, 1, r.tp)
    sent = r.tokens * r.topk * r.hidden * r.element / r.tp
    once = collective(m, r, r.ep, stride, sent, exchange=True) * m["dispatch"]
    expert = (4 + 2 * r.again) * once * _aged(m, r) * r.uneven * r.of_stage
    return tensor, context, expert


def _host(m: Mapping[str, Numbers], r: Runs, busy: Numbers) -> Numbers:
    """How long a stage of a GPU waits for a micro-batch's launches."""
    parallel = np.asarray(r.tp) > 1
    more = 1 + m["host_tp"] * parallel + m["host_experts"] * _aged(m, r)
    stall = r.stall * r.tp * (parallel & ((np.asarray(r.pp) > 1) | (np.asarray(r.polls) > 0)))
    launched = m["host"] * r.host * more * (1 + r.again / 3) + stall
    return overlapped(busy, launched * r.of_stage, m["overlap"]) - busy


def _pipe(m: Mapping[str, Numbers], r: Runs) -> Numbers:
    """Messages between stages for a micro-batch."""
    leaves = r.tp * r.cp * r.dp >= r.node
    link = np.where(leaves, r.network * m["net"], m["nvlink_bytes"] * m["nvlink"])
    message = r.tokens * r.hidden * r.element / r.tp
    # of several chunks' messages all but one hide behind another chunk
    seconds = 2 * (m["alpha_pipe"] + message / link)
    return np.where(np.asarray(r.pp) > 1, seconds, 0.0)


def _polled(r: Runs) -> Numbers:
    """What a step waits where stages sleep until they see a message: of a micro-batch two tensors
    go on and a gradient comes back, at both ends of a stage that is between others."""
    of_micro = np.where(np.asarray(r.pp) > 2, 6, 3) * (r.micro_batches - 1)
    return np.where(np.asarray(r.pp) > 1, r.polls * (of_micro + 2 * r.pp), 0.0)


def _data(m: Mapping[str, Numbers], r: Runs, busy: Numbers) -> Numbers:
    """What a step waits for sums of gradients and gathered weights; `busy`: seconds of a
    micro-batch, behind whose backward a part hides."""
    dense, experts, embedding = parameters(r)
    sharing = r.dp * r.cp
    zero = np.asarray(r.zero)
    rank = dense + 2 * embedding / r.pp
    calls = r.messages * r.of_stage
    shard = np.minimum(r.shard, sharing)
    gather = collective(m, r, shard, r.tp, r.element * rank, calls=calls)
    # where all ranks keep the sum it goes by trees, in few buckets
    rings = np.where((zero > 0) & (r.shard >= sharing), 1, 0.15)
    reduce = collective(m, r, sharing, r.tp, r.grad_bytes * rank, calls=calls * rings)
    alike = np.maximum(sharing / r.ep, 1)
    of_experts = collective(m, r, alike, r.tp * r.ep, (r.grad_bytes + r.element) * experts)
    of_experts = np.where(np.asarray(r.experts) > 0, of_experts, 0.0)
    once = np.where(zero == 0, 2 * reduce, reduce + gather) + of_experts
    backward = busy * 2 / 3
    behind = np.asarray(r.behind)
    behind = np.where(behind < 0, m["late"], behind)
    late = overlapped(once * behind, backward) - backward + once * (1 - behind)
    every = 2 * gather + reduce + of_experts * 1.5
    each = overlapped(every, busy) - busy
    return np.where(zero >= 3, each * r.micro_batches + gather * 0.5, late)


def _optimizer(m: Mapping[str, Numbers], r: Runs, hbm: Numbers) -> Numbers:
    """The optimizer, and passes over all gradients and weights of a rank."""
    dense, experts, embedding = parameters(r)
    ends = 2 * embedding / r.pp
    shares = np.asarray(r.zero) > 0
    shard = np.where(shares, np.clip(r.shard, 1, r.dp * r.cp), 1)
    of_experts = np.where(shares, np.maximum(r.dp * r.cp / r.ep, 1), 1)
    owned = (dense + ends) / shard + experts / of_experts
    return (m["state"] * owned + 8 * (dense + experts + ends)) / hbm + m["fixed"]


def step_seconds(m: Mapping[str, Numbers], r: Runs) -> dict[str, Numbers]:
    """Seconds of a step by kind; their sum is the step's. m: the constants of a machine
    (machines.py)."""
    plain = m["tflops"] * 1e12 * m["gemm"]
    hbm = m["hbm_bytes"] * m["copy"]
    gemm = _linear(m, r, plain)
    attention = _core(m, r)
    passes = _passes(m, r, hbm)
    tensor, context, expert = _exchanged(m, r, attention)
    busy = gemm + attention + passes + tensor + context + expert
    host = _host(m, r, busy)
    pipe = _pipe(m, r)
    forward, backward = _layer(m, r.tokens, r.vocab / r.tp, r.hidden, plain)
    head = r.losses * (forward + backward + r.tokens * r.vocab / r.tp * m["logits"] / hbm)
    head = head + r.frozen * r.tokens / r.tp / plain
    # the last stage has the head, which the others wait for unless it has fewer layers
    stage = busy + host + pipe
    balanced = np.asarray(r.balanced) > 0
    spread = np.where(np.asarray(r.balanced) == 1, stage + head / r.pp, stage)
    fair = np.maximum(np.maximum(spread, head) - stage, 0)
    fair = np.where(np.asarray(r.balanced) == 3, np.maximum(head - stage / r.of_stage, 0), fair)
    last = np.where(balanced & (np.asarray(r.pp) > 1), fair, head)
    idle = (r.pp - 1) / r.vpp * (stage + np.where(balanced, last, head / r.pp))
    micro = r.micro_batches
    return {
        "GEMM": gemm * micro,
        "attention": attention * micro,
        "memory-bound": passes * micro,
        "head and loss": last * micro,
        "tensor parallel": tensor * micro,
        "context parallel": context * micro,
        "expert parallel": expert * micro,
        "pipeline messages": pipe * micro + _polled(r),
        "host": host * micro,
        "bubble": idle,
        "data parallel": _data(m, r, busy + host + head),
        "optimizer": _optimizer(m, r, hbm),
    }
