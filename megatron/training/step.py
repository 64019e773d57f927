"""One training iteration and one evaluation, from samples to numbers. Knows no log, no file and no signal."""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_reduce_, gather_objects
from megatron.parallel.pipeline import run_schedule
from megatron.parallel.random import DropoutSeeds
from megatron.parallel.schedules import one_forward_one_backward
from megatron.training.batch import Batch, make_batch
from megatron.training.build import Run

ForwardStep = Callable[[Batch, GPTModel], tuple[torch.Tensor, torch.Tensor | int]]


class NotFinite(ArithmeticError):
    """A loss or a gradient norm is NaN or infinite, with the iteration, the rank and what to do in the text."""


class StepOutcome(NamedTuple):
    """What a training step measured; `num_zeros` is that of real parameters (those that are padding always have zero
    gradients); `flag` is the sum of what the ranks handed in."""
    loss: float
    updated: bool
    grad_norm: float | None
    num_zeros: int | None
    seconds: float
    flag: int


def train_step(run: Run, forward_step: ForwardStep, samples: Iterator[torch.Tensor], iteration: int,
               flag: Callable[[], int] = int) -> StepOutcome:
    """Gradients of one global batch, divided by its true number of tokens, and one optimizer step.

    Each micro-batch's backward uses the nominal count, so that nothing overflows in fp16; the true count, known at
    the end, corrects it. `flag()`, asked for then, travels with the loss, so that all ranks agree on its sum without a
    collective of its own.
    """
    start = time.perf_counter()
    runtime, timers, seed = run.runtime, run.timers, run.config.training.seed
    nominal = run.plan.global_batch_size(iteration) * run.config.model.seq_length
    backward_scale = run.optimizer.loss_scale / nominal
    totals = torch.zeros(3, dtype=torch.float64, device=runtime.device)

    def forward(micro_batch: int) -> torch.Tensor:
        with timers("batch-generator", 2):
            seeds = DropoutSeeds(seed, iteration, micro_batch, runtime.ctx.dp_cp.rank)
            batch = make_batch(next_samples(samples), run.rules, runtime.device, seeds)
        with timers("forward-compute", 2):
            loss, tokens = forward_step(batch, run.model)
        totals[0] += loss.detach()
        totals[1] += tokens
        return loss

    def backward(loss: torch.Tensor) -> None:
        with timers("backward-compute", 2):
            (loss * backward_scale).backward()

    run.buffers.zero(run.plan.num_microbatches(iteration))
    with timers("forward-backward", 1):
        run_schedule(one_forward_one_backward(0, 1, run.plan.num_microbatches(iteration)), forward, backward)
    with timers("all-grads-sync", 1):
        run.buffers.reduce()
        totals[2] = flag()
        local = totals[0].clone()
        if runtime.ctx.tp.rank:             # tensor-parallel ranks have the same loss: it counts once
            totals[:2] = 0
        all_reduce_(totals, runtime.ctx.world)
    loss_sum, tokens, flags = totals.tolist()
    loss = loss_sum / max(1.0, tokens)
    _check_loss(run, iteration, loss, local)
    with timers("optimizer", 1):
        result = run.optimizer.step(grad_factor=nominal / max(1.0, tokens))
        if result.ok:
            with timers("params-all-gather", 1):
                run.buffers.gather_weights()
    if result.grad_norm is not None and not math.isfinite(result.grad_norm) and _checks(run):
        raise NotFinite(f"iteration {iteration}: the gradient norm is {result.grad_norm}; nothing of this step is "
                        f"saved. Resume from the last checkpoint with --train-range-to-skip {iteration} {iteration}, a "
                        f"lower --lr, or --no-check-for-nan-in-loss-and-grad to go on regardless")
    zeros = None if result.num_zeros is None else result.num_zeros - run.plan.num_padding
    return StepOutcome(loss, result.ok, result.grad_norm, zeros, time.perf_counter() - start, int(flags))


def next_samples(samples: Iterator[torch.Tensor]) -> torch.Tensor:
    """The next micro-batch [b, s+1]; an exhausted data set is an error that says what to do."""
    try:
        return next(samples)
    except StopIteration:
        raise ValueError("the data set has no samples left for this run; raise --train-iters or --train-samples (for "
                         "validation --eval-iters) to what the run really needs, so that enough are built") from None


def _checks(run: Run) -> bool:
    """Are non-finite numbers an error? Not under dynamic loss scaling, where they are how it finds its scale."""
    dynamic = run.config.precision.fp16 and run.config.precision.loss_scale is None
    return run.config.training.check_for_nan_in_loss_and_grad and not dynamic


def _check_loss(run: Run, iteration: int, loss: float, local: torch.Tensor) -> None:
    if math.isfinite(loss) or not _checks(run):
        return
    axis = run.runtime.ctx.world
    bad = [rank for rank, other in zip(axis.ranks, gather_objects(local.item(), axis), strict=True)
           if not math.isfinite(other)]
    where = f" (found on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))})" if bad else ""
    raise NotFinite(f"iteration {iteration}: the loss is {loss}{where}; no step was made. Resume from the last "
                    f"checkpoint with --train-range-to-skip {iteration} {iteration}, a lower --lr, or "
                    f"--no-check-for-nan-in-loss-and-grad to go on regardless")


@torch.no_grad()
def evaluate(run: Run, forward_step: ForwardStep, samples: Iterator[torch.Tensor], eval_iters: int,
             tell: Callable[[str], None], stop: Callable[[], bool] | None = None) -> dict[str, float] | None:
    """Mean loss per token over `eval_iters` global batches of the final size; dropout is off. One sync at the end.

    `stop`, if given, is asked after each global batch (its answer must be that of all ranks); then there is no result.
    """
    batch_size = run.plan.batch.final_global_batch_size
    micro_batches = batch_size // run.plan.batch.divisor
    totals = torch.zeros(2, dtype=torch.float64, device=run.runtime.device)
    tell(f"Evaluating on {eval_iters * batch_size} samples")
    for iteration in range(1, eval_iters + 1):
        tell(f"Evaluating iter {iteration}/{eval_iters}")
        for _ in range(micro_batches):
            batch = make_batch(next_samples(samples), run.rules, run.runtime.device)
            loss, tokens = forward_step(batch, run.model)
            totals[0] += loss
            totals[1] += tokens
        if stop and stop():
            return None
    all_reduce_(totals, run.runtime.ctx.dp_cp)
    loss_sum, tokens = totals.tolist()
    return {"lm loss": loss_sum / max(1.0, tokens)}
