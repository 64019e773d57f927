"""One training iteration and one evaluation, from samples to numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from megatron.model.gpt import LOG_Z, GPTModel, TokenMetrics
from megatron.optimizer.optimizer import StepResult
from megatron.parallel.collectives import gather_objects
from megatron.parallel.random import DropoutSeeds
from megatron.training.batch import Batch, MicroBatch, make_batch
from megatron.training.result import IterationResult, Requests
from megatron.training.run import Run, Veto
from megatron.training.step_sums import MetricValue, StepSums, Totals, set_counts

if TYPE_CHECKING:
    from megatron.training.step_counter import StepCounter

# (loss sum, number of tokens), or with metrics by name (loss sum, number of tokens, metrics).
Losses = (
    tuple[torch.Tensor, torch.Tensor | int]
    | tuple[torch.Tensor, torch.Tensor | int, Mapping[str, MetricValue]]
)
# A chunk of the model before the last returns hidden states.
ForwardStep = Callable[[Batch, GPTModel], Losses | torch.Tensor]
LM_LOSS = "lm loss"  # a metric of this name is logged in place of the loss that is trained on
OUTPUT_Z_LOSS = "output_z_loss"  # without its coefficient; `z_loss` is that of routers


class NotFinite(ArithmeticError):
    """A loss or a gradient norm is NaN or infinite, with the iteration, the rank and what to do in
    the text."""


def train_step(
    run: Run,
    forward_step: ForwardStep,
    samples: Iterator[MicroBatch],
    iteration: int,
    requests: Callable[[], Requests] = Requests,
) -> IterationResult:
    """Gradients of one global batch, divided by its true number of tokens, and one optimizer step.
    `requests`: see `compute_gradients`."""
    return apply_gradients(
        run, iteration, compute_gradients(run, forward_step, samples, iteration, requests)
    )


class Gradients(NamedTuple):
    """Gradients of one global batch are in `Run.buffers`: when that began, the seconds it took, the
    sums over ranks, and this rank's sum of losses."""

    start: float
    seconds: float
    totals: Totals
    local_loss: torch.Tensor


def compute_gradients(
    run: Run,
    forward_step: ForwardStep,
    samples: Iterator[MicroBatch],
    iteration: int,
    requests: Callable[[], Requests] = Requests,
) -> Gradients:
    """The first half of a step: gradients of one global batch, summed over ranks.

    `requests()`, called once the gradients are there, are those of this rank. They are summed with
    the loss, so that all ranks agree on them without a collective of its own.
    """
    start = time.perf_counter()
    timers = run.timers
    num_microbatches = run.plan.num_microbatches(iteration)
    sums = StepSums(
        run.runtime.device,
        [counter.size for counter in run.counters],
        run.config.model.router_numbers,
    )

    # Forward and backward of this rank's micro-batches: gradients in `buffers`, the rest in `sums`.
    run.buffers.zero(num_microbatches)
    with timers("forward-backward", 1):
        forward_backward(
            run, forward_step, samples, sums, iteration, run.runtime.ctx.dp_cp.rank, run.counters
        )

    # Sums over ranks: gradients by bucket; all other numbers in one vector, so that they cost one
    # collective and one wait for the device, however many they are.
    with timers("all-grads-sync", 1):
        run.buffers.reduce()
        local_loss = sums.loss.clone()
        set_counts(sums.requests, requests())
        for counter, slots in zip(run.counters, sums.counters, strict=True):
            counter.close(slots)
        _agree_on_metrics(run, sums)
        _sum_over_ranks(run, sums)
    totals = sums.totals()
    return Gradients(start, time.perf_counter() - start, totals, local_loss)


