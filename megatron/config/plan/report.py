"""The plan as text, for --dry-run: sizes, what each pipeline stage holds and sends, batch and
run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron import log
from megatron.config.checks.tokenizer import BYTE_VOCAB_SIZE, TIKTOKEN_VOCAB_SIZE
from megatron.config.plan.costs import activations
from megatron.config.plan.fit import gib, host_copies
from megatron.config.plan.plan import (
    Plan,
    bytes_per_rank,
    flat_layout,
    make_plan,
    parameters_per_rank,
    shards,
    whole_partition,
)
from megatron.config.plan.schedules import bubble_fraction
from megatron.config.plan.tokenizer_ids import ids_in_file
from megatron.config.plan.transfers import axis_sizes, sent_by_axis
from megatron.config.plan.zero_partition import assignment
from megatron.config.tree import Config
from megatron.small_files import read_json

if TYPE_CHECKING:
    from megatron.config.command_line import CommandLine

GIB = 2**30
_GPT2_VOCABULARY = 50257
_AXES = {"tp": "tensor", "ep": "expert", "cp": "context", "dp": "data", "pp": "pipeline"}


def describe(config: Config, plan: Plan) -> list[str]:
    """The plan in lines."""
    p = config.parallel
    m = config.model
    t = config.training
    dropped = plan.skips.count_in(1, plan.train_iters)
    first = plan.batch.phases[0].global_batch_size
    padding = f", {plan.num_padding} of them padding" if plan.num_padding else ""
    active = f", {plan.num_active} active" if m.num_experts else ""
    ep = p.expert_model_parallel_size
    experts = f"; experts over {ep} of the data and context ranks" if ep > 1 else ""
    return [
        f"world size {plan.world_size} = data {plan.data_parallel_size} x tensor "
        f"{p.tensor_model_parallel_size} x pipeline {p.pipeline_model_parallel_size} x context "
        f"{p.context_parallel_size}{experts}",
        f"model: {m.num_layers} layers, hidden {m.hidden_size}, {m.blocks_text}, "
        f"sequence {m.seq_length}, positions {m.positions}",
        f"vocabulary: {plan.vocab_size}, padded to {plan.padded_vocab_size}",
        f"parameters: {plan.num_parameters}{active}{padding}",
        *memory_lines(config, plan),
        *traffic_lines(config, plan),
        f"batch: {first} samples = {t.micro_batch_size} x {plan.data_parallel_size} ranks x "
        f"{plan.batch.num_microbatches(0)} micro-batches"
        + ("" if plan.batch.is_constant else ", growing:"),
        *(line for line in plan.batch.lines() if not plan.batch.is_constant),
        f"run: {plan.train_iters} iterations, {plan.targets.train} samples, "
        f"{plan.targets.train * m.seq_length:,} tokens"
        + (f", {dropped} iterations skipped" if dropped else ""),
        f"data: train {plan.targets.train}, validation {plan.targets.valid}, test "
        f"{plan.targets.test} samples, split {plan.split or 'given per path'}",
    ]


def memory_lines(config: Config, plan: Plan) -> list[str]:
    """A table of what a rank of each pipeline stage holds; stages that hold as much share a row."""
    rows = []
    stages = range(len(plan.layers_per_stage))
    by_stage = [activations(config, plan, stage) for stage in stages]
    for stage in stages:
        state = bytes_per_rank(config, plan, stage)
        optimizer = state["main weights"] + state["optimizer moments"] + state["FP8 scales"]
        together = sum(state.values()) + by_stage[stage].total
        rows.append(
            [
                f"{number:,}"
                for number in (
                    parameters_per_rank(config, plan, stage),
                    state["weights"],
                    state["gradients"],
                    optimizer,
                    by_stage[stage].total,
                )
            ]
            + [f"{together / GIB:.2f}"]
        )
    titles = ("parameters", "weights", "gradients", "optimizer", "activations", "total GiB")
    ranks = shards(config, plan)
    share = f" (optimizer: sharded over {ranks} ranks)" if ranks > 1 else ""
    lines = [f"bytes per rank, by pipeline stage{share}:", *_table(titles, rows, plan)]
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
    device = "the CPU" if config.training.device == "cpu" else "CUDA"
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
        layers = sum(map(len, plan.layers_per_stage[stage]))
        if (
            groups
            and groups[-1][1] == row
            and layers == sum(map(len, plan.layers_per_stage[groups[-1][0][0]]))
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
    chunks = plan.layers_per_stage[stages[0]]
    if len(stages) > 1:
        layers = sum(map(len, chunks))
        return f"{layers} each" + (f" in {len(chunks)} chunks" if len(chunks) > 1 else "")
    return " + ".join([*map(_span, chunks[:2]), *["..."] * (len(chunks) > 2)])


def vocabulary(config: Config) -> tuple[int, str]:
    """(size, where it comes from) of the vocabulary as far as it is known without building the
    tokenizer."""
    d = config.data
    if d.vocab_size is not None:
        return d.vocab_size, "--vocab-size"
    if d.tokenizer == "TikTokenizer":
        return TIKTOKEN_VOCAB_SIZE, "TikTokenizer's, without --vocab-size"
    if d.tokenizer == "ByteTokenizer":
        return BYTE_VOCAB_SIZE, "ByteTokenizer's"
    if d.tokenizer_model and (size := ids_in_file(d.tokenizer, d.tokenizer_model)):
        return size, f"--tokenizer-model {d.tokenizer_model}"
    if d.tokenizer == "GPT2BPETokenizer" and d.vocab_file and os.path.isfile(d.vocab_file):
        try:
            size = len(read_json(d.vocab_file))
            return max(1, size), f"--vocab-file {d.vocab_file}"
        except (OSError, ValueError, TypeError):
            # building the tokenizer says what is wrong with it
            pass
    return _GPT2_VOCABULARY, "assumed, GPT-2's; give --vocab-size to plan for another"


def print_plan(line: CommandLine) -> Plan:
    """What --dry-run prints first; the plan."""
    size, source = vocabulary(line.config)
    plan = make_plan(line.config, line.world_size, size)
    lines = [
        *line.notes,
        f"plan for {line.world_size} rank{'s' * (line.world_size > 1)} (vocabulary: {source})",
    ]
    log.print_line("\n".join([*lines, *(f"  {text}" for text in describe(line.config, plan))]))
    return plan
