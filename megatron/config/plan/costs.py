"""Costs of a parallel layout, by formula: bytes of activation memory and of communication.

Activations after Korthikanti et al. 2022, but of what this suite's kernels keep for backward
(attention keeps no scores, dropout no masks); transfers are those of `parallel/`, call by call.
Tests measure both in real runs.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from megatron.config.plan.plan import BYTES, Plan, expert_shards, flat_layout, shards
from megatron.config.plan.stages import activations_alive
from megatron.config.tree import Config

IDS = 8  # bytes of a token id

# Kinds of requests that travel with the loss: the fields of training/agreement.py:Requests.
REQUESTS = 5


class Transfer(NamedTuple):
    """One kind of collective of a rank in one step: `calls` of it, over all ranks of `axis`, with
    `nbytes` together.

    Bytes are those of whole tensors: what an all-reduce sums, an all-gather brings together, a
    reduce-scatter is given and a send carries.
    """

    axis: str
    operation: str
    calls: int
    nbytes: int

    def sent(self, size: int) -> int:
        """Bytes that a rank sends, and as many it receives, where `size` ranks do it by the
        shortest way (a ring)."""
        # of a reduce or a broadcast one rank sends nothing, the others everything
        once = size - 1
        share = {
            "all-reduce": 2 * once,
            "all-gather": once,
            "reduce-scatter": once,
            "all-to-all": once,
            "reduce": once,
            "broadcast": once,
            "send": size,
        }
        return self.nbytes * share[self.operation] // size


class _Sizes:
    """Sizes of one micro-batch on one rank. tokens: this rank's; rows: of them what sequence
    parallelism leaves."""

    def __init__(self, config: Config, plan: Plan):
        m = config.model
        p = config.parallel
        self.config = config
        self.tp = p.tensor_model_parallel_size
        self.cp = p.context_parallel_size
        self.pp = p.pipeline_model_parallel_size
        self.sequence = p.sequence_parallel and self.tp > 1
        self.tokens = m.seq_length // self.cp * config.training.micro_batch_size
        self.rows = self.tokens // self.tp if self.sequence else self.tokens
        self.item = BYTES[config.precision.params_dtype]
        self.wide = max(4, self.item)
        self.residual = self.wide if m.fp32_residual_connection else self.item
        self.hidden = m.hidden_size
        self.query = m.num_attention_heads * m.head_dim // self.tp
        self.key = m.query_groups * m.head_dim // self.tp
        self.vocab = plan.padded_vocab_size // self.tp
        self.loss = 2 if config.precision.fp16_lm_cross_entropy else self.wide
        # Row-blocked kernels keep less than torch's own; "auto" is taken for a CUDA
        # device.
        self.on_cpu = config.training.device == "cpu"
        # The C++, where it is built: it widens nothing.
        self.native = self.on_cpu and config.precision.params_dtype in ("float32", "bfloat16")

    def norm(self, rows: int, width: int, item: int) -> int:
        """What a norm keeps of its input (of `item` bytes an element) and of its statistics."""
        m = self.config.model
        layer_norm = m.normalization == "LayerNorm"
        if m.apply_layernorm_1p and (layer_norm or not self.on_cpu):
            item = max(item, self.wide)
        return rows * (width * item + self.wide * (2 if layer_norm else 0 if self.on_cpu else 1))

    def attention(self) -> int:
        """Queries, keys and values as the projection made them and as the core takes them, the
        core's result."""
        m = self.config.model
        t = self.config.training
        heads = self.query // self.config.model.head_dim
        groups = self.key // m.head_dim
        kept = self.query + 2 * self.key
        copied = groups > 1 and heads > groups
        if m.positions == "rope" or m.qk_layernorm:
            kept += self.query + self.key
        if copied and (m.qk_layernorm or m.positions != "rope"):
            kept += self.query  # queries of all groups, made contiguous
        nbytes = self.tokens * self.item * (kept + self.query)
        if m.qk_layernorm:
            statistics = self.norm(1, 0, self.item) * (heads + groups)
            widened = self.norm(1, 1, self.item) - self.norm(1, 0, self.item) > self.item
            nbytes += self.tokens * (
                statistics + (self.wide * (self.query + self.key) if widened else 0)
            )
        backend = self.config.attention_backend
        chunked = (
            m.attention_dropout > 0
            or self.config.data.reset_attention_mask
            or self.config.precision.fp64
        )
        chunked = chunked or backend in ("local", "unfused")
        if t.recompute != "selective" and backend == "unfused":
            # probabilities
            nbytes += (
                self.tokens * heads * m.seq_length * self.wide * (3 if m.attention_dropout else 1)
            )
        if t.recompute != "selective" and (self.cp > 1 or not chunked):
            nbytes += self.tokens * heads * self.wide  # logarithms of the softmax's sums
        return nbytes

    def mlp(self, layer: int) -> int:
        """What the MLP of a layer keeps, or router, experts and shared expert.

        Of experts: the copies of tokens that they compute, the activation function's and the
        probability's results, and the order of the copies; of the router: its logits and scores.
        """
        m = self.config.model
        if not m.is_moe_layer(layer):
            return self.tokens * self._width(m.ffn)
        # of all experts, as many tokens go to each rank
        copies = self.tokens * m.moe_router_topk
        inner = self._width(m.expert_ffn) + self.item * m.expert_ffn // self.tp
        kept = copies * (self.hidden * self.item + inner + 3 * IDS)
        kept += self.rows * m.num_experts * 3 * self.wide
        if m.moe_shared_expert_intermediate_size:
            kept += self.tokens * self._width(m.moe_shared_expert_intermediate_size)
        return kept

    def _width(self, ffn: int) -> int:
        """Of an MLP of this width and one token: input (or slope) and result of the activation
        function, and what a gated one keeps between."""
        m = self.config.model
        runs = self.on_cpu and self.config.kernels.bias_swiglu_fusion
        widths = {
            "swiglu": 3 if runs else 4,
            "geglu": 5 if self.on_cpu and not self.native else 4,
        }.get(m.activation, 2)
        return self.item * widths * (ffn // self.tp)

    def layer(self, number: int) -> int:
        """All that a layer keeps: both norms' inputs and results, and the two blocks."""
        normed = self.rows * self.hidden * self.item
        return (
            2 * (self.norm(self.rows, self.hidden, self.residual) + normed)
            + self.attention()
            + self.mlp(number)
        )

    def head(self) -> int:
        """Final norm, output layer and loss: above all the logits."""
        kept = (
            self.norm(self.rows, self.hidden, self.residual) + self.rows * self.hidden * self.item
        )
        kept += self.tokens * (self.vocab * self.item + IDS + self.loss)
        return kept + (self.tokens * (1 + self.loss) if self.tp > 1 else 0)


class Activations(NamedTuple):
    """Bytes of activations of a rank at its peak: `stored` between forward and backward, by `alive`
    (micro-batch, chunk) pairs; `head`: final norm, logits and loss of one micro-batch; `again`:
    layers that are computed a second time."""

    stored: int
    alive: int
    head: int
    again: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.stored + self.head + self.again


def chunk_activations(config: Config, plan: Plan, layers: range) -> int:
    """Bytes that these layers of one micro-batch keep between forward and backward."""
    sizes = _Sizes(config, plan)
    runs = config.training.recomputed_runs(len(layers))
    kept = sum(map(sizes.layer, layers[sum(runs) :]))
    return kept + len(runs) * sizes.rows * sizes.hidden * sizes.residual


def embedding_activations(config: Config, plan: Plan) -> int:
    """Bytes that the embedding of one micro-batch keeps: which tokens' rows are this rank's."""
    sizes = _Sizes(config, plan)
    return sizes.tokens * (IDS + 1) if sizes.tp > 1 else 0


def head_activations(config: Config, plan: Plan) -> int:
    """Bytes that final norm, output layer and loss of one micro-batch keep."""
    return _Sizes(config, plan).head()


def activations(config: Config, plan: Plan, stage: int) -> Activations:
    """Of a rank of a pipeline stage, in the step with the most micro-batches."""
    chunks = plan.layers_per_stage[stage]
    stages = len(plan.layers_per_stage)
    largest = max(chunks, key=lambda chunk: chunk_activations(config, plan, chunk))
    alive = activations_alive(
        stage,
        stages,
        plan.num_microbatches(plan.train_iters),
        len(chunks),
        config.parallel.microbatch_group_size_per_vp_stage,
    )
    one = chunk_activations(config, plan, largest) + (
        embedding_activations(config, plan) if stage == 0 else 0
    )
    runs = config.training.recomputed_runs(len(largest))
    layers = map(_Sizes(config, plan).layer, largest)
    again = max(sum(islice(layers, run)) for run in runs) if runs else 0
    return Activations(
        alive * one, alive, head_activations(config, plan) if stage == stages - 1 else 0, again
    )


def axis_sizes(config: Config, plan: Plan) -> dict[str, int]:
    """Ranks of each axis of `parallel.context.ParallelContext` that a step uses."""
    p = config.parallel
    replicas = plan.data_parallel_size * config.parallel.context_parallel_size
    tp = p.tensor_model_parallel_size
    pp = p.pipeline_model_parallel_size
    shard = shards(config, plan)
    ep = p.expert_model_parallel_size
    expert_shard = expert_shards(config, plan)
    return {
        "tp": tp,
        "ep": ep,
        "cp": p.context_parallel_size,
        "pp": pp,
        "pp_gradients": pp,
        "ends": min(2, pp),
        "shard": shard,
        "instances": replicas // shard,
        "expert_shard": expert_shard,
        "expert_instances": replicas // ep // expert_shard,
        "optimizer": plan.world_size if ep > 1 else tp * pp * shard,
        "world": plan.world_size,
    }


def transfers(config: Config, plan: Plan, stage: int) -> list[Transfer]:
    """All that a rank of a pipeline stage sends in a training step (the one with the most
    micro-batches)."""
    sizes = _Sizes(config, plan)
    chunks = plan.layers_per_stage[stage]
    micro_batches = plan.num_microbatches(plan.train_iters)
    last = stage == len(plan.layers_per_stage) - 1
    found = [*_gradients(config, plan, stage), *_scalars(config, sizes)]
    per_micro_batch = [
        *(t for chunk in chunks for t in _layers(config, sizes, chunk)),
        *_links(config, sizes, len(chunks), stage == 0, last),
    ]
    whole = sizes.tokens * sizes.hidden * sizes.item
    if stage == 0:
        per_micro_batch += _tensor_parallel(sizes, whole, forward=1, gathered_grads=1)
    if last:
        per_micro_batch += _tensor_parallel(sizes, whole, backward=1)
        per_micro_batch += [Transfer("tp", "all-reduce", 2, 3 * sizes.tokens * sizes.loss)]
    found += [
        Transfer(t.axis, t.operation, micro_batches * t.calls, micro_batches * t.nbytes)
        for t in per_micro_batch
    ]
    return _merged(found, axis_sizes(config, plan))


def sent_by_axis(config: Config, plan: Plan, stage: int) -> dict[str, int]:
    """Bytes that a rank of a pipeline stage sends in a step, by kind of parallelism; as many it
    receives.

    dp has all that concerns gradients and weights of replicas, pp the tied embedding too; numbers
    of a few bytes that all ranks sum (losses, norms) are omitted.
    """
    names = {"ends": "pp", "pp_gradients": "pp"} | dict.fromkeys(
        ("shard", "instances", "expert_shard", "expert_instances"), "dp"
    )
    axes = axis_sizes(config, plan)
    found = dict.fromkeys(("tp", "ep", "cp", "dp", "pp"), 0)
    for transfer in transfers(config, plan, stage):
        name = names.get(transfer.axis, transfer.axis)
        if name in found:
            found[name] += transfer.sent(axes[transfer.axis])
    return found


def _merged(found: list[Transfer], axes: dict[str, int]) -> list[Transfer]:
    """One of each kind; nothing is sent along an axis of one rank."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for axis, operation, calls, nbytes in found:
        if axes[axis] > 1 and calls:
            before = totals.get((axis, operation), (0, 0))
            totals[axis, operation] = before[0] + calls, before[1] + nbytes
    return [Transfer(*kind, *total) for kind, total in totals.items()]


def _tensor_parallel(
    sizes: _Sizes, whole: int, forward: int = 0, backward: int = 0, gathered_grads: int = 0
) -> list[Transfer]:
    """`forward` sums of a result of `whole` bytes (each a row-parallel layer's), `gathered_grads`
    of the gradients of such, and `backward` sums of the gradient of a column-parallel layer's
    input, which its forward shares."""
    if not sizes.sequence:
        sums = forward + backward
        return [Transfer("tp", "all-reduce", sums, sums * whole)]
    gathers = 2 * backward + gathered_grads
    scatters = forward + backward
    return [
        Transfer("tp", "all-gather", gathers, gathers * whole),
        Transfer("tp", "reduce-scatter", scatters, scatters * whole),
    ]


def _layers(config: Config, sizes: _Sizes, chunk: range) -> list[Transfer]:
    """Of a chunk's layers for one micro-batch: forward, backward, and forward again where it is
    recomputed.

    With sequence parallelism a column-parallel layer's input is gathered in forward and once more
    in backward. The second forward of a run ends before the last sum, whose result nothing needs.
    """
    whole = sizes.tokens * sizes.hidden * sizes.item
    layers = len(chunk)
    runs = config.training.recomputed_runs(layers)
    moe = sum(map(config.model.is_moe_layer, chunk))
    blocks = 2 * layers - (0 if config.model.moe_shared_expert_intermediate_size else moe)
    found = _tensor_parallel(sizes, whole, blocks, blocks, blocks)
    if moe:
        found += _experts(config, sizes, moe)
    again = sum(runs)
    if sizes.sequence:
        found += [Transfer("tp", "all-gather", 2 * again, 2 * again * whole)]
    sums = 2 * again - len(runs)
    found += [
        Transfer("tp", "reduce-scatter" if sizes.sequence else "all-reduce", sums, sums * whole)
    ]
    cores = 2 * layers + (layers if config.training.recompute == "selective" else again)
    return [*found, *_context_parallel(config, sizes, cores, layers)]


def _experts(config: Config, sizes: _Sizes, layers: int) -> list[Transfer]:
    """Of so many MLPs of experts: tokens, probabilities and numbers of experts go to the ranks
    that share the experts, results come back, and the gradients of tokens, probabilities and
    results; routers count the tokens of each expert.

    All-to-all sends a token once for each of its experts, here as many to each rank.
    """
    m = config.model
    copies = sizes.tokens * m.moe_router_topk
    whole = sizes.tokens * sizes.hidden * sizes.item
    probs = copies * sizes.wide
    numbers = copies * IDS
    found = (
        [Transfer("cp", "all-reduce", 1, m.num_experts * sizes.wide)] if m.aux_loss_coeff else []
    )
    if sizes.sequence:
        found += [
            *(t._replace(axis="tp") for t in found),
            Transfer("tp", "all-gather", 4, 2 * whole + probs + numbers),
            Transfer("tp", "reduce-scatter", 3, 2 * whole + probs),
        ]
    else:
        found += [Transfer("tp", "all-reduce", 3, 2 * whole + probs)]
    ep = config.parallel.expert_model_parallel_size
    if m.moe_token_dispatcher_type == "alltoall":
        rows = copies * sizes.hidden * sizes.item
        found += [
            Transfer("ep", "all-gather", 1, ep * m.num_experts * IDS),
            Transfer("ep", "all-to-all", 6, 4 * rows + 2 * probs),
        ]
    else:
        found += [
            Transfer("ep", "all-gather", 4, ep * (2 * whole + probs + numbers)),
            Transfer("ep", "reduce-scatter", 3, ep * (2 * whole + probs)),
        ]
    return [t._replace(calls=layers * t.calls, nbytes=layers * t.nbytes) for t in found]


def _context_parallel(config: Config, sizes: _Sizes, cores: int, layers: int) -> list[Transfer]:
    """Keys and values for `cores` passes of attention, and their gradients for one backward of each
    of `layers`."""
    keys_values = 2 * sizes.tokens * sizes.key  # of one rank
    if config.parallel.cp_comm_type == "all_gather":
        return [
            Transfer("cp", "all-gather", cores, cores * sizes.cp * keys_values * sizes.item),
            Transfer("cp", "reduce-scatter", layers, layers * sizes.cp * keys_values * sizes.wide),
        ]
    hops = sizes.cp - 1  # of two parts each
    return [
        Transfer(
            "cp",
            "send",
            2 * hops * (cores + layers),
            hops * keys_values * (cores * sizes.item + layers * sizes.wide),
        )
    ]


def _links(config: Config, sizes: _Sizes, chunks: int, first: bool, last: bool) -> list[Transfer]:
    """Hidden states to the next virtual stage and their gradients to the one before."""
    m = config.model
    item = sizes.item if m.apply_residual_connection_post_layernorm else sizes.residual
    hidden = sizes.rows * sizes.hidden * item
    return [
        Transfer("pp", "send", chunks - last, (chunks - last) * hidden),
        Transfer("pp_gradients", "send", chunks - first, (chunks - first) * hidden),
    ]


def _gradients(config: Config, plan: Plan, stage: int) -> list[Transfer]:
    """Bucket by bucket: copies that saw part of their gradient, then ranks that saw other tokens,
    then the weights."""
    p = config.precision
    found = []
    for bucket in flat_layout(config, plan, stage).buckets:
        elements = bucket.stop - bucket.start
        nbytes = elements * BYTES[p.grad_dtype]
        parts = bucket.shards
        of = "expert_" if bucket.experts else ""
        found += [Transfer(axis, "all-reduce", 1, nbytes) for axis in bucket.partial]
        kinds = ("reduce-scatter", "all-gather")
        calls = 1
        largest = nbytes // parts
        if config.parallel.zero_partition == "whole-params":
            owned = [
                stop - start for start, stop in map(bucket.shard, range(parts)) if stop > start
            ]
            kinds = ("reduce", "broadcast")
            calls = len(owned)
            largest = max(owned) * BYTES[p.grad_dtype]
        found += [
            Transfer(f"{of}instances", "all-reduce", 1, largest),
            Transfer(f"{of}shard", kinds[0], calls, nbytes),
            Transfer(f"{of}shard", kinds[1], calls, elements * BYTES[p.params_dtype]),
        ]
    return found


def _scalars(config: Config, sizes: _Sizes) -> list[Transfer]:
    """Loss, tokens, requests and the ledger's hash over all ranks; norm, overflow and zeros over
    the ranks of one optimizer."""
    scaled = config.precision.fp16 or config.precision.loss_scale is not None
    measured = (
        scaled
        or config.optimizer.clip_grad > 0
        or config.spikes.spike_action in ("skip-update", "rewind")
    )
    sums = measured + scaled + config.logging.log_num_zeros_in_grad
    router_losses = 2 * bool(config.model.num_experts)
    numbers = 2 + REQUESTS + 2 * bool(config.logging.data_ledger) + router_losses
    return [
        Transfer("world", "all-reduce", 1, numbers * 8),
        Transfer("optimizer", "all-reduce", sums, sums * 8),
    ]
