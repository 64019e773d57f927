"""What a rank sends in a training step, by formula: the transfers of `parallel/`, call by call.
Tests measure it in real runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from megatron.config.plan.buckets import UnitName, unit_of
from megatron.config.plan.costs import MicroBatchSizes
from megatron.config.plan.muon_matrices import at_a_time
from megatron.config.plan.parameter_spec import Matrices
from megatron.config.plan.parameters import Chunk
from megatron.config.plan.plan import (
    BYTES,
    Plan,
    by_muon,
    embedding_stages,
    expert_shards,
    fp8_layers,
    shards,
    shares_units,
)
from megatron.config.plan.sharing import flat_layout, passes
from megatron.config.plan.transfer import (
    Transfer,
    gathered_input,
    summed_result,
    times,
)
from megatron.config.tree import Config
from megatron.model.blocks.block import AFTER_MLP

# Kinds of requests that travel with the loss: the fields of training/result.py:Requests.
REQUESTS = 5
# The kind of parallelism that what goes along an axis is counted for; others carry a few bytes.
PARALLELISM = {
    "tp": "tp",
    "etp": "tp",
    "ep": "ep",
    "cp": "cp",
    "cp_heads": "cp",
    "cp_ring": "cp",
    "pp": "pp",
    "pp_gradients": "pp",
    "ends": "pp",
    "shard": "dp",
    "instances": "dp",
    "dp_cp": "dp",
    "dp": "dp",
    "expert_shard": "dp",
    "expert_instances": "dp",
}


def axis_sizes(config: Config, plan: Plan) -> dict[str, int]:
    """Ranks of each axis of `parallel.context.ParallelContext` that a step uses."""
    p = config.parallel
    replicas = plan.data_parallel_size * config.parallel.context_parallel_size
    tp = p.tensor_model_parallel_size
    pp = p.pipeline_model_parallel_size
    cp_heads, cp_ring = p.split_context("a2a+p2p")
    shard = shards(config, plan)
    expert_shard = expert_shards(config, plan)
    return {
        "tp": tp,
        "ep": p.expert_model_parallel_size,
        "etp": p.expert_tensor_parallel,
        "cp": p.context_parallel_size,
        "cp_heads": cp_heads,
        "cp_ring": cp_ring,
        "dp": plan.data_parallel_size,
        "dp_cp": replicas,
        "pp": pp,
        "pp_gradients": pp,
        "ends": len(embedding_stages(config)),
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
    sizes = MicroBatchSizes(config, plan)
    chunks = plan.chunks(stage)
    micro_batches = plan.num_microbatches(plan.train_iters)
    first, final, last = (any(chunk[i] for chunk in chunks) for i in (1, 2, 3))
    sent = [*gradients(config, plan, stage), *_scalars(config, plan, sizes)]
    if config.optimizer.optimizer == "muon":
        sent += _matrices(config, plan, stage)
    if config.precision.fp8_recipe == "delayed" and (layers := fp8_layers(config, plan, stage)):
        # the maxima of each layer's input, weight and gradient
        sent += [Transfer(axis, "all-reduce", 1, len(layers) * 3 * 4) for axis in ("tp", "dp_cp")]
    per_micro_batch = [
        *(t for chunk in chunks for t in _layers(config, sizes, chunk.layers)),
        *(t for chunk in chunks for t in _links(config, plan, sizes, chunk)),
    ]
    for number in plan.behind if final else ():
        per_micro_batch += _layers(config, sizes, range(number, number + 1))
        for block in config.model.layer(number).outer:
            traffic = block.traffic(sizes)
            per_micro_batch += [*traffic.forward, *traffic.backward]
    if first:  # the embedding's result, and its gradient
        per_micro_batch += [*summed_result(sizes), *gathered_input(sizes)]
    if last:  # the output layer's input, forward and backward, and its gradient
        head = [*times(2, gathered_input(sizes)), *summed_result(sizes)]
        outputs = 1 + len(plan.behind)
        per_micro_batch += times(outputs, head)
        # three numbers of each token, of layers behind also the largest logit, for the log
        numbers = (3 + 4 * len(plan.behind)) * sizes.tokens
        per_micro_batch.append(Transfer("tp", "all-reduce", 2 * outputs, numbers * sizes.loss))
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
    axes = axis_sizes(config, plan)
    nbytes = dict.fromkeys(("tp", "ep", "cp", "dp", "pp"), 0)
    for transfer in transfers(config, plan, stage):
        if transfer.axis in PARALLELISM:
            nbytes[PARALLELISM[transfer.axis]] += transfer.sent(axes[transfer.axis])
    return nbytes


def _merged(sent: list[Transfer], axes: dict[str, int]) -> list[Transfer]:
    """One of each kind; nothing is sent along an axis of one rank."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for axis, operation, calls, nbytes in sent:
        if axes[axis] > 1 and calls:
            before = totals.get((axis, operation), (0, 0))
            totals[axis, operation] = before[0] + calls, before[1] + nbytes
    return [Transfer(*kind, *total) for kind, total in totals.items()]


