"""Rules of how ranks share the model and the batch: tensor, sequence, context and pipeline
parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks import ddp
from megatron.config.checks.batch import SIZES, batch, evaluates_otherwise, sizes_that_fit
from megatron.config.checks.facts import Facts
from megatron.config.plan.plan import batch_schedule, evaluation_batch, layer_split
from megatron.config.plan.stages import check_micro_batches

# What needs gradients, or (in ZeRO-3) weights, that are there all the time, with its value when it
# is off.
_GRADIENTS = {
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "torch_compile": False,
    "zero_partition": "even",
}


def rule(f: Facts) -> Iterator[str]:
    """One line for each problem of the layout."""
    yield from _sequence(f)
    yield from _context(f)
    yield from _pipeline(f)
    yield from _world_size(f)
    if f["world_size"] is not None and not f["dry_run"]:
        yield (
            f"--world-size {f['world_size']}: only for --dry-run; the launcher (torchrun, srun) "
            "sets the real one [world-size-only-for-dry-run]"
        )
    backend = f["distributed_backend"]
    if backend not in (None, "gloo") and f["device"] == "cpu" and f.world_size > 1:
        devices = "CUDA" if backend == "nccl" else "Intel"
        yield (
            f"--distributed-backend {backend}: works between {devices} devices, not with --device "
            "cpu; use gloo [nccl-on-cpu]"
        )
    yield from _sharding(f)
    yield from ddp.problems(f.config.parallel, f.world_size)


def notes(f: Facts) -> Iterator[str]:
    """Warnings about settings that no rule forbids."""
    if f["expert_model_parallel_size"] > 1 and f["moe_token_dispatcher_type"] == "flex":
        yield (
            f"{f.say('moe_token_dispatcher_type')}: tokens are exchanged as with alltoall, with "
            "the same results [moe-dispatcher-not-supported]"
        )
    yield from ddp.notes(f.config.parallel, f.world_size)


def _sharding(f: Facts) -> Iterator[str]:
    """One line for each flag that shared gradients or weights cannot go with."""
    p = f.config.parallel
    if not p.shares_gradients:
        return
    for name, off in _GRADIENTS.items():
        if f[name] != off:
            yield (
                f"{f.say(name)}: not supported with {f.say('data_parallel_sharding_strategy')}; "
                "omit it, or use --data-parallel-sharding-strategy optim [flags-exclude-each-other]"
            )


def _sequence(f: Facts) -> Iterator[str]:
    """A sequence is split into two chunks per context-parallel rank; sequence parallelism splits a
    rank's part further."""
    sizes = ("tensor_model_parallel_size", "context_parallel_size")
    if not f.ok("seq_length", *sizes):
        return
    tp, cp, seq = *(f[name] for name in sizes), f["seq_length"]
    chunks = 2 * cp if cp > 1 else 1
    shards = cp * tp if f["sequence_parallel"] else 1
    unit = math.lcm(chunks, shards)
    nearest = sorted({max(unit, seq // unit * unit), (seq // unit + 1) * unit})
    use = f"use {' or '.join(map(str, nearest))}"
    if seq % chunks:
        yield (
            f"{f.say('seq_length')}: not a multiple of 2 x {f.say(sizes[1])}; {use}, or fewer "
            "context-parallel ranks [context-parallel-does-not-divide-sequence]"
        )
    elif seq % unit:
        ranks = " x ".join(f.say(name) for name in sizes if f[name] > 1)
        yield (
            f"{f.say('seq_length')}: not a multiple of {ranks}, over which --sequence-parallel "
            f"splits it; {use}, or omit --sequence-parallel "
            "[sequence-parallel-does-not-divide-sequence]"
        )


def _context(f: Facts) -> Iterator[str]:
    """A kind of communication for each layer or one for all; two sizes for the one with levels."""
    types = f["cp_comm_type"]
    if f.ok("num_layers") and len(types) not in (1, f["num_layers"]):
        yield (
            f"{f.say('cp_comm_type')}: {len(types)} for {f.say('num_layers')}; give one for all "
            "layers, or one for each [cp-comm-type-count-wrong]"
        )
    cp = f["context_parallel_size"]
    sizes = f["hierarchical_context_parallel_sizes"]
    if "a2a+p2p" not in types or not f.ok("context_parallel_size") or cp == 1:
        return
    pairs = " or ".join(f"{n} {cp // n}" for n in range(2, cp) if cp % n == 0)
    use = f"use {pairs}" if pairs else f"use --cp-comm-type a2a, as {cp} ranks have no two levels"
    if sizes is None:
        yield (
            f"{f.say('cp_comm_type')}: needs --hierarchical-context-parallel-sizes, of ranks that "
            f"exchange heads and of a ring; {use} [flag-needs-other-flag]"
        )
    elif math.prod(sizes) not in (0, cp):
        yield (
            f"{f.say('hierarchical_context_parallel_sizes')}: the product is not "
            f"{f.say('context_parallel_size')}; {use} [context-parallel-sizes-wrong]"
        )


def _pipeline(f: Facts) -> list[str]:
    """Every (virtual) stage must have a layer, and interleaving needs its groups of micro-batches
    in every phase."""
    if not f.ok("num_layers", "pipeline_model_parallel_size"):
        return []
    if f["pipeline_model_parallel_size"] > f.world_size:
        return []  # another rule says that there are too few ranks
    try:
        chunks = len(layer_split(f.config)[0])
    except ValueError as error:
        return [str(error)]
    problems = []
    for size, evaluated in _sizes(f) if chunks > 1 else ():
        try:
            check_micro_batches(
                size,
                f["pipeline_model_parallel_size"],
                chunks,
                f["microbatch_group_size_per_vp_stage"],
            )
        except ValueError as error:
            text = str(error)
            if evaluated:
                text = "in validation, " + text.replace(" --global", " --eval-global")
            problems.append(text)
    return problems


def _sizes(f: Facts) -> list[tuple[int, bool]]:
    """Every number of micro-batches of a step that is still to come, and of a batch of validation
    (True); [] where batch or world size do not fit."""
    if (
        not f.ok(*SIZES)
        or f.bad & {"global_batch_size", "seq_length"}
        or [*_world_size(f), *batch(f)]
    ):
        return []
    schedule = batch_schedule(f.config, max(1, f.world_size))
    phases = schedule.phases[-1:] if f["load"] else schedule.phases
    sizes = [(phase.global_batch_size // schedule.divisor, False) for phase in phases]
    if evaluates_otherwise(f):
        sizes.append((evaluation_batch(f.config, schedule).num_microbatches, True))
    return list(dict.fromkeys(sizes))


def _world_size(f: Facts) -> Iterator[str]:
    """The world size must be a multiple of the ranks of a model replica."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    if not f.ok(*names):
        return
    replica_ranks = math.prod(f[name] for name in names)
    if f.world_size % replica_ranks:
        product = " x ".join(f.say(name) for name in names if f[name] > 1)
        near = " or ".join(map(str, sizes_that_fit(f, replica_ranks))) or replica_ranks
        remedy = (
            f"--world-size {near}"
            if f["dry_run"]
            else f"torchrun --nproc-per-node {near} (on several nodes, times --nnodes)"
        )
        yield (
            f"{product}: a model replica takes {replica_ranks} ranks, and world size "
            f"{f.world_size} is not a multiple of {replica_ranks}; use {remedy} "
            "[world-size-does-not-fit-model]"
        )
