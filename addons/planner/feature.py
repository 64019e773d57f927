"""--estimate-on: the step time that a dry run prints."""

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
class PlannerConfig(Feature):
    """Estimated step time."""

    estimate_on: str | None = arg(None, requires="dry_run", metavar="GPU")
    """with --dry-run: print the step time estimated for this kind of GPU (h100, a file of
    addons/planner/machines); tools/plan.py says where it goes"""

    def dry_run(self, line: CommandLine, plan: Plan, forward_step: ForwardStep) -> Iterator[str]:
        """One line. Raises ValueError for a kind of GPU without a file."""
        if self.estimate_on is None:
            return
        from .machines import load
        from .run_sizes import sizes
        from .step_time import step_seconds

        machine = load(self.estimate_on)
        run = sizes(line.config, plan, machine)
        seconds = step_seconds(machine.constants, run)
        step = float(sum(seconds.values()))
        most = max(seconds, key=lambda kind: float(seconds[kind]))
        yield (
            f"estimate on {line.world_size} x {machine.name}: {step:.4g} s a step, "
            f"{run.batch * run.seq / step:,.0f} tokens/s; {most} takes "
            f"{float(seconds[most]) / step:.0%}"
        )