def apply_gradients(run: Run, iteration: int, gradients: Gradients) -> IterationResult:
    """The second half: the optimizer step, and what is to be said of the iteration."""
    totals = gradients.totals
    counts: dict[str, float | int | None] = {}
    for counter, values in zip(run.counters, totals.counters, strict=True):
        counts |= counter.summed(iteration, values)

    # The update, unless the loss says that there must be none. Its factor turns gradients per
    # nominal token into gradients per true token.
    tokens = totals.tokens or 1.0
    loss = totals.loss / tokens
    _check_loss(run, iteration, loss, gradients.local_loss)
    update, veto = _update(run, iteration, loss, _nominal_tokens(run, iteration) / tokens)
    _check_norm(run, iteration, update)
    metrics = {**totals.metrics, **_balance_experts(run, totals, update.ok)}
    for counter in run.counters:
        metrics |= counter.logged()
    skipped = None
    if not update.ok:
        skipped = veto.by if veto else "overflow"
    num_zeros = (
        None
        if update.num_zeros is None
        else update.num_zeros - sum(spec.padding for spec in run.plan.trained)
    )
    return IterationResult(
        iteration=iteration,
        global_batch_size=run.plan.global_batch_size(iteration),
        seconds=time.perf_counter() - gradients.start,
        fwd_bwd_seconds=gradients.seconds,
        loss=loss,
        grad_norm=update.grad_norm,
        num_zeros=num_zeros,
        skipped=skipped,
        reason=veto.reason if veto else None,
        requests=totals.requests,
        counts=counts,
        metrics=metrics,
    )


def forward_backward(
    run: Run,
    forward_step: ForwardStep,
    samples: Iterator[MicroBatch],
    sums: StepSums,
    iteration: int,
    dp_cp_rank: int,
    counters: Sequence[StepCounter] = (),
) -> None:
    """Losses, counts and gradients of the micro-batches that rank `dp_cp_rank` of dp_cp has in an
    iteration. `counters`: those that `sums` has slots for.

    Gradients are divided by the nominal number of tokens: the true one is known only at the end,
    and sums that nothing divides would overflow in fp16."""
    count = run.plan.num_microbatches(iteration)
    backward_scale = run.optimizer.loss_scale / _nominal_tokens(run, iteration)
    scales: Sequence[float | torch.Tensor] = ()
    if run.config.model.mtp_num_layers:
        from megatron.training.depths import with_scales

        samples, scales = with_scales(run, samples, count, backward_scale, next_samples)
    micro_batches = MicroBatches(
        run,
        run.objective(forward_step),
        samples,
        sums,
        counters,
        iteration=iteration,
        dp_cp_rank=dp_cp_rank,
        backward_scale=backward_scale,
        depth_scales=scales,
    )
    if run.graphs is not None and run.graphs.due():
        run.pipeline.play(count, micro_batches.replayed)
        return
    with _weights_cast_once(run):
        backward = run.buffers.each_backward(micro_batches.backward)
        run.pipeline.play(count, micro_batches.forward, backward)


def _nominal_tokens(run: Run, iteration: int) -> int:
    """The tokens of a global batch in which every position counts."""
    return run.plan.global_batch_size(iteration) * run.config.model.seq_length


