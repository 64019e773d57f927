"""What a rank sends in a training step, by formula: the transfers of `parallel/`, call by call.
Tests measure it in real runs."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from megatron.config.muon import at_a_time, is_experts, is_qkv
from megatron.config.plan.costs import IDS, Sizes
from megatron.config.plan.plan import (
    BYTES,
    Plan,
    by_muon,
    expert_shards,
    flat_layout,
    fp8_layers,
    shards,
)
from megatron.config.tree import Config

# Kinds of requests that travel with the loss: the fields of training/result.py:Requests.
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


def axis_sizes(config: Config, plan: Plan) -> dict[str, int]:
    """Ranks of each axis of `parallel.context.ParallelContext` that a step uses."""
    p = config.parallel
    replicas = plan.data_parallel_size * config.parallel.context_parallel_size
    tp = p.tensor_model_parallel_size
    pp = p.pipeline_model_parallel_size
    shard = shards(config, plan)
    expert_shard = expert_shards(config, plan)
    return {
        "tp": tp,
        "ep": p.expert_model_parallel_size,
        "etp": p.expert_tensor_parallel,
        "cp": p.context_parallel_size,
        "dp": plan.data_parallel_size,
        "dp_cp": replicas,
        "pp": pp,
        "pp_gradients": pp,
        "ends": min(2, pp),
        "shard": shard,
        "instances": replicas // shard,
        "expert_shard": expert_shard,
        "expert_instances": p.expert_replicas(plan.world_size) // expert_shard,
        "optimizer": plan.world_size if p.folds_experts else tp * pp * shard,
        "world": plan.world_size,
    }


def transfers(config: Config, plan: Plan, stage: int) -> list[Transfer]:
    """All that a rank of a pipeline stage sends in a training step (the one with the most
    micro-batches)."""
    sizes = Sizes(config, plan)
    chunks = plan.layers_per_stage[stage]
    micro_batches = plan.num_microbatches(plan.train_iters)
    last = stage == len(plan.layers_per_stage) - 1
    sent = [*gradients(config, plan, stage), *_scalars(config, sizes)]
    if config.optimizer.optimizer == "muon":
        sent += _matrices(config, plan, stage)
    if config.precision.fp8_recipe == "delayed" and (layers := fp8_layers(config, plan, stage)):
        # the maxima of each layer's input, weight and gradient
        sent += [Transfer(axis, "all-reduce", 1, len(layers) * 3 * 4) for axis in ("tp", "dp_cp")]
    per_micro_batch = [
        *(t for chunk in chunks for t in _layers(config, sizes, chunk)),
        *_links(config, sizes, len(chunks), stage == 0, last),
    ]
    hidden_bytes = sizes.tokens * sizes.hidden * sizes.itemsize
    if stage == 0:
        per_micro_batch += _tensor_parallel(sizes, hidden_bytes, forward=1, gathered_grads=1)
    if last:
        per_micro_batch += _tensor_parallel(sizes, hidden_bytes, backward=1)
        per_micro_batch += [Transfer("tp", "all-reduce", 2, 3 * sizes.tokens * sizes.loss)]
    sent += [
        Transfer(t.axis, t.operation, micro_batches * t.calls, micro_batches * t.nbytes)
        for t in per_micro_batch
    ]
    return _merged(sent, axis_sizes(config, plan))


def sent_by_axis(config: Config, plan: Plan, stage: int) -> dict[str, int]:
    """Bytes that a rank of a pipeline stage sends in a step, by kind of parallelism; as many it
    receives.

    dp has all that concerns gradients and weights of replicas, pp the tied embedding too; numbers
    of a few bytes that all ranks sum (losses, norms) are omitted.
    """
    names = {"ends": "pp", "pp_gradients": "pp", "etp": "tp"} | dict.fromkeys(
        ("shard", "instances", "dp_cp", "expert_shard", "expert_instances"), "dp"
    )
    axes = axis_sizes(config, plan)
    nbytes = dict.fromkeys(("tp", "ep", "cp", "dp", "pp"), 0)
    for transfer in transfers(config, plan, stage):
        name = names.get(transfer.axis, transfer.axis)
        if name in nbytes:
            nbytes[name] += transfer.sent(axes[transfer.axis])
    return nbytes


def _merged(sent: list[Transfer], axes: dict[str, int]) -> list[Transfer]:
    """One of each kind; nothing is sent along an axis of one rank."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for axis, operation, calls, nbytes in sent:
        if axes[axis] > 1 and calls:
            before = totals.get((axis, operation), (0, 0))
            totals[axis, operation] = before[0] + calls, before[1] + nbytes
    return [Transfer(*kind, *total) for kind, total in totals.items()]


