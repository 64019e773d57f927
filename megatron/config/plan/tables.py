"""The plan as --dry-run prints it: the entries of `report`, and tables of what each pipeline stage
holds and sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron import log
from megatron.config.plan.costs import activations
from megatron.config.plan.fit import GIB, gib, host_copies
from megatron.config.plan.plan import (
    Plan,
    assignment,
    make_plan,
    parameters_per_rank,
    shards,
    shares_units,
)
from megatron.config.plan.report import entries, entry
from megatron.config.plan.saves import save_lines
from megatron.config.plan.schedules import bubble_fraction
from megatron.config.plan.sharing import flat_layout, whole_partition
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.config.plan.transfers import axis_sizes, sent_by_axis
from megatron.config.tree import Config

if TYPE_CHECKING:
    from megatron.config.command_line import CommandLine

_AXES = {"tp": "tensor", "ep": "expert", "cp": "context", "dp": "data", "pp": "pipeline"}


def describe(config: Config, plan: Plan, own_model: bool = False) -> list[str]:
    """All of it in lines: entries, sizes of batches that grow, tables, samples of each split."""
    targets = plan.targets
    return [
        *(entry(*each) for each in entries(config, plan, own_model).items()),
        *(line for line in plan.batch.lines() if not plan.batch.is_constant),
        *memory_lines(config, plan),
        *save_lines(config, plan),
        *traffic_lines(config, plan),
        f"data: train {targets.train}, validation {targets.valid}, test {targets.test} samples, "
        f"split {plan.split or 'given per path'}",
    ]


def memory_lines(config: Config, plan: Plan) -> list[str]:
    """A table of what a rank of each pipeline stage holds; stages that hold as much share a row."""
    rows = []
    stages = range(len(plan.layers_per_stage))
    by_stage = [activations(config, plan, stage) for stage in stages]
    for stage in stages:
        state = bytes_per_rank(config, plan, stage)
        optimizer = state["main weights"] + state["optimizer moments"] + state["FP8 scales"]
        on_device = sum(state.values()) - state.get("averages on the host", 0)
        together = on_device + by_stage[stage].total
        rows.append(
            [
                f"{number:,}"
                for number in (
                    parameters_per_rank(config, plan, stage),
                    state["weights"],
                    state["gradients"],
                    *([state["whole units"]] if "whole units" in state else []),
                    optimizer,
                    *(state[name] for name in config.other_models),
                    by_stage[stage].total,
                )
            ]
            + [f"{together / GIB:.2f}"]
        )
    whole = ["whole units"] * shares_units(config, plan)
    titles = ("parameters", "weights", "gradients", *whole, "optimizer", *config.other_models)
    ranks = shards(config, plan)
    share = f" (optimizer: sharded over {ranks} ranks)" if ranks > 1 else ""
    lines = [
        f"bytes per rank, by pipeline stage{share}:",
        *_table((*titles, "activations", "total GiB"), rows, plan),
    ]
    if ranks > 1 and assignment(config):
        for stage in stages:
            of_stage = f" of stage {stage}" if len(stages) > 1 else ""
            lines.append(
                f"  elements per ZeRO rank{of_stage}: {flat_layout(config, plan, stage).elements()}"
            )
            if (partition := whole_partition(config, plan, stage)) and partition.costs:
                lines.append(
                    f"  Newton-Schulz per ZeRO rank{of_stage}: the longest share is "
                    f"{partition.longest_share:.2f} of the mean"
                )
    alive = sorted({pairs.alive for pairs in by_stage})
    pairs_alive = f"{alive[0]} to {alive[-1]}" if len(alive) > 1 else f"{alive[0]}"
    unit = "chunks of micro-batches" if len(plan.layers_per_stage[0]) > 1 else "micro-batches"
    device = "the CPU" if config.training.on_cpu else "CUDA"
    recomputed = max(pairs.recomputed for pairs in by_stage)
    lines.append(
        f"  activations on {device}, of {pairs_alive} {unit}; {by_stage[-1].head:,} on the last "
        "stage are final norm, logits and loss"
    )
    if recomputed:
        lines.append(f"  {recomputed:,} of them while layers are recomputed")
    for user, size in host_copies(config, plan).items():
        lines.append(
            f"  in host memory: snapshots for {user}, {size:,} bytes ({gib(size)}) per rank"
        )
    return [
        *lines,
        "  not counted: padding of flat buffers, scratch memory inside kernels and collectives, "
        "what libraries take",
    ]


def traffic_lines(config: Config, plan: Plan) -> list[str]:
    """The bubble, and a table of what a rank of each stage sends in a step by kind of
    parallelism."""
    split = plan.layers_per_stage
    lines = []
    stages = len(split)
    chunks = len(split[0])
    micro_batches = plan.num_microbatches(plan.train_iters)
    if stages > 1:
        of = (
            f"({chunks} chunks x {micro_batches} micro-batches)"
            if chunks > 1
            else f"{micro_batches} micro-batches"
        )
        group = config.parallel.microbatch_group_size_per_vp_stage
        bubble = bubble_fraction(stages, micro_batches, chunks, group)
        lines.append(
            f"bubble: {bubble:.3f} of a stage's working time = ({stages} stages - 1) / {of}"
        )
    sizes = axis_sizes(config, plan)
    # more than 1 where anything has replicas
    sizes["dp"] *= sizes["cp"] * sizes["expert_shard"] * sizes["expert_instances"]
    used = [axis for axis in _AXES if sizes[axis] > 1]
    if not used:
        return lines
    sent = [sent_by_axis(config, plan, stage) for stage in range(stages)]
    rows = [[f"{row[axis] / 1e6:,.3f}" for axis in used] for row in sent]
    return [
        *lines,
        "MB (10^6 bytes) sent per rank and step, by kind of parallelism; as many are received:",
        *_table([_AXES[axis] for axis in used], rows, plan),
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], plan: Plan) -> list[str]:
    """Right-aligned columns; neighbouring stages of equal rows become one."""
    groups: list[tuple[list[int], Sequence[str]]] = []
    for stage, row in enumerate(rows):
        layers = sum(map(len, plan.numbers(stage)))
        if (
            groups
            and groups[-1][1] == row
            and layers == sum(map(len, plan.numbers(groups[-1][0][0])))
        ):
            groups[-1][0].append(stage)
        else:
            groups.append(([stage], row))
    cells = [
        ("stage", "layers", *titles),
        *((_span(stages), _layers(plan, stages), *row) for stages, row in groups),
    ]
    width = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width[i]) if i < 2 else cell.rjust(width[i]) for i, cell in enumerate(row)
        )
        for row in cells
    ]


def _span(numbers: Sequence[int] | range) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _layers(plan: Plan, stages: Iterable[int]) -> str:
    """`0-4`; `0-1 + 8-9` of two chunks, `0-1 + 8-9 + ...` of more; `12 each` of several stages."""
    stages = list(stages)
    chunks = plan.numbers(stages[0])
    if len(stages) > 1:
        layers = sum(map(len, chunks))
        return f"{layers} each" + (f" in {len(chunks)} chunks" if len(chunks) > 1 else "")
    return " + ".join([*map(_span, chunks[:2]), *["..."] * (len(chunks) > 2)])


def print_plan(line: CommandLine, vocabulary: tuple[int, str]) -> Plan:
    """What --dry-run prints first; the plan. `vocabulary`: its size, and where that comes from."""
    size, source = vocabulary
    plan = make_plan(line.config, line.world_size, size)
    ranks = f"{line.world_size} rank{'s' * (line.world_size > 1)}"
    lines = [*line.notes, f"plan for {ranks} (vocabulary: {source})"]
    log.print_line("\n".join([*lines, *describe(line.config, plan)]))
    return plan
