"""--dry-run --trace: the step of some ranks of the planned cluster, without a GPU; its lines and
its JSON file."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.config.checks import tokenizer as check_tokenizer
from megatron.config.command_line import CommandLine
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.data.tokenizers.build import NullTokenizer, Tokenizer
from megatron.training import script_args
from megatron.training.preflight import build_tokenizer
from megatron.training.step import ForwardStep

from .compare import Figure, check_agreement, figures
from .recorder import TraceError
from .simulated_group import Message
from .traced_rank import RankTrace, trace_rank, traced_config

SHOWN = 8  # operations of a rank


def trace(
    line: CommandLine,
    plan: Plan,
    forward_step: ForwardStep,
    requested: Sequence[str],
    output: str | None,
) -> list[str]:
    """Trace the ranks of --trace-ranks (`requested`), write --trace-output, and return the lines to
    print.

    Raises TraceError for what would stall or break the step on GPUs, ValueError for what cannot be
    traced.
    """
    _check(line.config)
    tokenizer = _tokenizer(line.config, plan)
    line = replace(line, config=traced_config(line.config))
    config = line.config
    ranks = chosen_ranks(requested, config, plan)
    lines = [
        f"trace of the step of iteration {plan.train_iters} on ranks "
        f"{', '.join(map(str, sorted(ranks)))} (a GPU's kernels, eager, tensors without values):"
    ]
    traces: list[RankTrace] = []
    names: tuple[str, ...] | None = None
    # the last stage first: it knows the names of the metrics
    for rank in sorted(ranks, reverse=True):
        start = time.perf_counter()
        script_args.begin(line, plan, "nccl", tokenizer, rank)
        traced = trace_rank(config, plan, rank, tokenizer, forward_step, names)
        names = names or traced.metric_names
        traces.insert(0, traced)
        lines.append(f"  rank {rank}: traced in {time.perf_counter() - start:.1f} s")
    check_agreement(traces)
    for traced in traces:
        lines += rank_lines(traced, figures(config, plan, traced))
    if len(traces) > 1:
        lines.append("  collectives and messages of these ranks fit each other")
    if output is not None:
        _write(Path(output), config, plan, traces)
        lines.append(f"  written: {output}")
    return lines


def _tokenizer(config: Config, plan: Plan) -> Tokenizer:
    """That of the command line; where its files are not on this machine, as many numbers as the
    plan has ids, which is all that a step without text needs. Raises ValueError for files that are
    no tokenizer."""
    if any(check_tokenizer.problems(config.data)):
        return NullTokenizer(plan.vocab_size)
    return build_tokenizer(config)


def _check(config: Config) -> None:
    """Raise ValueError for what has no kernels on the meta device."""
    if config.kernels.transformer_impl == "transformer_engine":
        raise ValueError(
            "--trace: Transformer Engine has no kernels for the meta device; use "
            "--transformer-impl local [trace-not-supported]"
        )


def chosen_ranks(words: Sequence[str], config: Config, plan: Plan) -> set[int]:
    """The ranks that --trace-ranks names. Raises ValueError."""
    p = config.parallel
    world = plan.world_size
    stage = world // p.pipeline_model_parallel_size
    apart = stage
    inside = p.tensor_model_parallel_size * p.context_parallel_size
    if p.use_tp_pp_dp_mapping:
        apart = inside
    named = {
        "first": [0],
        "last": [world - 1],
        "all-stages": [apart * number for number in range(p.pipeline_model_parallel_size)],
        "peers": [
            0,
            *[p.tensor_model_parallel_size - 1] * (p.tensor_model_parallel_size > 1),
            inside - 1,
            (stage if not p.use_tp_pp_dp_mapping else world) - inside,
        ],
    }
    chosen: set[int] = set()
    for word in words:
        if word in named:
            chosen.update(named[word])
        elif word.isdecimal() and int(word) < world:
            chosen.add(int(word))
        else:
            raise ValueError(
                f"--trace-ranks {word}: give first, last, all-stages, peers, or numbers below the "
                f"{world} ranks of the plan [trace-ranks-not-valid]"
            )
    return chosen


def rank_lines(trace: RankTrace, compared: Sequence[Figure]) -> list[str]:
    """What is printed of one rank."""
    memory = ", ".join(
        f"{kind} {nbytes:,}"
        for kind, nbytes in sorted(trace.memory.items(), key=lambda item: -item[1])
        if nbytes
    )
    flops = sum(trace.flops.values())
    most = ", ".join(f"{name} {count:,}" for name, count in list(trace.operations.items())[:SHOWN])
    lines = [
        f"  rank {trace.rank} (stage {trace.stage}):",
        f"    peak memory: {trace.peak:,} bytes: {memory}",
        f"    at: {trace.peak_operation}",
        f"    peak while building: {trace.build_peak:,} bytes",
        f"    FLOPs: {flops:,} "
        f"({', '.join(f'{name} {count:,}' for name, count in trace.flops.items())})",
        f"    launches: {sum(trace.launches.values()):,} "
        f"({', '.join(f'{span} {count:,}' for span, count in trace.launches.items())})",
        f"    most frequent: {most}",
    ]
    for (axis, operation), (calls, nbytes) in _totals(trace.messages).items():
        lines.append(f"    {operation} along {axis}: {calls:,} calls, {nbytes:,} bytes")
    for figure in compared:
        if figure.differs:
            apart = figure.traced / figure.planned - 1 if figure.planned else float("inf")
            lines.append(
                f"    {figure.name}: {figure.traced:,} bytes traced, {figure.planned:,} planned "
                f"({apart:+.1%})"
            )
    return lines


def _totals(messages: Sequence[tuple[str, Message]]) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, bytes) by axis and operation."""
    calls: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for axis, message in messages:
        calls[axis, message.operation] += 1
        nbytes[axis, message.operation] += message.nbytes
    return {key: (count, nbytes[key]) for key, count in calls.items()}


