"""Runs validations and the test: on which samples, when, and what is printed."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from megatron import log
from megatron.data.sample_lookup import Dataset
from megatron.data.samples import Samples
from megatron.data.text_bytes import bits_per_byte, bytes_per_token
from megatron.training.agreement import Agreement
from megatron.training.batch import MicroBatch, evaluation_samples, open_samples
from megatron.training.build_data import Data
from megatron.training.hook import Hook
from megatron.training.logging.training_log import TrainingLog
from megatron.training.run import Run
from megatron.training.step import ForwardStep, evaluate


class Evaluation(Hook):
    """Evaluates the validation sets at --eval-interval, and all sets after training."""

    def __init__(
        self,
        run: Run,
        data: Data,
        forward_step: ForwardStep,
        lines: TrainingLog,
        agreement: Agreement,
        hooks: Sequence[Hook],
    ):
        """`hooks` are all of the loop, called before a validation starts."""
        self._run = run
        self._data = data
        self._forward_step = forward_step
        self._lines = lines
        self._agreement = agreement
        self._hooks = hooks
        self._valid_samples: dict[tuple[str, int], Iterator[MicroBatch]] = {}
        # of each data set that was evaluated, by its id()
        self._bytes_per_token: dict[int, float | None] = {}
        self._done = False  # the validation after the last iteration
        self.enabled = bool(data.valid) and run.config.training.eval_iters > 0

    def due(self, iteration: int) -> bool:
        """Whether a validation follows `iteration`."""
        t = self._run.config.training
        return (
            self.enabled
            and iteration % t.eval_interval == 0
            and iteration >= (t.start_eval_at_iter or 0)
        )

    def is_last(self, iteration: int) -> bool:
        """Whether the validation that follows `iteration` is the run's last. Logs in Megatron's
        form have one more, on other samples, as Megatron's do."""
        run = self._run
        return run.config.logging.is_short and iteration == run.plan.train_iters

    def intervals(self) -> Sequence[int | None]:
        return (self._run.config.training.eval_interval,) if self.enabled else ()

    def close(self) -> None:
        """End the data workers, since no evaluation follows. At the end of the process they would
        be killed, which torch reports as an error."""
        self._valid_samples.clear()

    def on_rollback(self) -> None:
        """The next validation reads the samples that it read at this iteration before."""
        self._valid_samples.clear()

    def _evaluate(
        self,
        dataset: Dataset,
        samples: Iterator[MicroBatch],
        count: int,
        prefix: str,
        report: Callable[[str], None],
        suffix: str = "",
        split: str = "validation",
        final: bool = False,
    ) -> bool:
        """Evaluate `count` micro-batches of `dataset` and print the block; True if the time limit
        was reached first.

        `final`: after the last iteration.
        """
        run = self._run
        t = self._run.config.training
        with run.timers("evaluate"):
            losses = evaluate(
                run,
                self._forward_step,
                samples,
                count,
                report,
                self._agreement.out_of_time if t.exit_duration_in_mins else None,
            )
        if losses is None:
            log.print_rank_0("Exiting during evaluation, timelimit reached")
            return True
        self._lines.timers(["evaluate"])
        if id(dataset) not in self._bytes_per_token:
            self._bytes_per_token[id(dataset)] = bytes_per_token(dataset)
        bits = bits_per_byte(losses.get("lm loss"), self._bytes_per_token[id(dataset)])
        self._lines.validation(
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
        return (
            self._run.config.training.eval_iters * self._run.plan.evaluation_batch.num_microbatches
        )

    def _validation_samples(
        self, number: int, weights: str = ""
    ) -> tuple[Iterator[MicroBatch], int]:
        """The samples of a validation set, and how many micro-batches of them one validation
        reads; with other `weights` the same ones again."""
        run = self._run
        t = self._run.config.training
        sampler = self._data.valid_samplers[number]
        full = run.config.data.full_validation
        if full or weights or (weights, number) not in self._valid_samples:
            first = 0 if full or t.skip_train else run.progress.consumed_valid_samples
            samples = Samples(self._data.valid[number], run.plan.vocab_size)
            # resumed with other --eval-iters, a run may come to their end, and begins again
            starts = itertools.chain([first], () if full else itertools.repeat(0))
            self._valid_samples[weights, number] = open_samples(
                run.config,
                run.plan,
                samples,
                itertools.chain.from_iterable(evaluation_samples(sampler, n) for n in starts),
            )
        remaining = sampler.micro_batches_left(0)
        # take micro-batches in rounds
        stages = run.config.parallel.pipeline_model_parallel_size
        return self._valid_samples[weights, number], (
            remaining // stages * stages if full else self._eval_micro_batches()
        )

    def validate(
        self, prefix: str, report: Callable[[str], None] = lambda text: None, final: bool = False
    ) -> bool:
        """Evaluate on the next samples of each validation set and print its block; True if the time
        limit was reached first.

        Its samples are consumed either way: where the next validation begins does not depend on
        clocks.
        """
        run = self._run
        self._done = final
        for hook in self._hooks:
            hook.before_evaluation()
        time_up = self._validate_all(prefix, report, final)
        for weights, in_the_model in run.other_weights.items():
            with in_the_model() as are_there:
                if are_there and not time_up:
                    time_up = self._validate_all(prefix, report, final, weights)
        if not run.config.data.full_validation:
            run.progress.consumed_valid_samples += (
                self._eval_micro_batches() * run.plan.evaluation_batch.divisor
            )
        return time_up

    def _validate_all(
        self, prefix: str, report: Callable[[str], None], final: bool, weights: str = ""
    ) -> bool:
        """Each validation set with the weights that the model has; whether the time is up."""
        time_up = False
        for number, name in enumerate(self._data.valid_names):
            samples, count = self._validation_samples(number, weights)
            time_up = time_up or self._evaluate(
                self._data.valid[number],
                samples,
                count,
                prefix,
                report,
                f"-{name}" * bool(name) + f"-{weights}" * bool(weights),
                final=final,
            )
        return time_up

    def final(self) -> None:
        """Validation and test losses of the finished run, as Megatron prints them."""
        run = self._run
        t = self._run.config.training
        iteration = run.progress.iteration
        if self.enabled and not self._done:
            prefix = f"iteration {iteration} on validation set"
            if self.validate(prefix, log.detail, final=True):
                return
        sampler = self._data.test_sampler
        if self._data.test is not None and sampler is not None and t.eval_iters > 0:
            samples = open_samples(
                run.config,
                run.plan,
                Samples(self._data.test, run.plan.vocab_size),
                evaluation_samples(sampler, 0),
            )
            self._evaluate(
                self._data.test,
                samples,
                self._eval_micro_batches(),
                f"iteration {iteration} on test set",
                log.detail,
                split="test",
                final=True,
            )
