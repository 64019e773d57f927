"""--eval-tasks: scores of lm-eval tasks during training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.config.tree import Config
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class EvalTasksConfig(Feature):
    """Tasks while training."""

    eval_tasks: tuple[str, ...] = arg(())
    """YAML files of lm-eval tasks (multiple choice or log-likelihood) whose scores are logged every
    --eval-tasks-interval iterations (pip install lm-eval)"""

    eval_tasks_interval: int | None = arg(None, minimum=1, needs="eval_tasks")
    """iterations between scores of --eval-tasks"""

    def check(self, facts: Facts) -> Iterator[str]:
        """The interval, and what shares the model in a way that tasks do not know."""
        if not self.eval_tasks:
            return
        if self.eval_tasks_interval is None:
            yield (
                f"--eval-tasks-interval is missing: {facts.say('eval_tasks')} needs the iterations "
                "between scores [flag-missing]"
            )
        for name, off in (
            ("pipeline_model_parallel_size", 1),
            ("context_parallel_size", 1),
            ("expert_model_parallel_size", 1),
            ("fp8", None),
        ):
            if facts[name] != off:
                yield (
                    f"{facts.say(name)}: not supported with --eval-tasks; omit one of the two, and "
                    "score checkpoints with tools/run_lm_eval.py [flags-exclude-each-other]"
                )
        if facts.config.parallel.shares_weights:  # ranks compute other texts
            yield (
                f"{facts.say('data_parallel_sharding_strategy')}: not supported with --eval-tasks; "
                "omit one of the two, and score checkpoints with tools/run_lm_eval.py "
                "[flags-exclude-each-other]"
            )

    def missing(self) -> Iterator[str]:
        """Files of tasks."""
        for path in self.eval_tasks:
            if not os.path.isfile(path):
                yield (
                    f"--eval-tasks {path}: no such file; give the YAML file of a task "
                    "[eval-task-unreadable]"
                )

    def prepare(self, config: Config) -> None:
        """Read the tasks. Raises ValueError where lm-eval or a task cannot be read."""
        if not self.eval_tasks:
            return
        try:
            from .tasks import open_tasks
        except ImportError as error:
            raise ValueError(
                f"--eval-tasks needs the package lm-eval ({error}): pip install lm-eval, or omit "
                "the flag [package-missing]"
            ) from None
        open_tasks(self.eval_tasks)

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """What scores them. Raises ValueError for a script's own model."""
        if self.eval_tasks and self.eval_tasks_interval:
            if loop.run.plan.own_model:
                raise ValueError(
                    "--eval-tasks: needs the GPT of the flags, and the script's model_provider "
                    "returned another model; omit it [own-model]"
                )
            from .tasks import TaskScores, open_tasks

            tasks = open_tasks(self.eval_tasks)
            yield TaskScores(loop.run, loop.lines, tasks, self.eval_tasks_interval)