def _write(path: Path, config: Config, plan: Plan, traces: Sequence[RankTrace]) -> None:
    """The JSON file. Raises TraceError where it cannot be written."""
    content = {
        "world_size": plan.world_size,
        "iteration": plan.train_iters,
        "ranks": [_as_json(config, plan, trace) for trace in traces],
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TraceError(
            f"--trace-output {path}: {error.strerror or error}; give a file that can be written "
            "[trace-output-not-writable]"
        ) from None


def _as_json(config: Config, plan: Plan, trace: RankTrace) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "stage": trace.stage,
        "memory_at_peak": trace.memory,
        "peak": trace.peak,
        "peak_at": trace.peak_operation,
        "most_by_kind": trace.kind_peaks,
        "memory_over_step": _over_step(trace),
        "activations": trace.activations,
        "build_peak": trace.build_peak,
        "flops": trace.flops,
        "operations": trace.operations,
        "launches": trace.launches,
        "collectives": [
            {"axis": axis, "operation": operation, "calls": calls, "bytes": nbytes}
            for (axis, operation), (calls, nbytes) in _totals(trace.messages).items()
        ],
        # in order; [axis, operation, ranks, bytes, dtype, times in a row]
        "messages": [
            [axis, *message[:4], len(list(same))]
            for (axis, message), same in groupby(trace.messages)
        ],
        "plan": [
            {"name": figure.name, "traced": figure.traced, "planned": figure.planned}
            for figure in figures(config, plan, trace)
        ],
    }


def _over_step(trace: RankTrace) -> dict[str, Any]:
    """Bytes of each kind at the fullest moment of every so many operations."""
    points = [live for _, live in trace.timeline.points]
    kinds = dict.fromkeys(kind for live in points for kind, nbytes in live.items() if nbytes)
    return {
        "operations_per_point": trace.timeline.every,
        "bytes": {kind: [live.get(kind, 0) for live in points] for kind in kinds},
    }