def _tensor_parallel(
    sizes: Sizes, hidden_bytes: int, forward: int = 0, backward: int = 0, gathered_grads: int = 0
) -> list[Transfer]:
    """`forward` sums of a result of `hidden_bytes` (each a row-parallel layer's), `gathered_grads`
    of the gradients of such, and `backward` sums of the gradient of a column-parallel layer's
    input, which its forward shares."""
    if not sizes.sequence:
        sums = forward + backward
        return [Transfer("tp", "all-reduce", sums, sums * hidden_bytes)]
    gathers = 2 * backward + gathered_grads
    scatters = forward + backward
    return [
        Transfer("tp", "all-gather", gathers, gathers * hidden_bytes),
        Transfer("tp", "reduce-scatter", scatters, scatters * hidden_bytes),
    ]


def _layers(config: Config, sizes: Sizes, chunk: range) -> list[Transfer]:
    """Of a chunk's layers for one micro-batch: forward, backward, and forward again where it is
    recomputed.

    With sequence parallelism a column-parallel layer's input is gathered in forward and once more
    in backward.
    """
    hidden_bytes = sizes.tokens * sizes.hidden * sizes.itemsize
    layers = len(chunk)
    m = config.model
    runs = config.training.recomputed_runs(layers)
    moe = sum(map(m.is_moe_layer, chunk))
    blocks = 2 * layers - (0 if m.moe_shared_expert_intermediate_size else moe)
    sent = _tensor_parallel(sizes, hidden_bytes, blocks, blocks, blocks)
    modules = config.training.recomputed_modules
    if moe:
        sent += _experts(config, sizes, moe)
    if "moe" in modules:
        sent += _times(moe, _experts_recomputed(config, sizes))
    elif "shared_experts" in modules:
        sent += _times(moe, _shared_recomputed(config, sizes))
    if "mlp" in modules and sizes.sequence:
        sent += _times(layers - moe, [_gather(sizes)])
    for run in runs:
        sent += _run_recomputed(config, sizes, chunk[:run])
        chunk = chunk[run:]
    # q and k of all heads are divided by one root mean square, forward and backward
    norms = (2 * layers + sum(runs)) * 2 * (m.qk_layernorm and m.qk_layernorm_all_heads)
    sent += _times(norms, [Transfer("tp", "all-reduce", 1, sizes.tokens * sizes.wide)])
    if sizes.tp > m.query_groups:  # queries, keys and values of all ranks, and their gradients
        width = (m.num_attention_heads + 2 * m.query_groups) * m.head_dim
        nbytes = sizes.tokens * width * sizes.itemsize
        sent += _times(layers + sum(runs), [Transfer("tp", "all-gather", 1, nbytes)])
        sent += _times(layers, [Transfer("tp", "reduce-scatter", 1, nbytes)])
    cores = 2 * layers + (layers if "core_attn" in modules else sum(runs))
    return [*sent, *_context_parallel(config, sizes, cores, layers)]