def _layers(config: Config, sizes: MicroBatchSizes, chunk: range) -> list[Transfer]:
    """Of a chunk's layers for one micro-batch: forward, backward, and forward again where it is
    recomputed."""
    m = config.model
    modules = config.training.recomputed_modules
    sent: list[Transfer] = []
    for spec, layers in m.layer_counts(chunk).items():
        for block in spec.blocks:
            traffic = block.traffic(sizes)
            again = traffic.unneeded if block.recomputed_as in modules else traffic.recomputed
            sent += times(layers, [*traffic.forward, *traffic.backward, *again])
    for run in config.training.recomputed_runs(len(chunk)):
        *blocks, last = [block for number in chunk[:run] for block in m.layer(number).blocks]
        for block, count in Counter(blocks).items():
            sent += times(count, block.traffic(sizes).forward)
        # the last result of a run is needed by a norm alone
        traffic = last.traffic(sizes)
        sent += traffic.forward if AFTER_MLP in m.layer(chunk[run - 1]).norms else traffic.unneeded
        chunk = chunk[run:]
    return sent


def _links(config: Config, plan: Plan, sizes: MicroBatchSizes, chunk: Chunk) -> Iterator[Transfer]:
    """Hidden states to the next virtual stage and their gradients to the one before; between layers
    behind the decoder and their loss those of each."""
    m = config.model
    element_bytes = sizes.itemsize if m.apply_residual_connection_post_layernorm else sizes.residual
    hidden = sizes.rows * sizes.hidden * element_bytes
    all_hidden = hidden * (1 + len(plan.behind))
    if not chunk.last:
        yield Transfer("pp", "send", 1, all_hidden if chunk.final else hidden)
    if not chunk.first:
        before = chunk.last and not chunk.final
        yield Transfer("pp_gradients", "send", 1, all_hidden if before else hidden)


def gradients(config: Config, plan: Plan, stage: int) -> list[Transfer]:
    """Bucket by bucket: copies that saw part of their gradient, then ranks that saw other tokens,
    then the weights."""
    p = config.precision
    sent = []
    by_unit = shares_units(config, plan)
    often, gathers = _of_units(config, plan, stage) if by_unit else (1, Counter[UnitName]())
    names = [spec.name for spec in plan.parameters_of(stage) if spec.trained]
    for bucket in flat_layout(config, plan, stage).buckets:
        elements = bucket.stop - bucket.start
        nbytes = elements * BYTES[p.grad_dtype]
        sharers = bucket.shards
        of = "expert_" if bucket.experts else ""
        gathered = gathers[unit_of(names[bucket.members[0]])] if gathers else 1
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
        # what ranks share by unit is summed over these when it is reduced
        summed = largest if by_unit else nbytes
        sent += [Transfer(axis, "all-reduce", 1, summed) for axis in bucket.partial]
        weights = elements * BYTES[p.params_dtype]
        sent += [
            Transfer(f"{of}instances", "all-reduce", 1, largest),
            Transfer(f"{of}shard", kinds[0], often * calls, often * nbytes),
            Transfer(f"{of}shard", kinds[1], gathered * calls, gathered * weights),
        ]
    return sent


def _of_units(config: Config, plan: Plan, stage: int) -> tuple[int, Counter[UnitName]]:
    """How often a step reduces each unit, and how often it gathers which; nothing where they are
    gathered once, after the update."""
    micro_batches = plan.num_microbatches(plan.train_iters)
    gathers: Counter[UnitName] = Counter()
    for each in passes(config, plan, stage):
        gathers += each.gathers
    return micro_batches, Counter({u: n * micro_batches for u, n in gathers.items()})


def _matrices(config: Config, plan: Plan, stage: int) -> list[Transfer]:
    """What tensor-parallel ranks gather to orthogonalize whole matrices: those of all weights, or
    of the weights of the rank of the distributed optimizer that has most of them."""
    axes = axis_sizes(config, plan)
    table = [spec for spec in plan.parameters_of(stage) if spec.trained]
    layout = flat_layout(config, plan, stage)
    element_bytes = BYTES[config.precision.main_dtype]
    tensors = config.muon.states
    most: list[Transfer] = []
    for rank in range(layout.shards):
        shards = [rank * axes[axis] // layout.shards for axis in ("shard", "expert_shard")]
        alike: Counter[tuple[str, Matrices, tuple[int, ...]]] = Counter()
        for spec, (start, stop) in zip(table, layout.spans(*shards), strict=True):
            if start < stop and by_muon(config, spec):
                assert spec.matrices is not None
                shape = spec.local_shape({"ep": axes["ep"]})
                if spec.matrices.stacked:
                    matrix = math.prod(spec.local_shape(axes)[1:])
                    shape = ((stop - start) // matrix, *shape[1:])
                for axis in {axis for axis, _ in spec.splits} - {"ep"}:
                    alike[axis, spec.matrices, shape] += 1
        sent = []
        for (axis, _, shape), n in alike.items():
            elements = math.prod(shape)
            calls = -(-n // at_a_time(elements))
            sent.append(Transfer(axis, "all-gather", calls, n * elements * element_bytes * tensors))
        most = max(most, sent, key=lambda transfers: sum(t.nbytes for t in transfers))
    return most


def _scalars(config: Config, plan: Plan, sizes: MicroBatchSizes) -> list[Transfer]:
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
    numbers += 4 * len(plan.behind)  # sums and counts of losses and predictions
    numbers += sum(demands.step_numbers for demands in config.demands)
    recorded = bool(config.scored_by)
    scores = (config.model.num_layers + len(plan.behind)) * config.model.num_attention_heads
    return [
        Transfer("world", "all-reduce", recorded, recorded * scores * sizes.wide),
        Transfer("world", "all-reduce", 1, numbers * 8),
        Transfer("optimizer", "all-reduce", sums, sums * 8),
    ]
