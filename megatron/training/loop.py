"""The training loop: iterate, log, evaluate, save, exit."""

import math
from collections.abc import Generator, Iterator
from dataclasses import replace

from megatron import log
from megatron.data.sample_lookup import is_packed
from megatron.data.samples import Samples
from megatron.data.subsets import subset_names
from megatron.training.agreement import Agreement
from megatron.training.batch import MicroBatch, open_samples, training_samples
from megatron.training.build_data import Data
from megatron.training.evaluation import Evaluation
from megatron.training.feature import Loop, features_of
from megatron.training.hook import Hook
from megatron.training.hooks import build_hooks, placed
from megatron.training.launch.process import Refusal
from megatron.training.logging.training_log import TrainingLog
from megatron.training.result import Requests
from megatron.training.run import Run
from megatron.training.save_policy import SavePolicy
from megatron.training.skipping import Skipping
from megatron.training.step import ForwardStep, NotFinite, train_step

AGREE_EVERY = 1000  # iterations, while all of them are skipped


class Trainer:
    """Runs the iterations that remain. Order within one, as Megatron's: log, evaluate, signal,
    save, time, exit; what features add to it are the hooks (hooks.py)."""

    def __init__(
        self,
        run: Run,
        data: Data,
        forward_step: ForwardStep,
        lines: TrainingLog,
        started: float,
    ):
        self.run = run
        self.data = data
        self.forward_step = forward_step
        self.lines = lines
        self.stage_ended = False  # and another one goes on
        if run.config.training.exit_signal_handler:
            run.services.signals.remember_requests()
        if run.config.counts_subsets and data.train is not None:
            from megatron.training.logging.subset_metrics import SubsetMetrics

            names = subset_names(data.train)
            accuracy, packed = run.config.logging.log_accuracy, is_packed(data.train)
            run.counters.append(SubsetMetrics(names, run.runtime.ctx, accuracy, packed))
        # evaluation and saving are hooks too, and call the others
        self.hooks: list[Hook] = []
        self.agreement = Agreement(run, started, self.hooks)
        self.skipping = Skipping(run)
        self.evaluation = Evaluation(run, data, forward_step, lines, self.agreement, self.hooks)
        self.saving = SavePolicy(run, lines, self.hooks)
        core = build_hooks(run, lines, self.evaluation, self.saving, self.skipping)
        loop = Loop(run, forward_step, lines, started, self.saving)
        of_features = [hook for feature in features_of(run.config) for hook in feature.hooks(loop)]
        self.hooks += placed(core, of_features)
        self.step = train_step
        for hook in self.hooks:
            self.step = hook.wrap_step(self.step)

    def train(self) -> str | None:
        """Train to the end, or until an exit: then return the reason, in Megatron's wording."""
        run = self.run
        progress = run.progress
        samples = self.open_training_samples()
        for hook in self.hooks:
            hook.on_start()
        while progress.iteration < run.plan.train_iters:
            iteration = progress.iteration + 1
            skipped = run.plan.skips.containing(iteration)
            if skipped:
                iteration, requests = self._skip(iteration, skipped[1])
            else:
                try:
                    requests = self.train_one(iteration, samples)
                    if progress.iteration < iteration:
                        for hook in self.hooks:
                            hook.on_rollback()
                        samples = self.open_training_samples()
                        continue
                except (NotFinite, Refusal):  # all ranks are here
                    self.saving.settle()
                    raise
            if self.evaluation.due(iteration):
                time_up = self.evaluation.validate(
                    f"iteration {iteration}", final=self.evaluation.is_last(iteration)
                )
                if time_up:
                    requests = requests._replace(time_up=1)
            reason = self._end_iteration(iteration, requests)
            if reason:
                samples.close()
                return reason
        samples.close()
        self._end()
        return None

    def open_training_samples(self) -> Generator[MicroBatch, None, None]:
        """The micro-batches [b, s+1] of all iterations that remain."""
        run = self.run
        first = run.progress.iteration + 1
        shift = run.progress.consumed_train_samples - run.plan.consumed_samples(
            run.progress.iteration
        )
        assert self.data.train is not None and self.data.train_sampler is not None
        numbers = training_samples(
            self.data.train_sampler,
            run.plan.batch,
            run.plan.skips,
            first,
            run.plan.train_iters,
            shift,
        )
        samples = Samples(
            self.data.train,
            run.plan.vocab_size,
            next((counter.hash_of for counter in run.counters if counter.hash_of), None),
            with_subset=any(counter.with_subset for counter in run.counters),
        )
        return open_samples(run.config, run.plan, samples, numbers)

    def train_one(self, iteration: int, samples: Iterator[MicroBatch]) -> Requests:
        """One iteration with its counters, schedule and log line; the requests of all ranks. A
        rollback leaves the run at an earlier iteration."""
        run = self.run
        for hook in self.hooks:
            hook.before_step(iteration)
        result = run.advance(
            self.step(
                run, self.forward_step, samples, iteration, lambda: self.agreement.own(iteration)
            )
        )
        if run.config.logging.log_params_norm:
            result = replace(result, params_norm=run.optimizer.params_norm())
        for hook in self.hooks:
            hook.after_step(result)
        return result.requests

    def _skip(self, first: int, last: int) -> tuple[int, Requests]:
        """Skip from `first` to `last`, or to where something is due before: (iteration reached,
        requests of all ranks).

        The ranks need no agreement to skip; they reach one where they evaluate or save, and every
        AGREE_EVERY iterations, so that a run can be requested to exit.
        """
        intervals = [AGREE_EVERY, self.run.config.training.exit_interval]
        for hook in self.hooks:
            intervals += hook.intervals()
        iteration = last
        for interval in intervals:
            if interval:
                iteration = min(iteration, next_multiple(first, interval))
        result = self.skipping.skip(first, iteration, last)
        for hook in self.hooks:
            hook.after_skip(first, result)
        if (
            self.run.runtime.world_size == 1
            or self.evaluation.due(iteration)
            or self.saving.due(iteration)
            or iteration % AGREE_EVERY == 0
        ):
            return iteration, self.agreement.of_all(self.agreement.own(iteration))
        return iteration, Requests()

    def _end_iteration(self, iteration: int, requests: Requests) -> str | None:
        """Save where a save is due; the reason to exit, if there is one (then it is saved too)."""
        interval = self.run.config.training.exit_interval
        exit_due = bool(interval and iteration % interval == 0)
        if requests.written == self.run.runtime.world_size:
            self.saving.settle()
        if requests.signal:
            return self._exit(f"exiting program after receiving {self.agreement.signal_name()}.")
        stops = exit_due or requests.time_up or requests.stop_now
        self.saving.save_if_due(
            iteration,
            requested=bool(requests.save_now or requests.stop_now),
            final=bool(stops or iteration == self.run.plan.train_iters),
        )
        for hook in self.hooks:
            hook.after_iteration(iteration, requests)
        if requests.stop_now:
            return self._exit(
                f"exiting program at iteration {iteration}, as requested by --control-file"
            )
        if requests.time_up:
            return self._exit(f"exiting program after {self.agreement.minutes()} minutes")
        if exit_due:
            return self._exit(f"exiting program at iteration {iteration}")
        if any(hook.ends_stage(iteration) for hook in self.hooks):
            self.stage_ended = True
            return self._exit(f"exiting program at iteration {iteration}, the end of a stage")
        return None

    def _end(self) -> None:
        for hook in self.hooks:
            hook.on_end()

    def _exit(self, reason: str) -> str:
        self._end()
        self.lines.leave()
        self.saving.save()
        return reason