def _run_recomputed(config: Config, sizes: Sizes, run: range) -> list[Transfer]:
    """Of the second forward of a run of recomputed layers. It ends before the last sum, whose
    result nothing but a norm needs."""
    m = config.model
    shared = bool(m.moe_shared_expert_intermediate_size)
    moe = sum(map(m.is_moe_layer, run))
    blocks = 2 * len(run) - (0 if shared else moe)
    sent = _times(moe, _experts_forward(config, sizes))
    if not m.post_mlp_layernorm:
        if m.is_moe_layer(run[-1]):
            blocks -= shared
            sent = _times(moe - 1, _experts_forward(config, sizes))
            sent += _experts_recomputed(config, sizes)
        else:
            blocks -= 1
            sent += [_gather(sizes)] if sizes.sequence else []
    gathers = [_gather(sizes)] if sizes.sequence else []
    return sent + _times(blocks, [*gathers, _sum(sizes)])


def _times(number: int, sent: list[Transfer]) -> list[Transfer]:
    return [t._replace(calls=number * t.calls, nbytes=number * t.nbytes) for t in sent]


def _experts(config: Config, sizes: Sizes, layers: int) -> list[Transfer]:
    """Of so many MLPs of experts: tokens, probabilities and numbers of experts go to the ranks
    that share the experts, results come back, and the gradients of tokens, probabilities and
    results; routers count the tokens of each expert."""
    sent = _experts_forward(config, sizes)
    sent += _to_experts(config, sizes, True)
    sent += _from_experts(config, sizes, True)
    return _times(layers, sent)


def _experts_forward(config: Config, sizes: Sizes) -> list[Transfer]:
    """Of the forward of an MLP of experts."""
    sent = [*_router(config, sizes), *_to_experts(config, sizes, False)]
    return [*sent, *_from_experts(config, sizes, False)]


def _experts_recomputed(config: Config, sizes: Sizes) -> list[Transfer]:
    """Of the second forward of an MLP of experts. It ends before the last sum, whose result nothing
    needs."""
    if config.model.moe_shared_expert_intermediate_size:
        return [*_experts_forward(config, sizes), *_shared_recomputed(config, sizes)]
    sent = [*_router(config, sizes), *_to_experts(config, sizes, False)]
    if config.model.sends_to_experts:
        back = _from_experts(config, sizes, False)
        return [*sent, *(t for t in back if t.axis == "ep")]
    return sent


def _shared_recomputed(config: Config, sizes: Sizes) -> list[Transfer]:
    """Of the second forward of a shared expert, whose sum only its gate needs."""
    if not config.model.moe_shared_expert_intermediate_size:
        return []
    gather = [_gather(sizes)] if sizes.sequence else []
    return [*gather, *([_sum(sizes)] if config.model.moe_shared_expert_gate else [])]


def _gather(sizes: Sizes) -> Transfer:
    """The input of a column-parallel layer, under sequence parallelism."""
    return Transfer("tp", "all-gather", 1, sizes.tokens * sizes.hidden * sizes.itemsize)


def _sum(sizes: Sizes) -> Transfer:
    """The result of a row-parallel layer."""
    operation = "reduce-scatter" if sizes.sequence else "all-reduce"
    return _gather(sizes)._replace(operation=operation)


def _router(config: Config, sizes: Sizes) -> list[Transfer]:
    """Counts and scores that the routers of a layer exchange."""
    m = config.model
    sent = []
    for kind in m.balancing_losses:
        groups = config.training.micro_batch_size if kind == "seq_aux_loss" else 1
        counts = Transfer("cp", "all-reduce", 1, groups * m.experts * sizes.wide)
        sent += [counts]
        if sizes.sequence:
            sent += [counts._replace(axis="tp")]
        if kind == "global_aux_loss":
            sent += [counts._replace(axis="dp")]
    selections = m.sinkhorn + bool(m.moe_expert_capacity_factor)
    if selections:
        rows = selections * sizes.tokens * m.experts * sizes.wide
        sent += [Transfer("cp", "all-gather", selections, sizes.cp * rows)]
        sent += [Transfer("tp", "all-gather", selections, rows)] if sizes.sequence else []
    return sent


