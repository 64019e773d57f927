"""--stages and --phase-transition-iterations: training in stages, in one run or in several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.config.tree import Config, Demands
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.config.command_line import CommandLine
    from megatron.config.plan.plan import Plan
    from megatron.data.sources import DataSource
    from megatron.training.hook import Hook
    from megatron.training.step import ForwardStep

# Flags under which samples do not come from .bin/.idx pairs by weight, or the size of a stage does
# not follow from the flags alone.
_EXCLUDED = (
    "mock_data",
    "dummy_data",
    "packed_samples",
    "continue_data_mix",
    "train_samples",
    "rampup_batch_size",
    "rampup_micro_batches",
    "decrease_batch_size_if_needed",
)


@dataclass(frozen=True)
class StagesConfig(Feature):
    """Training in stages."""

    stage_file: str | None = arg(
        None,
        flag="--stages",
        requires="save",
        excludes=(*_EXCLUDED, "phase_transition_iterations", "step_batch_size_schedule"),
        metavar="FILE",
    )
    """TOML file of stages, each with its end and the flags that change: data and weights, sequence
    length, batch sizes, rotary base and scaling, learning rate; each data set goes on where it
    stopped"""

    phase_transition_iterations: str | None = arg(
        None, requires="save", excludes=_EXCLUDED, per_run=True, metavar="N,N"
    )
    """save and exit at these iterations; the job that goes on from there may have other data,
    sequence length, rotary base and scaling, and each data set goes on where it stopped (--stages
    does all of it in one job)"""

    @property
    def ends(self) -> tuple[int, ...]:
        """The iterations at which stages end, but for the last; none where the flag spells none,
        which `check` reports: others ask before it."""
        try:
            return tuple(sorted(map(int, (self.phase_transition_iterations or "").split(","))))
        except ValueError:
            return ()

    @property
    def names_data(self) -> bool:
        """The file of stages does; each stage's flags are read as those of a run."""
        return self.stage_file is not None

    def check(self, facts: Facts) -> Iterator[str]:
        """What stages cannot go with, and ends that are not in the run."""
        if not self.stage_file and not self.phase_transition_iterations:
            return
        name = "stage_file" if self.stage_file else "phase_transition_iterations"
        if facts["dataloader_type"] == "cyclic":
            yield (
                f"--dataloader-type cyclic: cannot be given with {facts.say(name)}, which knows "
                "where each data set stopped; omit it [flags-exclude-each-other]"
            )
        if facts["non_persistent_ckpt_type"] == "local":
            yield (
                f"--non-persistent-ckpt-type local: cannot be given with {facts.say(name)}: the "
                "stage of a copy is not known before the ranks connect; omit it "
                "[flags-exclude-each-other]"
            )
        ends = (0, *self.ends, facts["train_iters"] or 0)
        good = all(before < after for before, after in pairwise(ends))
        spelled = self.ends or self.stage_file
        if facts.ok("train_iters") and not (good and spelled):
            yield (
                f"{facts.say('phase_transition_iterations')}: must be different iterations, as in "
                f"1000,2000, all before the end at --train-iters {facts['train_iters']} "
                "[stage-ends-malformed]"
            )

    def stage_lines(self, line: CommandLine) -> Sequence[CommandLine]:
        """The stages that remain."""
        if self.stage_file is None:
            return ()
        from .lines import remaining

        return remaining(line, self)

    def dry_run(self, line: CommandLine, plan: Plan, forward_step: ForwardStep) -> Iterator[str]:
        """The table of all stages."""
        if self.stage_file is not None:
            from .lines import table

            yield from table(line, self)

    def demands(self, config: Config) -> Demands:
        """Rotary positions may change between stages."""
        if not self.ends:
            return Demands()
        from .stage_file import ROPE

        return Demands(changing=frozenset(ROPE), changes_after=self.ends)

    def data_source(self, source: DataSource, config: Config) -> DataSource:
        """Samples of a stage."""
        if not self.ends and self.stage_file is None:
            return source
        from .staged_source import StagedSource

        return StagedSource(source, config, self.ends)

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """What ends a stage."""
        if self.ends:
            from .hook import StageEnds

            yield StageEnds(loop.run, self.ends)
