"""The training loop: iterate, log, evaluate, save, leave. Knows no flag's spelling and no file
format."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.filesystem import CheckpointError
from megatron.data.samples import Samples
from megatron.data.text_bytes import bits_per_byte, bytes_per_token
from megatron.training.agreement import Agreement, Requests
from megatron.training.batch import evaluation_samples, load_samples, training_samples
from megatron.training.build_data import Data
from megatron.training.checkpointing import save
from megatron.training.launch.signals import Refusal
from megatron.training.logging.megatron_format import datetime_line
from megatron.training.logging.training_log import IterationResult, TrainingLog
from megatron.training.profiler import Profiler
from megatron.training.rollback import Past
from megatron.training.run import Run
from megatron.training.step import ForwardStep, NotFinite, evaluate, train_step

AGREE_EVERY = 1000  # iterations, where nothing but skipping goes on


class Trainer:
    """Runs the iterations that are left. Order within one, as Megatron's: log, evaluate, signal,
    save, time, exit."""

    def __init__(
        self, run: Run, data: Data, forward_step: ForwardStep, lines: TrainingLog, started: float
    ):
        self.run = run
        self.data = data
        self.forward_step = forward_step
        self.lines = lines
        self.agreement = Agreement(run, started)
        self.signals = run.services.signals
        if run.config.training.exit_signal_handler:
            self.signals.remember_requests()
        self._valid_samples: dict[int, Iterator[torch.Tensor]] = {}
        # of each data set that was evaluated, by its id()
        self._bytes_per_token: dict[int, float | None] = {}
        self._saved_at = self._loaded = run.progress.iteration
        self._past = Past(run)
        self._profiler = Profiler(run.config, run.model, run.runtime.rank, run.runtime.device)
        self._skipping_to = 0
        self._advise()

    def train(self) -> str | None:
        """Train to the end, or until an exit is due: then the reason, in Megatron's words."""
        run = self.run
        t = self.run.config.training
        progress = run.progress
        plan = run.plan
        self._past.copy_if_due()
        samples = self.open_training_samples()
        if run.writer:
            run.writer.reserve(save.own_slices(run), run.runtime.device)
        if t.manual_gc:
            gc.disable()
        while progress.iteration < plan.train_iters:
            iteration = progress.iteration + 1
            skipped = run.plan.skips.containing(iteration)
            if skipped:
                iteration, requests = self._skip(iteration, skipped[1])
            else:
                try:
                    requests = self.train_one(iteration, samples)
                    if self._went_back():
                        samples = self.open_training_samples()
                        continue
                except (NotFinite, Refusal):  # all ranks are here
                    self._settle()
                    # no update was made of what is wrong
                    if run.spikes.action == "skip-update":
                        self.save()
                    raise
            if self._evaluation_due(iteration) and self.validate(f"iteration {iteration}"):
                requests = requests._replace(time_up=1)
            reason = self._due(iteration, requests)
            if t.manual_gc and t.manual_gc_interval and iteration % t.manual_gc_interval == 0:
                gc.collect()
            if reason:
                return reason
        self._profiler.close()
        return None

    def open_training_samples(self) -> Iterator[torch.Tensor]:
        """The micro-batches [b, s+1] of all iterations that are left."""
        run = self.run
        first = self.run.progress.iteration + 1
        shift = run.progress.consumed_train_samples - run.plan.consumed_samples(
            run.progress.iteration
        )
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
            hashed=run.recorder is not None,
            with_subset=run.rows is not None and not run.rules.packed,
        )
        return load_samples(
            samples,
            numbers,
            run.config.data.num_workers,
            run.runtime.device,
            run.recorder.add if run.recorder else None,
        )

    def _evaluates(self) -> bool:
        return bool(self.data.valid) and self.run.config.training.eval_iters > 0

    def _evaluation_due(self, iteration: int) -> bool:
        return self._evaluates() and iteration % self.run.config.training.eval_interval == 0

    def _save_due(self, iteration: int) -> bool:
        c = self.run.config.checkpoint
        return bool(c.save and c.save_interval and iteration % c.save_interval == 0)

    def _snapshot_due(self, iteration: int) -> bool:
        c = self.run.config.checkpoint
        return bool(c.save and c.snapshot_interval and iteration % c.snapshot_interval == 0)

    def train_one(self, iteration: int, samples: Iterator[torch.Tensor]) -> Requests:
        """One iteration with its counters, schedule and log line; the requests of all ranks."""
        run = self.run
        self._profiler.before_step(iteration)
        outcome = train_step(
            run,
            self.forward_step,
            samples,
            iteration,
            lambda: self.agreement.own(iteration),
        )
        self._profiler.after_step(iteration)
        size = run.plan.global_batch_size(iteration)
        run.progress.iteration = iteration
        run.progress.consumed_train_samples += size
        run.scheduler.after_iteration(
            run.plan.scheduled_samples(iteration, iteration), overflow=outcome.skipped == "overflow"
        )
        finding = run.spikes.observe(iteration, outcome.loss, outcome.grad_norm, outcome.skipped)
        norm = run.optimizer.params_norm() if run.config.logging.log_params_norm else None
        self.lines.add(
            IterationResult(
                iteration,
                size,
                run.progress.consumed_train_samples,
                self._learning_rate(),
                run.optimizer.loss_scale,
                outcome.seconds,
                outcome.loss,
                outcome.grad_norm,
                outcome.num_zeros,
                norm,
                outcome.skipped,
                finding=finding,
                packed=outcome.packed,
                fwd_bwd_seconds=outcome.fwd_bwd_seconds,
                adam_beta2=run.optimizer.adam_beta2,
                skipped_iterations_total=run.skip_history.total,
                skipped_samples=run.progress.skipped_train_samples,
            )
        )
        return outcome.requests

    def _went_back(self) -> bool:
        """Do what --spike-action asks for now; True if the run stands at an earlier iteration then.
        Raises Refusal."""
        run = self.run
        asked = run.spikes.due(run.plan.train_iters, run.progress.iteration)
        if asked is None:
            self._past.copy_if_due()
            return False
        self._settle()
        self._past.rewind(asked)
        self.lines.go_back()
        self._valid_samples.clear()
        self._skipping_to = 0
        self._saved_at = -1
        self.save(final=False)
        self._settle()
        self._past.put_aside()
        return True

    def _skip(self, first: int, last: int) -> tuple[int, Requests]:
        """Skip from `first` to `last`, or to where something is due before: (iteration reached,
        requests of all ranks).

        Samples are consumed unread, the schedule goes on, nothing else changes. The ranks need no
        agreement to skip; they come to one, so that a run can be asked to leave, where they
        evaluate or save, and now and then.
        """
        run = self.run
        plan = self.run.plan
        progress = self.run.progress
        before = plan.consumed_samples(first - 1)
        reason = run.skip_history.reason(first)
        if last != self._skipping_to:
            self._skipping_to = last
            samples = plan.consumed_samples(last) - before
            why = "" if reason == "user" else f" ({reason})"
            log.print_rank_0(
                f"skipping iterations {first} to {last}{why}: {samples} samples "
                f"({samples * run.config.model.seq_length} tokens)"
            )
        iteration = min(last, self._next_stop(first))
        samples = plan.consumed_samples(iteration) - before
        if run.recorder and run.recorder.ledger:
            shift = progress.consumed_train_samples - before
            run.recorder.ledger.skip(
                first, [plan.consumed_samples(n) + shift for n in range(first - 1, iteration + 1)]
            )
        progress.iteration = iteration
        progress.consumed_train_samples += samples
        progress.skipped_train_samples += samples
        run.skip_history.note(first, iteration)
        run.scheduler.after_iteration(plan.scheduled_samples(first, iteration))
        self.lines.add(
            IterationResult(
                iteration,
                plan.global_batch_size(iteration),
                progress.consumed_train_samples,
                self._learning_rate(),
                run.optimizer.loss_scale,
                0.0,
                skipped="user",
                iterations=iteration - first + 1,
                reason=reason,
                skipped_iterations_total=run.skip_history.total,
                skipped_samples=progress.skipped_train_samples,
            )
        )
        if (
            run.runtime.world_size == 1
            or self._evaluation_due(iteration)
            or self._save_due(iteration)
            or self._snapshot_due(iteration)
            or iteration % AGREE_EVERY == 0
        ):
            return iteration, self.agreement.of_all(iteration)
        return iteration, Requests()

    def _next_stop(self, first: int) -> int:
        """The first iteration from `first` on at which something besides skipping may be due; the
        same on all ranks."""
        t = self.run.config.training
        c = self.run.config.checkpoint
        every = [
            AGREE_EVERY,
            *self.lines.intervals,
            t.exit_interval,
            t.manual_gc_interval if t.manual_gc else None,
            t.eval_interval if self._evaluates() else None,
            *((c.save_interval, c.snapshot_interval) if c.save else ()),
        ]
        return min(-(-first // n) * n for n in every if n)

    def _learning_rate(self) -> float:
        return self.run.optimizer.param_groups[0]["lr"]

    def _due(self, iteration: int, requests: Requests) -> str | None:
        """Save where a save is due; the reason to leave, if there is one (then it is saved too)."""
        interval = self.run.config.training.exit_interval
        exit_due = bool(interval and iteration % interval == 0)
        stop = requests.stop_now
        by_file = requests.save_now or stop
        if requests.written == self.run.runtime.world_size:
            self._settle()
        if requests.signal:
            return self._leave(f"exiting program after receiving {self.agreement.signal_name()}.")
        if self._save_due(iteration) or by_file:
            last = iteration == self.run.plan.train_iters
            self.save(final=bool(exit_due or requests.time_up or stop or last))
        elif self._snapshot_due(iteration):
            self._snapshot()
        if by_file:
            self.agreement.done()
        if stop:
            return self._leave(
                f"exiting program at iteration {iteration}, as --control-file asks for"
            )
        if requests.time_up:
            return self._leave(f"exiting program after {self.agreement.minutes()} minutes")
        if exit_due:
            return self._leave(f"exiting program at iteration {iteration}")
        return None

    def last_checkpoint(self) -> str:
        """What a later run can start from, for the last line."""
        save = self.run.config.checkpoint.save
        if not save:
            return "no checkpoint (no --save)"
        return (
            f"last checkpoint: iteration {self._saved_at} in {save}"
            if self._saved_at > 0
            else "no checkpoint"
        )

    def _leave(self, reason: str) -> str:
        self._profiler.close()
        self.lines.leave()
        self.save()
        return reason

    def save(self, final: bool = True) -> None:
        """Save this iteration, if there is a place to and it is not saved already.

        Where the disk refuses, the `final` save of a run raises CheckpointError; any other is a
        warning, since more follow. With --async-save it is only begun here, but for the final one.
        """
        run = self.run
        iteration = self.run.progress.iteration
        if not run.config.checkpoint.save:
            return
        begun = run.under_way
        if begun is None or begun.is_snapshot or begun.iteration != iteration:
            self._settle()
            if self._saved_at == iteration:
                return
            self._flush()
            self._attempt(lambda: save.save_checkpoint(run), iteration, final)
        if final:
            self._settle(final)
            # a process of --async-save has died: once more, without it
            if self._saved_at != iteration:
                self._attempt(lambda: save.save_checkpoint(run), iteration, final)
                self._settle(final)

    def _snapshot(self) -> None:
        """Write a snapshot, or begin to; where the disk refuses, that is a warning."""
        self._settle()
        self._flush()
        self._attempt(
            lambda: save.save_snapshot(self.run), self.run.progress.iteration, is_snapshot=True
        )

    def _settle(self, final: bool = False) -> None:
        """Wait for the save under way, if there is one, and make it count."""
        begun = self.run.under_way
        if begun:
            self._attempt(
                lambda: save.finish_save(self.run),
                begun.iteration,
                final,
                begun.is_snapshot,
            )

    def _attempt(
        self,
        action: Callable[[], None],
        iteration: int,
        final: bool = False,
        is_snapshot: bool = False,
    ) -> None:
        """Do a part of a save; one that is not `final` is a warning where the disk refuses, and
        always where a process of --async-save has died."""
        with self.run.timers("save-checkpoint"):
            try:
                action()
                if not is_snapshot and not self.run.under_way:
                    self._saved_at = iteration
                    self._past.has_saved(iteration)
            except CheckpointError as error:
                # no number: not the disk's fault
                if error.errno is None or final and error.errno != errno.ECHILD:
                    raise
                follows = (
                    ""
                    if is_snapshot
                    else (
                        f". {save.what_remains(self.run)}; training goes on, the next "
                        f"save is tried at iteration {self._next_save(iteration)}"
                    )
                )
                what = "snapshot" if is_snapshot else "checkpoint"
                log.print_rank_0(
                    f"WARNING: no {what} of iteration {iteration}: "
                    f"{error}{follows or '; training goes on'}"
                )
        self._advise()
        self.lines.timers(["save-checkpoint"])

    def _flush(self) -> None:
        """What a checkpoint has behind it is never told again."""
        self.lines.flush()
        if self.run.recorder and self.run.recorder.ledger:
            self.run.recorder.ledger.sync()

    def _next_save(self, iteration: int) -> int:
        """The next iteration after this one that is saved if nobody interrupts the run."""
        every = self.run.config.checkpoint.save_interval, self.run.config.training.exit_interval
        return min(self.run.plan.train_iters, *((iteration // n + 1) * n for n in every if n))

    def _advise(self) -> None:
        """Keep ready what to tell a user who interrupts."""
        c = self.run.config.checkpoint
        n = self._saved_at
        if n and c.load and (c.load == c.save or n == self._loaded):
            self.signals.advice = "the same command goes on from the last checkpoint"
        elif n and c.save:
            self.signals.advice = f"--load {c.save} goes on from the last checkpoint"
        else:
            self.signals.advice = (
                "there is no checkpoint yet"
                if c.save
                else "nothing was saved (--save is not given)"
            )

    def _evaluate(
        self,
        dataset: Any,
        samples: Iterator[torch.Tensor],
        count: int,
        prefix: str,
        tell: Callable[[str], None],
        suffix: str = "",
        split: str = "validation",
        final: bool = False,
    ) -> bool:
        """Evaluate `count` micro-batches of `dataset` and print the block; True when the time was
        over first.

        `final`: after the last iteration.
        """
        run = self.run
        t = self.run.config.training
        with run.timers("evaluate"):
            losses = evaluate(
                run,
                self.forward_step,
                samples,
                count,
                tell,
                self.agreement.out_of_time if t.exit_duration_in_mins else None,
            )
        if losses is None:
            log.print_rank_0("Exiting during evaluation, timelimit reached")
            return True
        self.lines.timers(["evaluate"])
        if id(dataset) not in self._bytes_per_token:
            self._bytes_per_token[id(dataset)] = bytes_per_token(dataset)
        bits = bits_per_byte(losses.get("lm loss"), self._bytes_per_token[id(dataset)])
        self.lines.validation(
            prefix,
            losses,
            run.progress.iteration,
            run.progress.consumed_train_samples,
            suffix,
            split=split,
            final=final,
            bits_per_byte=bits,
        )
        return False

    def _eval_micro_batches(self) -> int:
        """Micro-batches of --eval-iters global batches on each data-parallel rank."""
        batch = self.run.plan.batch
        return self.run.config.training.eval_iters * batch.final_global_batch_size // batch.divisor

    def _validation_samples(self, number: int) -> tuple[Iterator[torch.Tensor], int]:
        """The samples of a validation set, and how many micro-batches of them one validation
        reads."""
        run = self.run
        t = self.run.config.training
        sampler = self.data.valid_samplers[number]
        full = run.config.data.full_validation
        if full or number not in self._valid_samples:
            first = 0 if full or t.skip_train else run.progress.consumed_valid_samples
            samples = Samples(self.data.valid[number], run.plan.vocab_size)
            self._valid_samples[number] = load_samples(
                samples,
                evaluation_samples(sampler, first),
                run.config.data.num_workers,
                run.runtime.device,
            )
        left = sampler.micro_batches_left(0)
        # take micro-batches in rounds
        stages = run.config.parallel.pipeline_model_parallel_size
        return self._valid_samples[number], (
            left // stages * stages if full else self._eval_micro_batches()
        )

    def validate(
        self, prefix: str, tell: Callable[[str], None] = lambda text: None, final: bool = False
    ) -> bool:
        """Evaluate on the next samples of each validation set and print its block; True when the
        time was over first.

        Its samples are consumed either way: where the next validation begins does not depend on
        clocks.
        """
        run = self.run
        t = self.run.config.training
        if t.manual_gc and t.manual_gc_eval:
            gc.collect()
        several = run.config.data.multiple_validation_sets
        time_up = False
        for number, name in enumerate(self.data.valid_names):
            samples, count = self._validation_samples(number)
            time_up = time_up or self._evaluate(
                self.data.valid[number],
                samples,
                count,
                prefix,
                tell,
                f"-{name}" if several else "",
                final=final,
            )
        if not run.config.data.full_validation:
            run.progress.consumed_valid_samples += (
                self._eval_micro_batches() * run.plan.batch.divisor
            )
        return time_up

    def final_evaluation(self) -> None:
        """Validation and test losses of the finished run, as Megatron prints them."""
        run = self.run
        t = self.run.config.training
        iteration = run.progress.iteration
        if self._evaluates() and self.validate(
            f"iteration {iteration} on validation set", log.detail, final=True
        ):
            return
        if self.data.test is not None and t.eval_iters > 0:
            samples = load_samples(
                Samples(self.data.test, run.plan.vocab_size),
                evaluation_samples(self.data.test_sampler, 0),
                run.config.data.num_workers,
                run.runtime.device,
            )
            self._evaluate(
                self.data.test,
                samples,
                self._eval_micro_batches(),
                f"iteration {iteration} on test set",
                log.detail,
                split="test",
                final=True,
            )


def _finished(run: Run) -> str:
    t = run.config.training
    samples = f" (--train-samples {t.train_samples})" if t.train_iters is None else ""
    flag = "--train-samples" if t.train_iters is None else "--train-iters"
    return (
        f"nothing left to train: the checkpoint is of iteration {run.progress.iteration}, the run "
        f"has {run.plan.train_iters}{samples}; raise {flag} to train on"
    )


def pretrain(
    run: Run, data: Data, forward_step: ForwardStep, lines: TrainingLog, started: float
) -> None:
    """The whole run after set-up: train, save, evaluate, say goodbye."""
    trainer = Trainer(run, data, forward_step, lines, started)
    reason: str | None = None
    if run.config.training.skip_train:
        log.print_rank_0("skipping training (--skip-train is on) ...")
    elif run.progress.iteration >= run.plan.train_iters:
        log.print_rank_0(_finished(run))
    else:
        log.detail("training ...")
        log.detail(datetime_line("before the start of training step"))
        reason = trainer.train()
        # nobody leaves while another still needs its part
        run.buffers.wait_for_weights()
        if reason is None:
            log.detail(datetime_line("after training is done"))
            trainer.save()
    if reason is None:
        trainer.final_evaluation()
    else:
        log.detail(datetime_line(reason))
    lines.finish(reason, run.progress.iteration, trainer.last_checkpoint())
    lines.close()