def _exchange(sizes: Sizes) -> tuple[str, int, int, int]:
    """(Axis of the ranks whose tokens are brought together; bytes of these tokens, of the
    probabilities and of the numbers of their experts)."""
    copies = sizes.expert_tokens * sizes.config.model.moe_router_topk
    hidden_bytes = sizes.expert_tokens * sizes.hidden * sizes.itemsize
    axis = "tp" if sizes.etp == sizes.tp else "etp"
    return axis, hidden_bytes, copies * sizes.wide, copies * IDS


def _to_experts(config: Config, sizes: Sizes, backward: bool) -> list[Transfer]:
    """Tokens, probabilities and, in forward, numbers of experts on their way to the experts, or the
    gradients of the first two on their way back.

    All-to-all sends a token once for each of its experts, here as many to each rank.
    """
    m = config.model
    ep = config.parallel.expert_model_parallel_size
    axis, hidden_bytes, probs, numbers = _exchange(sizes)
    calls, nbytes = (2, hidden_bytes + probs) if backward else (3, hidden_bytes + probs + numbers)
    operation = "reduce-scatter" if backward else "all-gather"
    if sizes.sequence or sizes.tp == 1:
        sent = [Transfer(axis, operation, calls, nbytes)]
    else:
        sent = [Transfer("tp", "all-reduce", calls, nbytes)] if backward else []
    if not m.sends_to_experts:
        return [*sent, Transfer("ep", operation, calls, ep * nbytes)]
    if not backward:
        sent += [Transfer("ep", "all-gather", 1, ep * m.experts * IDS)]
    return [*sent, Transfer("ep", "all-to-all", 2, m.moe_router_topk * hidden_bytes + probs)]


def _from_experts(config: Config, sizes: Sizes, backward: bool) -> list[Transfer]:
    """The results of experts on their way back, or their gradients."""
    m = config.model
    ep = config.parallel.expert_model_parallel_size
    axis, hidden_bytes, _, _ = _exchange(sizes)
    operation = "all-gather" if backward else "reduce-scatter"
    if m.sends_to_experts:
        sent = [Transfer("ep", "all-to-all", 1, m.moe_router_topk * hidden_bytes)]
    else:
        sent = [Transfer("ep", operation, 1, ep * hidden_bytes)]
    if sizes.sequence or sizes.tp == 1:
        return [*sent, Transfer(axis, operation, 1, hidden_bytes)]
    return sent if backward else [*sent, Transfer("tp", "all-reduce", 1, hidden_bytes)]


def _context_parallel(config: Config, sizes: Sizes, cores: int, layers: int) -> list[Transfer]:
    """Keys and values for `cores` passes of attention, and their gradients for one backward of each
    of `layers`."""
    keys_values = 2 * sizes.tokens * sizes.key  # of one rank
    if config.parallel.cp_comm_type == "all_gather":
        return [
            Transfer("cp", "all-gather", cores, cores * sizes.cp * keys_values * sizes.itemsize),
            Transfer("cp", "reduce-scatter", layers, layers * sizes.cp * keys_values * sizes.wide),
        ]
    hops = sizes.cp - 1  # of two parts each
    return [
        Transfer(
            "cp",
            "send",
            2 * hops * (cores + layers),
            hops * keys_values * (cores * sizes.itemsize + layers * sizes.wide),
        )
    ]


def _links(config: Config, sizes: Sizes, chunks: int, first: bool, last: bool) -> list[Transfer]:
    """Hidden states to the next virtual stage and their gradients to the one before."""
    m = config.model
    element_bytes = sizes.itemsize if m.apply_residual_connection_post_layernorm else sizes.residual
    hidden = sizes.rows * sizes.hidden * element_bytes
    return [
        Transfer("pp", "send", chunks - last, (chunks - last) * hidden),
        Transfer("pp_gradients", "send", chunks - first, (chunks - first) * hidden),
    ]


