"""The parallel layouts of a run on so many GPUs that fit, ranked by the time of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megatron.config.command_line import CommandLine, planned
from megatron.config.plan.costs import MicroBatchSizes
from megatron.config.plan.fit import GIB, SPARE, RankMemory, fullest
from megatron.config.plan.plan import Plan, make_plan
from megatron.config.plan.schedules import activations_alive
from megatron.config.tree import Config

from .machines import Machine
from .run_sizes import sizes
from .step_time import Runs, parameters, step_seconds

AXES = ("tp", "pp", "cp", "dp", "micro", "vpp", "balanced", "ep", "etp", "zero", "again")
# Flags that say a layout: those that are typed are left out of a search.
LAYOUT = (
    ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    + ("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel")
    + ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    + ("pipeline_model_parallel_layout", "micro_batch_size", "use_distributed_optimizer")
    + ("data_parallel_sharding_strategy", "recompute_granularity", "recompute_method")
    + ("recompute_num_layers", "recompute_activations", "overlap_grad_reduce")
    + ("overlap_param_gather", "decoder_first_pipeline_num_layers")
    + ("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split")
    + ("account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage")
)
BALANCED = [
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
]
MOST_TRIED = 40  # layouts of which the plan is made
ROUGH = 0.97  # of the quick estimate of memory, what the plan may say at least
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Found:
    """A layout: its flags, seconds of a step by kind, and what its fullest rank holds."""

    flags: tuple[str, ...]
    seconds: Mapping[str, float]
    memory: RankMemory

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def layouts(run: Runs, gpus: int) -> Runs:
    """`run`, of one model and batch, in every layout that its sizes allow, as arrays."""
    size = {field.name: getattr(run, field.name) for field in fields(run)}
    rows: list[tuple[int, ...]] = []
    for tp in _divisors(gpus, int(size["node"])):
        if size["heads"] % tp or size["ffn"] % tp:
            continue
        if size["groups"] % tp and tp % size["groups"]:
            continue
        for pp in _divisors(gpus // tp, size["layers"]):
            for cp in _divisors(gpus // tp // pp, 64):
                # a rank of fewer tokens of a sequence waits for keys and values
                if size["seq"] % (2 * cp * tp) or (cp > 1 and size["seq"] // cp < 2048):
                    continue
                dp = gpus // tp // pp // cp
                if size["batch"] % dp == 0:
                    rows += _of_grid(size, tp, pp, cp, dp)
    given: dict[str, Any] = {}
    if rows:
        given = dict(zip(AXES, np.array(rows, np.int32).T, strict=True))
        given["shard"] = given["dp"] * given["cp"]
    return replace(run, **given)


def _of_grid(
    size: Mapping[str, Any], tp: int, pp: int, cp: int, dp: int
) -> Iterator[tuple[int, ...]]:
    each = size["batch"] // dp
    ranks = tp * cp * dp
    experts = [(1, 1)]
    if size["experts"]:
        experts = [
            (ep, etp)
            for etp in sorted({1, tp})
            for ep in _divisors(size["experts"], ranks // etp)
            if ranks % (ep * etp) == 0 and size["moe_ffn"] % etp == 0
        ]
    shared = dp * cp > 1
    zeros = [0] if not shared else [1] if pp > 1 else [1, 3]
    for micro in (n for n in MICRO_BATCHES if each % n == 0):
        # cut sequences of several samples are as many whole ones, which wait for no keys
        if cp > 1 and micro > 1 and size["batch"] % (dp * cp) == 0:
            continue
        # as many layers in each chunk, or one less in the first and in the last
        chunks = [
            (count, balanced)
            for balanced, layers in ((0, size["layers"]), (3, size["layers"] + 2))
            for count in range(1, layers // pp + 1)
            if (count == 1 and not balanced)
            or (
                pp > 1
                and layers % (pp * count) == 0
                and (count == 1 or each // micro % pp == 0)
                and (not balanced or layers > pp * count)
            )
        ]
        for cut, (ep, etp), zero, again in itertools.product(chunks, experts, zeros, (0, 1)):
            yield tp, pp, cp, dp, micro, *cut, ep, etp, zero, again


def rough_memory(config: Config, plan: Plan, runs: Runs) -> np.ndarray:
    """Bytes of the first rank: what its parameters take, and what the plan says that a layer keeps,
    asked once for each of the sizes that this depends on."""
    dense, experts, embedding = parameters(runs)
    ends = embedding * (1 + (np.asarray(runs.pp) == 1))
    shard = np.maximum(np.where(np.asarray(runs.zero) > 0, runs.shard, 1), 1)
    of_experts = np.maximum(shard * runs.tp / (runs.ep * runs.etp), 1)
    low = np.asarray(runs.zero) >= 3
    kept = np.where(low, 6 / shard, 6 + 12 / shard)
    kept = np.where(low, 18 / shard, kept)
    kept_experts = np.where(low, 18 / of_experts, 6 + 12 / of_experts)
    state = (dense + ends) * kept + experts * kept_experts
    columns = np.stack(
        [
            np.broadcast_to(getattr(runs, name), np.shape(runs.tp))
            for name in ("tp", "cp", "ep", "etp", "micro", "again")
        ],
        axis=1,
    ).astype(int)
    distinct, place = np.unique(columns, axis=0, return_inverse=True)
    layer, head = np.array([_of_layer(config, plan, *map(int, row)) for row in distinct])[
        place.ravel()
    ].T
    micro_batches = np.asarray(runs.batch // (runs.dp * runs.micro)).astype(int)
    pipeline = np.stack([runs.pp, micro_batches, runs.vpp], axis=1)
    distinct, place = np.unique(pipeline, axis=0, return_inverse=True)
    alive = np.array(
        [activations_alive(0, *map(int, row)) if row[0] > 1 else 1 for row in distinct]
    )[place.ravel()]
    stored = alive * np.ceil(runs.layers / (runs.pp * runs.vpp)) * layer
    return state + stored + np.where(np.asarray(runs.pp) == 1, head, 0)


def _of_layer(
    config: Config, plan: Plan, tp: int, cp: int, ep: int, etp: int, micro: int, again: int
) -> tuple[float, float]:
    """Bytes that a mean layer of a micro-batch keeps, and those of the loss."""
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp if config.model.num_experts else None,
        sequence_parallel=tp > 1,
    )
    training = replace(config.training, micro_batch_size=micro)
    of = MicroBatchSizes(replace(config, parallel=parallel, training=training), plan)
    if again:
        return of.rows * of.hidden * of.residual, of.head()
    counts = config.model.layer_counts()
    kept = sum(count * spec.saved(of) for spec, count in counts.items())
    return kept / counts.total(), of.head()


def flags_of(layout: Mapping[str, int]) -> list[str]:
    """The layout as flags of pretrain_gpt.py."""
    sizes_of = {
        "--tensor-model-parallel-size": layout["tp"],
        "--pipeline-model-parallel-size": layout["pp"],
        "--num-virtual-stages-per-pipeline-rank": layout["vpp"],
        "--context-parallel-size": layout["cp"],
        "--expert-model-parallel-size": layout["ep"],
    }
    words = [part for flag, size in sizes_of.items() if size > 1 for part in (flag, str(size))]
    if layout["etp"] != layout["tp"]:
        words += ["--expert-tensor-parallel-size", str(layout["etp"])]
    words += BALANCED * (layout["balanced"] == 3)
    words += ["--sequence-parallel"] * (layout["tp"] > 1)
    words += ["--micro-batch-size", str(layout["micro"])]
    if layout["zero"] == 1:
        words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    elif layout["zero"] == 3:
        words += ["--data-parallel-sharding-strategy", "optim_grads_params"]
        words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    if layout["again"]:
        words += "--recompute-granularity full --recompute-method uniform".split()
        words += ["--recompute-num-layers", "1"]
    return words


def search(
    line: CommandLine, words: Sequence[str], machine: Machine, vocabulary: int, top: int
) -> tuple[list[Found], int]:
    """The best layouts of a run whose flags but those of its layout are `words`, and how many there
    are. Each was planned and its flags checked. Raises ValueError where none fits."""
    gpus = line.world_size
    plan = make_plan(line.config, gpus, vocabulary)
    runs = layouts(sizes(line.config, plan, machine), gpus)
    if np.ndim(runs.tp) == 0:
        raise ValueError(
            f"--gpus {gpus}: no layout shares --global-batch-size {runs.batch}, heads and layers "
            "among them; change the number of GPUs or the batch [no-layout-fits]"
        )
    seconds = step_seconds(machine.constants, runs)
    shape = np.shape(runs.tp)
    steps = np.broadcast_to(sum(seconds.values()), shape)
    limit = machine.facts["memory_gib"] * GIB * (1 - SPARE)
    order = np.argsort(
        np.where(rough_memory(line.config, plan, runs) * ROUGH < limit, steps, np.inf)
    )
    found: list[Found] = []
    for number in order[:MOST_TRIED]:
        if len(found) > top or not np.isfinite(steps[number]):
            break
        layout = {name: int(np.broadcast_to(getattr(runs, name), shape)[number]) for name in AXES}
        flags = (
            flags_of(layout)
            if line.config.model.num_experts
            else flags_of({**layout, "etp": layout["tp"]})
        )
        tried, problems = planned([*words, *flags], gpus)
        if problems:
            continue
        memory = fullest(tried.config, make_plan(tried.config, gpus, vocabulary))
        if memory.total <= limit:
            by_kind = {k: float(np.broadcast_to(v, shape)[number]) for k, v in seconds.items()}
            found.append(Found(tuple(flags), by_kind, memory))
    if not found:
        raise ValueError(
            f"--gpus {gpus}: no layout of {shape[0]} fits {machine.facts['memory_gib']} GiB; use "
            "more GPUs [no-layout-fits]"
        )
    return found, shape[0]


def why_slower(best: Found, other: Found) -> str:
    """Where it loses against the best, in a sentence."""
    gaps = {kind: other.seconds[kind] - best.seconds[kind] for kind in best.seconds}
    worst = max(gaps, key=lambda kind: gaps[kind])
    gain = min(gaps, key=lambda kind: gaps[kind])
    text = f"{gaps[worst]:+.3f} s of {worst}"
    return text + (f", {gaps[gain]:+.3f} s of {gain}" if gaps[gain] < -0.001 else "")
