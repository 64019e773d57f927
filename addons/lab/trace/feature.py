"""--trace: the training step of some ranks, on tensors without values, in a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.training.feature import Feature

if TYPE_CHECKING:
    from megatron.config.command_line import CommandLine
    from megatron.config.plan.plan import Plan
    from megatron.training.step import ForwardStep


@dataclass(frozen=True)
class TraceConfig(Feature):
    """Trace of a step."""

    trace: bool = arg(False, requires="dry_run")
    """with --dry-run: run the training step of some ranks of the planned cluster on tensors without
    values, and print memory by kind, FLOPs, kernel launches and every collective; needs no GPU"""

    trace_ranks: tuple[str, ...] = arg(("first", "last"), needs="trace")
    """with --trace: ranks to trace: numbers, first, last, all-stages (one of each pipeline stage),
    or peers (rank 0 and the last rank of each of its groups)"""

    trace_output: str | None = arg(None, needs="trace")
    """with --trace: JSON file for all of it, with messages in order"""

    def dry_run(self, line: CommandLine, plan: Plan, forward_step: ForwardStep) -> Iterator[str]:
        """The lines of the trace. Raises as `dry_run.trace`, and ValueError for a script's own
        model."""
        if self.trace:
            if line.script.model_provider:
                raise ValueError(
                    "--trace: traces the GPT of the flags, and the script's model_provider may "
                    "return another model; omit it [own-model]"
                )
            from megatron.config.checks.paths import file_to_write

            from .dry_run import trace

            if self.trace_output is not None:
                for problem in file_to_write("--trace-output", self.trace_output):
                    raise ValueError(problem)
            yield from trace(line, plan, forward_step, self.trace_ranks, self.trace_output)