def gradients(config: Config, plan: Plan, stage: int) -> list[Transfer]:
    """Bucket by bucket: copies that saw part of their gradient, then ranks that saw other tokens,
    then the weights."""
    p = config.precision
    sent = []
    for bucket in flat_layout(config, plan, stage).buckets:
        elements = bucket.stop - bucket.start
        nbytes = elements * BYTES[p.grad_dtype]
        sharers = bucket.shards
        of = "expert_" if bucket.experts else ""
        sent += [Transfer(axis, "all-reduce", 1, nbytes) for axis in bucket.partial]
        kinds = ("reduce-scatter", "all-gather")
        calls = 1
        largest = nbytes // sharers
        if bucket.whole_params and sharers > 1:
            owned = [
                stop - start for start, stop in map(bucket.shard, range(sharers)) if stop > start
            ]
            kinds = ("reduce", "broadcast")
            calls = len(owned)
            largest = max(owned) * BYTES[p.grad_dtype]
        sent += [
            Transfer(f"{of}instances", "all-reduce", 1, largest),
            Transfer(f"{of}shard", kinds[0], calls, nbytes),
            Transfer(f"{of}shard", kinds[1], calls, elements * BYTES[p.params_dtype]),
        ]
    return sent


def _matrices(config: Config, plan: Plan, stage: int) -> list[Transfer]:
    """What tensor-parallel ranks gather to orthogonalize whole matrices: those of all weights, or
    of the weights of the rank of the distributed optimizer that has most of them."""
    axes = axis_sizes(config, plan)
    table = [spec for spec in plan.parameters_of(stage) if spec.trained]
    layout = flat_layout(config, plan, stage)
    element_bytes = BYTES[config.precision.main_dtype]
    tensors = 1 if config.muon.muon_neuron_beta2 is None else 2
    most: list[Transfer] = []
    for rank in range(layout.shards):
        shards = [rank * axes[axis] // layout.shards for axis in ("shard", "expert_shard")]
        alike: Counter[tuple[str, bool, tuple[int, ...]]] = Counter()
        for spec, (start, stop) in zip(table, layout.spans(*shards), strict=True):
            if start < stop and by_muon(config, spec):
                shape = spec.local_shape({"ep": axes["ep"]})
                if is_experts(spec.name):
                    matrix = math.prod(spec.local_shape(axes)[1:])
                    shape = ((stop - start) // matrix, *shape[1:])
                for axis in {axis for axis, _ in spec.splits} - {"ep"}:
                    alike[axis, is_qkv(spec.name), shape] += 1
        sent = []
        for (axis, _, shape), n in alike.items():
            elements = math.prod(shape)
            calls = -(-n // at_a_time(elements))
            sent.append(Transfer(axis, "all-gather", calls, n * elements * element_bytes * tensors))
        most = max(most, sent, key=lambda transfers: sum(t.nbytes for t in transfers))
    return most


def _scalars(config: Config, sizes: Sizes) -> list[Transfer]:
    """Loss, tokens, requests and what features count over all ranks; norm, overflow and zeros over
    the ranks of one optimizer."""
    scaled = config.precision.fp16 or config.precision.loss_scale is not None
    measured = (
        scaled
        or config.optimizer.clip_grad > 0
        or any(demands.vetoes for demands in config.demands)
    )
    sums = measured + scaled + config.logging.log_num_zeros_in_grad
    numbers = 2 + REQUESTS + config.model.router_numbers
    numbers += sum(demands.step_numbers for demands in config.demands)
    return [
        Transfer("world", "all-reduce", 1, numbers * 8),
        Transfer("optimizer", "all-reduce", sums, sums * 8),
    ]
