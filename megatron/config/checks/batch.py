"""Rules of batch sizes on a number of ranks."""

import math

from megatron.config.checks.facts import Facts
from megatron.config.plan.batch_size import BatchSizeSchedule
from megatron.config.plan.plan import batch_schedule, evaluation_batch

# what the number of replicas, and of micro-batches, is computed with
SIZES = (
    "micro_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
MOST_COPIES = 1 << 20  # of the model, of which sizes that fit are looked for


def sizes_that_fit(f: Facts, replica_ranks: int) -> list[int]:
    """The nearest numbers of ranks below and above that are whole copies of the model, of
    `replica_ranks` each, with whole micro-batches."""
    batch = f["global_batch_size"]
    micro = f["micro_batch_size"]
    free = (
        not f.ok("global_batch_size", "micro_batch_size")
        or f["decrease_batch_size_if_needed"]
        or batch % micro
    )
    if free:
        copies = f.world_size // replica_ranks
        fit = [n * replica_ranks for n in range(max(1, copies - 1), copies + 2)]
    else:
        micro_batches = batch // micro
        small = [
            n
            for n in range(1, min(math.isqrt(micro_batches), MOST_COPIES) + 1)
            if micro_batches % n == 0
        ]
        fit = sorted({size * replica_ranks for n in small for size in (n, micro_batches // n)})
    return [*[n for n in fit if n < f.world_size][-1:], *[n for n in fit if n > f.world_size][:1]]


def schedule_of(f: Facts) -> BatchSizeSchedule | None:
    """The batch sizes of the run; None where a flag that decides them has a problem of its own."""
    if not f.ok(*SIZES):
        return None
    try:
        return batch_schedule(f.config, max(1, f.world_size))
    except (ValueError, TypeError):
        return None


def batch(f: Facts) -> list[str]:
    """What is wrong with the batch sizes on this number of ranks."""
    try:
        schedule = batch_schedule(f.config, max(1, f.world_size))
    except ValueError as error:
        return [str(error)]
    # A resumed run may have passed the sizes of the ramp that do not fit; the last one comes in any
    # case.
    near = sizes_that_fit(f, max(1, f.world_size // schedule.data_parallel_size))
    ranks = (
        f", or {' or '.join(map(str, near))} ranks"
        if near and schedule.data_parallel_size > 1
        else ""
    )
    problems = schedule.problems(schedule.phases[-1].consumed if f["load"] else 0, ranks)
    if evaluates_otherwise(f) and (problem := evaluation_batch(f.config, schedule).problem()):
        problems.append(problem)
    return problems


def evaluates_otherwise(f: Facts) -> bool:
    """Has validation a batch of its own?"""
    flags = {"eval_global_batch_size", "eval_micro_batch_size"}
    return f["eval_iters"] > 0 and not f.bad & flags and any(f.ok(name) for name in flags)