def next_multiple(first: int, interval: int) -> int:
    """The first multiple of `interval` from `first` on."""
    return math.ceil(first / interval) * interval


def _finished(run: Run) -> str:
    t = run.config.training
    samples = f" (--train-samples {t.train_samples})" if t.train_iters is None else ""
    flag = "--train-samples" if t.train_iters is None else "--train-iters"
    return (
        f"nothing left to train: the checkpoint is of iteration {run.progress.iteration} of "
        f"{run.plan.train_iters}{samples}; raise {flag} to train longer"
    )


def train(
    run: Run,
    data: Data,
    forward_step: ForwardStep,
    lines: TrainingLog,
    started: float,
) -> bool:
    """The run after set-up: train, save, evaluate, print the summary. Whether it ended where a
    next one goes on. `started`: when this process started."""
    trainer = Trainer(run, data, forward_step, lines, started)
    reason: str | None = None
    if run.config.training.skip_train:
        log.print_rank_0("skipping training (--skip-train is on) ...")
    elif run.progress.iteration >= run.plan.train_iters:
        log.print_rank_0(_finished(run))
    else:
        log.detail("training ...")
        log.detail_datetime("before the start of training step")
        reason = trainer.train()
        # nobody leaves while another still needs its part
        run.buffers.gathering.wait()
        if reason is None:
            log.detail_datetime("after training is done")
            trainer.saving.save()
    if reason is None:
        trainer.evaluation.final()
    else:
        log.detail_datetime(reason)
    trainer.evaluation.close()
    lines.finish(reason, run.progress.iteration, trainer.saving.last_checkpoint())
    lines.close()
    return trainer.stage_ended