@dataclass
class MicroBatches:
    """This rank's micro-batches of an iteration, or of evaluations; a schedule calls `forward` and
    `backward` in its order, which may interleave micro-batches and chunks.

    What the last chunk computes is added to `sums`, in which each of `counters` has slots. Only
    training has `iteration` (without it there is no dropout) and `backward_scale`, the factor of a
    micro-batch's sum of losses, with `depth_scales` of multi-token prediction's.
    """

    run: Run
    forward_step: ForwardStep
    samples: Iterator[MicroBatch]
    sums: StepSums
    counters: Sequence[StepCounter] = ()
    iteration: int | None = None
    dp_cp_rank: int = 0
    backward_scale: float | None = None
    depth_scales: Sequence[float | torch.Tensor] = ()
    # those between this rank's first chunk and its last one
    _batches: dict[int, Batch] = field(init=False, default_factory=dict)
    # selections of experts by layer, of the micro-batches so far
    _expert_counts: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    def forward(self, micro_batch: int, chunk: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """The hidden states of a chunk, or the loss of the last one. This rank's first chunk reads
        the micro-batch, which is kept until the last one: on a stage in the middle, too, for its
        masks and positions."""
        run = self.run
        if chunk == 0:
            with run.timers("batch-generator", 2):
                self._batches[micro_batch] = self._make_batch(
                    self._read(), self._seeds(micro_batch), self.backward_scale
                )
        batch = self._batches[micro_batch]
        if chunk == len(run.model) - 1:
            del self._batches[micro_batch]
        with run.timers("forward-compute", 2):
            inputs = batch if hidden is None else replace(batch, hidden=hidden)
            output = self.forward_step(inputs, run.model[chunk])
        self._add_routers(batch, chunk)
        if not run.pipeline.is_last(chunk):
            assert isinstance(output, torch.Tensor)  # hidden states
            return output
        assert not isinstance(output, torch.Tensor), "forward_step: (loss sum, number of tokens)"
        return self._add_loss(output, batch)

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None) -> None:
        """Add the gradients of a chunk, from its loss or the `gradient` of its hidden states."""
        with self.run.timers("backward-compute", 2):
            if gradient is None:
                # the loss, in training; it alone is scaled, by the chain rule all gradients are
                assert isinstance(output, torch.Tensor) and self.backward_scale is not None
                (output * self.backward_scale).backward()
            else:
                torch.autograd.backward(output, gradient)

    def replayed(self, micro_batch: int, chunk: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Forward and backward of a model in one chunk, as a CUDA graph; the loss."""
        graphs, seeds, factor = self.run.graphs, self._seeds(micro_batch), self.backward_scale
        assert graphs is not None and seeds is not None and factor is not None, "only in training"
        names = tuple(self._token_metrics())
        output, batch = graphs.run(self.region, self._read(), seeds, factor, names)
        self._add_routers(batch, chunk)
        return self._add_loss(output, batch)

    def region(
        self, samples: MicroBatch, seeds: DropoutSeeds, factor: torch.Tensor
    ) -> tuple[Losses, Batch]:
        """What a graph holds: from samples on the device to gradients. `factor`: the
        `backward_scale` there. The sums of the step are not in it, which are new in each."""
        batch = self._make_batch(samples, seeds, factor)
        output = self.forward_step(batch, self.run.model[0])
        assert not isinstance(output, torch.Tensor), "forward_step: (loss sum, number of tokens)"
        (output[0] * factor.to(output[0].dtype)).backward()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, output), batch

    def _read(self) -> MicroBatch:
        samples = next_samples(self.samples)
        for counter in self.counters:
            counter.see(samples)
        return samples

    def _seeds(self, micro_batch: int) -> DropoutSeeds | None:
        if self.iteration is None:
            return None
        seed = self.run.config.training.seed
        return DropoutSeeds(seed, self.iteration, micro_batch, self.dp_cp_rank)

    def _token_metrics(self) -> list[str]:
        names = [name for counter in self.counters for name in counter.token_metrics]
        if self.run.config.model.z_loss_coeff and self.backward_scale is not None:
            names.append(LOG_Z)
        return names

    def _make_batch(
        self,
        samples: MicroBatch,
        seeds: DropoutSeeds | None,
        backward_scale: float | torch.Tensor | None,
    ) -> Batch:
        run = self.run
        batch = make_batch(samples, run.rules, run.runtime.device, seeds, self.depth_scales)
        if backward_scale is not None:
            batch = run.weigh(batch)
        if names := self._token_metrics():
            batch = replace(batch, token_metrics=TokenMetrics(names))
        if not run.config.model.num_experts:
            return batch
        from megatron.training import routers

        step = routers.RouterStep(batch.loss_mask, backward_scale, self._expert_counts, seeds)
        return replace(batch, router_step=step)

    def _add_routers(self, batch: Batch, chunk: int) -> None:
        """Add what the routers of a chunk tell of a micro-batch to the sums, in training."""
        if batch.router_step is None or self.backward_scale is None:
            return
        from megatron.training import routers

        layers = self.run.model[chunk].moe_layers
        routers.add(self.run.config.model, self.sums, batch.router_step, layers)

    def _add_loss(self, output: Losses, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch, after its numbers are added to the sums."""
        loss, tokens, *optional = output
        metrics = dict(optional[0]) if optional else {}
        self.sums.add_loss(loss, tokens, metrics.pop(LM_LOSS, None))
        if batch.token_metrics is not None and LOG_Z in batch.token_metrics.names:
            metrics[OUTPUT_Z_LOSS] = _z_loss(batch, batch.token_metrics)
        if batch.depths is not None:
            from megatron.training import depths

            metrics |= depths.metrics(batch.depths)
        if metrics:
            self.sums.add_metrics(metrics)
        counted = batch if batch.counted is None else replace(batch, loss_mask=batch.counted)
        for counter, slots in zip(self.counters, self.sums.counters, strict=True):
            counter.add(slots, counted)
        return loss


def _z_loss(batch: Batch, metrics: TokenMetrics) -> tuple[torch.Tensor, torch.Tensor | int]:
    """(sum, number of tokens) of the squares of log Z of a micro-batch's tokens that count."""
    if LOG_Z not in metrics.values:
        raise ValueError(
            "--z-loss-coeff: the model computed no losses; forward_step must pass labels= and "
            "**batch.extras to it, or omit the flag [extras-missing]"
        )
    squares = metrics.values[LOG_Z].double().square()
    if batch.loss_mask is None:
        return squares.sum(), squares.numel()
    return (squares * batch.loss_mask).sum(), batch.loss_mask.sum()


def _weights_cast_once(run: Run) -> AbstractContextManager[None]:
    """With --fp8-format the layers keep their weights' casts inside it: weights are the same in all
    micro-batches of a step, so the first one's casts serve the others."""
    if run.config.precision.fp8 is None:
        return nullcontext()
    from megatron.parallel.fp8 import weights_cast_once

    return weights_cast_once(run.model)


def next_samples(samples: Iterator[MicroBatch]) -> MicroBatch:
    """The next micro-batch; an exhausted data set is an error that says what to do."""
    try:
        return next(samples)
    except StopIteration:
        raise ValueError(
            "the data set has no samples left for this run; lower --train-iters or "
            "--train-samples (for validation --eval-iters), or read data more than once: give "
            "weights, or --data-order epoch [data-exhausted]"
        ) from None


def _agree_on_metrics(run: Run, sums: StepSums) -> None:
    """Reserve slots for the metrics of `forward_step`, the same on all ranks.

    Only the last pipeline stage knows their names: all ranks learn them in the first step of a
    process, by one more collective; later they may not change. Raises ValueError.
    """
    is_last = run.pipeline.is_last(len(run.model) - 1)
    if run.metric_names is None:
        names = gather_objects(sums.metric_names if is_last else None, run.runtime.ctx.world)
        different = sorted({of_rank for of_rank in names if of_rank is not None})
        run.metric_names = different[0]
        if len(different) > 1:
            lists = [", ".join(of_rank) or "none" for of_rank in different]
            raise ValueError(
                f"forward_step: returned other metrics on other ranks: {' / '.join(lists)}; return "
                "the same names for every micro-batch [metrics-differ]"
            )
    elif is_last and sums.metric_names != run.metric_names:
        raise ValueError(
            f"forward_step: returned the metrics {', '.join(sums.metric_names) or 'none'}, in the "
            f"first step {', '.join(run.metric_names) or 'none'}; return the same names for every "
            "micro-batch [metrics-differ]"
        )
    sums.reserve_metrics(run.metric_names)


def _sum_over_ranks(run: Run, sums: StepSums) -> None:
    """One collective for all sums. Stages before the last have no loss and no tokens;
    tensor-parallel ranks have the same, which count once."""
    if run.runtime.ctx.tp.rank:
        sums.clear_losses(of_routers=not run.runtime.ctx.sequence_parallel)
    run.services.all_reduce(sums.values, run.runtime.ctx.world)


def _check_loss(run: Run, iteration: int, loss: float, local: torch.Tensor) -> None:
    if math.isfinite(loss) or not _nonfinite_is_error(run):
        return
    axis = run.runtime.ctx.world
    losses = gather_objects(local.item(), axis)
    ranks = [
        rank for rank, value in zip(axis.ranks, losses, strict=True) if not math.isfinite(value)
    ]
    cause = (
        f" (found on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" if ranks else ""
    )
    raise NotFinite(
        f"iteration {iteration}: the loss is {loss}{cause}; optimizer step skipped. Resume from "
        f"the last checkpoint with --train-range-to-skip {iteration} {iteration}, a lower --lr, "
        "or --no-check-for-nan-in-loss-and-grad to continue regardless [loss-not-finite]"
    )


def _update(
    run: Run, iteration: int, loss: float, gradient_scale: float
) -> tuple[StepResult, Veto | None]:
    """One optimizer step, unless the gradients overflow or a feature vetoes the update."""
    vetoes: list[Veto] = []

    def admit(norm: float) -> bool:
        answers = [ask(iteration, loss, norm) for ask in run.before_update]
        vetoes.extend(answer for answer in answers if answer)
        return not vetoes

    with run.timers("optimizer", 1):
        result = run.optimizer.step(gradient_scale, admit if run.before_update else None)
        if result.ok and run.buffers.weights is not None:
            with run.timers("params-all-gather", 1):
                run.buffers.gathering.start()
        if run.fp8:
            run.fp8.step(result.ok)
    return result, vetoes[0] if vetoes else None


def _check_norm(run: Run, iteration: int, update: StepResult) -> None:
    """Raise NotFinite for an update whose gradient norm is no number."""
    if (
        update.ok
        and update.grad_norm is not None
        and not math.isfinite(update.grad_norm)
        and _nonfinite_is_error(run)
    ):
        raise NotFinite(
            f"iteration {iteration}: the gradient norm is {update.grad_norm}; nothing of this "
            "step is saved. Resume from the last checkpoint with --train-range-to-skip "
            f"{iteration} {iteration}, a lower --lr, or --no-check-for-nan-in-loss-and-grad to go "
            "on regardless [gradient-not-finite]"
        )


def _nonfinite_is_error(run: Run) -> bool:
    """Not under dynamic loss scaling, which finds its scale by them, nor where a feature judges the
    update."""
    dynamic = run.config.precision.fp16 and run.config.precision.loss_scale is None
    return (
        run.config.training.check_for_nan_in_loss_and_grad and not dynamic and not run.before_update
    )


def _balance_experts(run: Run, totals: Totals, updated: bool) -> dict[str, float]:
    """The routers' metrics; after an update their biases follow the counts of the step."""
    model = run.config.model
    if not model.num_experts:
        return {}
    from megatron.training import routers

    if updated and model.moe_router_enable_expert_bias:
        routers.update_bias(model, run.model, totals)
    return routers.metrics(model, totals)


@torch.no_grad()
def evaluate(
    run: Run,
    forward_step: ForwardStep,
    samples: Iterator[MicroBatch],
    count: int,
    report: Callable[[str], None],
    stop: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Mean loss per token over `count` micro-batches, in global batches of evaluation's size;
    dropout is off. One sync at the end.

    `stop`, if given, is called after each global batch and must return the same on all ranks; if it
    is true there is no result.
    """
    batch = run.plan.evaluation_batch
    micro_batches = batch.num_microbatches
    iterations = -(-count // micro_batches)
    sums = StepSums(run.runtime.device)
    forward = MicroBatches(run, forward_step, samples, sums).forward
    report(f"Evaluating on {count * batch.divisor} samples")
    for iteration in range(1, iterations + 1):
        report(f"Evaluating iter {iteration}/{iterations}")
        run.pipeline.play(min(micro_batches, count - (iteration - 1) * micro_batches), forward)
        if stop and stop():
            return None
    _sum_over_ranks(run, sums)
    totals = sums.totals()
    return {LM_LOSS: totals.loss / max(1.0, totals.tokens)}
