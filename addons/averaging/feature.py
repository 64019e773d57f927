"""--ema-decay, --merge-window: averages of the weights beside those that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.arguments import arg
from megatron.config.tree import Config, Demands
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.config.command_line import CommandLine
    from megatron.config.plan.plan import Plan
    from megatron.training.hook import Hook
    from megatron.training.run import Run
    from megatron.training.step import ForwardStep


@dataclass(frozen=True, kw_only=True)
class AveragingConfig(Feature):
    """Averaged weights."""

    ema_decay: float | None = arg(None, minimum=0, below=1, excludes=("no_save_optim",))
    """keep an exponential moving average of the main weights: after each update it is this x
    average + (1 - this) x weights; checkpoints have it, and each validation its loss"""

    ema_device: Literal["accelerator", "cpu"] = arg("accelerator", needs="ema_decay", per_run=True)
    """where the average of --ema-decay is: accelerator, beside the main weights, or cpu, in pinned
    host memory, which is copied to the accelerator and back in each update"""

    merge_window: int | None = arg(None, minimum=2, requires="save", per_run=True)
    """validate also the mean of the last N checkpoints in --save, which tools/merge_checkpoints.py
    writes; from where there are N"""

    merge_weights: Literal["linear", "cosine", "1-sqrt"] = arg(
        "linear", needs="merge_window", per_run=True
    )
    """the decay that --merge-window stands for: linear (the plain mean), cosine, 1-sqrt"""

    def check(self, facts: Facts) -> Iterator[str]:
        """Checkpoints that are removed before they are merged."""
        if self.merge_window and facts["keep_last"] and facts["keep_last"] < self.merge_window:
            yield (
                f"--merge-window {self.merge_window}: {facts.say('keep_last')} keeps fewer "
                f"checkpoints; give --keep-last {self.merge_window}, or a smaller window "
                "[value-out-of-range]"
            )

    def demands(self, config: Config) -> Demands:
        """Memory, and room in checkpoints."""
        keeps = self.ema_decay is not None
        host = keeps and self.ema_device == "cpu" and not config.training.on_cpu
        return Demands(averages=int(keeps), averages_on_host=host)

    def dry_run(self, line: CommandLine, plan: Plan, forward_step: ForwardStep) -> Iterator[str]:
        """The memory of the average, of the fullest rank."""
        if self.ema_decay is None:
            return
        from megatron.config.plan.fit import gib
        from megatron.config.plan.state_bytes import bytes_per_rank

        stages = range(len(plan.layers_per_stage))
        states = [bytes_per_rank(line.config, plan, stage) for stage in stages]
        size = max(state.get("averages on the host", 0) for state in states)
        where = "in host memory"
        if not size:
            # as much as the main weights, where these are apart from the weights
            precision = line.config.precision
            size = max(state["main weights"] for state in states)
            size //= 1 + (precision.fp16 or precision.bf16)
            where = "on the device, among the bytes of the optimizer"
        yield f"average of the weights (--ema-decay): {size:,} bytes ({gib(size)}) per rank {where}"

    def built(self, run: Run) -> None:
        """The optimizer keeps the average, so checkpoints and snapshots have it. Validations."""
        if self.ema_decay is not None:
            from . import average

            average.start(run, on_host=self.demands(run.config).averages_on_host)
            others = run.optimizer.kept[average.NAME]
            run.other_weights[average.NAME] = lambda: average.in_the_model(run, others)
        if self.merge_window:
            from .merged import NAME, merged

            window, decay = self.merge_window, self.merge_weights
            run.other_weights[NAME] = lambda: merged(run, window, decay)

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """What updates it."""
        if self.ema_decay is not None:
            from .average import WeightAverage

            yield WeightAverage(loop.run, self.ema_decay)
