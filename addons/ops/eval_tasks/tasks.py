"""--eval-tasks: scores of lm-eval tasks during training, computed with the weights that are being
trained and with those that are validated beside them. Data-parallel ranks share the requests."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

from megatron.data.tokenizers.base import Tokenizer
from megatron.parallel.collectives import gather_objects
from megatron.training.hook import Hook
from megatron.training.launch.hang_limits import RunPhase
from megatron.training.logging.training_log import TrainingLog
from megatron.training.preflight import build_tokenizer
from megatron.training.result import Requests
from megatron.training.run import Run

from ..lm_eval_model import MegatronGPT, read_tasks, task_scores

KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")


@functools.cache
def open_tasks(files: tuple[str, ...]) -> dict[str, Any]:
    """The tasks of YAML files by name, with their data. Raises ValueError for a file that is no
    task, or whose kind is not one of KINDS."""
    tasks: dict[str, Any] = {}
    for file in files:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                read = read_tasks(file)
        except Exception as error:  # lm-eval raises of many types
            text = " ".join(str(error).split())[:500]
            raise ValueError(
                f"--eval-tasks {file}: lm-eval cannot read this task "
                f"({type(error).__name__}: {text}); fix the file, or omit it "
                "[eval-task-unreadable]"
            ) from None
        for name, task in read.items():
            if task.OUTPUT_TYPE not in KINDS:
                raise ValueError(
                    f"--eval-tasks {file}: the output_type of {name} is {task.OUTPUT_TYPE}; "
                    f"during training it must be one of {', '.join(KINDS)}; score checkpoints "
                    "with tools/run_lm_eval.py [eval-task-unreadable]"
                )
        tasks |= read
    return tasks


class TrainedModel(MegatronGPT):
    """The model of a run as it is. Every rank of it must make the same calls."""

    def __init__(self, run: Run, tokenizer: Tokenizer):
        super(MegatronGPT, self).__init__()
        self.use(run.model[0], tokenizer, run.config.training.micro_batch_size)
        self._dp = run.runtime.ctx.dp

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[Any]:
        return self._shared(super()._loglikelihood_tokens, requests, kwargs)

    def loglikelihood_rolling(self, requests: Sequence[Any], **kwargs: Any) -> list[float]:
        """The log-likelihood of each text, every token predicted once."""
        return self._shared(super().loglikelihood_rolling, requests, kwargs)

    def _shared(self, answer: Callable, requests: Sequence[Any], kwargs: dict[str, Any]) -> list:
        """The answers to all requests, of which each data-parallel rank computes every n-th."""
        ranks = gather_objects(answer(requests[self._dp.rank :: self._dp.size], **kwargs), self._dp)
        return [ranks[i % self._dp.size][i // self._dp.size] for i in range(len(requests))]


class TaskScores(Hook):
    """Logs the scores every --eval-tasks-interval iterations."""

    def __init__(self, run: Run, lines: TrainingLog, tasks: dict[str, Any], interval: int):
        self._run = run
        self._lines = lines
        self._tasks = tasks
        self._interval = interval
        self._model = TrainedModel(run, build_tokenizer(run.config))

    def intervals(self) -> Sequence[int | None]:
        return (self._interval,)

    def after_iteration(self, iteration: int, requests: Requests) -> None:
        if iteration % self._interval:
            return
        monitor = self._run.services.signals.monitor
        if monitor:
            monitor.begin(RunPhase("tasks", iteration))  # however long they take
        self._run.buffers.gathering.wait()
        with self._run.timers("evaluate"), contextlib.redirect_stderr(io.StringIO()):
            scores = self._scores()
        self._lines.timers(["evaluate"])
        self._lines.task_scores(iteration, self._run.progress.consumed_train_samples, scores)

    def _scores(self) -> dict[str, float]:
        """By task and metric; of weights beside the trained ones with their name, too."""
        scores = task_scores(self._model, self._tasks)
        for weights, in_the_model in self._run.other_weights.items():
            with in_the_model() as are_there:
                if are_there:
                    others = task_scores(self._model, self._tasks)
                    scores |= {
                        f"-{weights}/".join(name.rsplit("/", 1)): score
                        for name, score in others.items()
                    }
        return scores
