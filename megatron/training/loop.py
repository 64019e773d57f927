"""The training loop: iterate, log, evaluate, save, leave. Knows no flag's spelling and no file format."""
from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch

from megatron import log
from megatron.training import checkpointing
from megatron.training.batch import evaluation_samples, load_samples, training_samples
from megatron.training.build import Data, Run
from megatron.training.log_lines import datetime_line
from megatron.training.metrics import IterationResult, TrainingLog
from megatron.training.signals import SignalWatch
from megatron.training.step import ForwardStep, evaluate, train_step

SIGNAL, TIME_UP = 1, 2


class Trainer:
    """Runs the iterations that are left. Order within one, as Megatron's: log, evaluate, signal, save, time, exit."""

    def __init__(self, run: Run, data: Data, forward_step: ForwardStep, lines: TrainingLog, started: float):
        self.run, self.data, self.forward_step, self.lines = run, data, forward_step, lines
        self.started = started
        self.signals = SignalWatch()
        if run.config.training.exit_signal_handler:
            self.signals.install()
        self._valid_samples: Iterator[torch.Tensor] | None = None
        self._saved_at = run.progress.iteration
        self._skipping_to = 0

    def train(self) -> str | None:
        """Train to the end, or until an exit is due: then the reason, in Megatron's words."""
        run, t = self.run, self.run.config.training
        progress, plan = run.progress, run.plan
        samples = self._open_training_samples()
        if t.manual_gc:
            gc.disable()
        while progress.iteration < plan.train_iters:
            iteration = progress.iteration + 1
            if plan.skips.is_skipped(iteration):
                flag = self._skip(iteration)
            else:
                flag = self._train_one(iteration, samples)
            if self._evaluates() and iteration % t.eval_interval == 0:
                self.validate(f"iteration {iteration}")
            reason = self._due(iteration, flag)
            if t.manual_gc and t.manual_gc_interval and iteration % t.manual_gc_interval == 0:
                gc.collect()
            if reason:
                return reason
        return None

    def _open_training_samples(self) -> Iterator[torch.Tensor]:
        run, first = self.run, self.run.progress.iteration + 1
        shift = run.progress.consumed_train_samples - run.plan.consumed_samples(run.progress.iteration)
        numbers = training_samples(self.data.train_sampler, run.plan.batch, run.plan.skips, first, run.plan.train_iters,
                                   shift)
        return load_samples(self.data.train, numbers, run.config.data.num_workers, run.runtime.device)

    def _evaluates(self) -> bool:
        return self.data.valid is not None and self.run.config.training.eval_iters > 0

    def _advance(self, iteration: int) -> int:
        """Counters of one more iteration; its global batch size."""
        progress = self.run.progress
        size = self.run.plan.global_batch_size(iteration)
        progress.iteration = iteration
        progress.consumed_train_samples += size
        return size

    def _train_one(self, iteration: int, samples: Iterator[torch.Tensor]) -> int:
        run = self.run
        wish = (SIGNAL if self.signals.received else 0) + (TIME_UP if self._time_is_up() else 0)
        loss_scale = run.optimizer.loss_scale
        outcome = train_step(run, self.forward_step, samples, iteration, wish)
        size = self._advance(iteration)
        run.scheduler.after_iteration(size, overflow=not outcome.updated)
        norm = run.optimizer.params_norm() if run.config.logging.log_params_norm else None
        self.lines.add(IterationResult(
            iteration, size, run.progress.consumed_train_samples, self._learning_rate(),
            run.optimizer.loss_scale if outcome.updated else loss_scale, outcome.seconds, outcome.loss,
            outcome.grad_norm, outcome.num_zeros, norm, None if outcome.updated else "overflow"))
        return outcome.flag

    def _skip(self, iteration: int) -> int:
        """Skip an iteration: its samples are consumed unread, the schedule goes on, nothing else changes."""
        run = self.run
        last = run.plan.skips.containing(iteration)[1]
        if last != self._skipping_to:
            self._skipping_to = last
            samples = run.plan.consumed_samples(last) - run.plan.consumed_samples(iteration - 1)
            log.print_rank_0(f"skipping iterations {iteration} to {last}: {samples} samples, "
                             f"{samples * run.config.model.seq_length} tokens are not trained")
        size = self._advance(iteration)
        run.progress.skipped_train_samples += size
        run.scheduler.after_iteration(size)
        self.lines.add(IterationResult(iteration, size, run.progress.consumed_train_samples, self._learning_rate(),
                                       run.optimizer.loss_scale, 0.0, skipped="user"))
        return 0

    def _learning_rate(self) -> float:
        return self.run.optimizer.param_groups[0]["lr"]

    def _time_is_up(self) -> bool:
        minutes = self.run.config.training.exit_duration_in_mins
        return minutes is not None and (time.time() - self.started) / 60.0 > minutes

    def _due(self, iteration: int, flag: int) -> str | None:
        """Save where a save is due; the reason to leave, if there is one (then it is saved too)."""
        t, c = self.run.config.training, self.run.config.checkpoint
        if flag & SIGNAL:
            return self._leave("exiting program after receiving SIGTERM.")
        if c.save and c.save_interval and iteration % c.save_interval == 0:
            self.save()
        if flag & TIME_UP:
            return self._leave(f"exiting program after {(time.time() - self.started) / 60.0} minutes")
        if t.exit_interval and iteration % t.exit_interval == 0:
            return self._leave(f"exiting program at iteration {iteration}")
        return None

    def _leave(self, reason: str) -> str:
        self.save()
        return reason

    def save(self) -> None:
        """Save this iteration, if there is a place to and it is not saved already."""
        iteration = self.run.progress.iteration
        if not self.run.config.checkpoint.save or self._saved_at == iteration:
            return
        with self.run.timers("save-checkpoint"):
            checkpointing.save(self.run)
        self._saved_at = iteration
        self.lines.timers(["save-checkpoint"])

    def validate(self, prefix: str) -> None:
        """Evaluate on the next validation samples and print the block."""
        run, t = self.run, self.run.config.training
        micro_batches = t.eval_iters * run.plan.batch.final_global_batch_size // run.plan.batch.divisor
        if self._valid_samples is None:
            numbers = evaluation_samples(self.data.valid_sampler, run.progress.consumed_valid_samples)
            self._valid_samples = load_samples(self.data.valid, numbers, run.config.data.num_workers,
                                               run.runtime.device)
        if t.manual_gc and t.manual_gc_eval:
            gc.collect()
        with run.timers("evaluate"):
            losses = evaluate(run, self.forward_step, self._valid_samples, t.eval_iters, tell=_quiet)
        run.progress.consumed_valid_samples += micro_batches * run.plan.batch.divisor
        self.lines.timers(["evaluate"])
        self.lines.validation(prefix, losses, run.progress.iteration, run.progress.consumed_train_samples)

    def final_evaluation(self) -> None:
        """Validation and test losses of the finished run, as Megatron prints them."""
        run, t = self.run, self.run.config.training
        iteration = run.progress.iteration
        if self._evaluates():
            self.validate(f"iteration {iteration} on validation set")
        if self.data.test is not None and t.eval_iters > 0:
            samples = load_samples(self.data.test, evaluation_samples(self.data.test_sampler, 0),
                                   run.config.data.num_workers, run.runtime.device)
            with run.timers("evaluate"):
                losses = evaluate(run, self.forward_step, samples, t.eval_iters, tell=log.print_rank_0)
            self.lines.timers(["evaluate"])
            self.lines.validation(f"iteration {iteration} on test set", losses, iteration,
                                  run.progress.consumed_train_samples)


def _quiet(text: str) -> None:
    pass


def pretrain(run: Run, data: Data, forward_step: ForwardStep, lines: TrainingLog, started: float) -> None:
    """The whole run after set-up: train, save, evaluate, say goodbye."""
    trainer = Trainer(run, data, forward_step, lines, started)
    reason: str | None = None
    if run.config.training.skip_train:
        log.print_rank_0("skipping training (--skip-train is on) ...")
    else:
        log.print_rank_0("training ...")
        log.print_rank_0(datetime_line("before the start of training step"))
        reason = trainer.train()
        if reason is None:
            log.print_rank_0(datetime_line("after training is done"))
            trainer.save()
    if reason is None:
        trainer.final_evaluation()
    else:
        log.print_rank_0(datetime_line(reason))
    lines.close()
