"""--export-kd-teacher-load: a model learns the distribution of another one, its teacher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

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

    from .settings import Settings


@dataclass(frozen=True)
class DistillationConfig(Feature):
    """Knowledge distillation."""

    export_kd_teacher_load: str | None = arg(
        None, excludes=("mtp_num_layers", "cuda_graph_impl", "enable_cuda_graph")
    )
    """distill: train on the KL divergence from the distribution of the model in this run directory
    or checkpoint, the teacher, which is frozen; its vocabulary must be the run's"""

    export_kd_cfg: str | None = arg(None, needs="export_kd_teacher_load")
    """YAML file of the distillation: logit_layers, intermediate_layer_pairs, skip_lm_loss (default
    true), kd_loss_scale, logit_kl_temperature"""

    def check(self, facts: Facts) -> Iterator[str]:
        """What the file asks for, and the teacher, as far as they are on this machine."""
        if self.export_kd_teacher_load is None:
            return
        from .settings import Settings, read
        from .teacher import problems

        settings = Settings()
        if self.export_kd_cfg and os.path.isfile(self.export_kd_cfg):
            try:
                settings = read(self.export_kd_cfg)
            except ValueError as error:
                yield str(error)
                return
        yield from problems(facts, self.export_kd_teacher_load, settings)

    def missing(self) -> Iterator[str]:
        """The teacher and the file."""
        if self.export_kd_teacher_load is None:
            return
        from .teacher import missing

        yield from missing(self.export_kd_teacher_load)
        if self.export_kd_cfg is not None and not os.path.isfile(self.export_kd_cfg):
            yield (
                f"--export-kd-cfg {self.export_kd_cfg}: no such file; give the YAML file of the "
                "distillation, or omit the flag [kd-settings]"
            )

    def demands(self, config: Config) -> Demands:
        """Memory and operations of the teacher, if it is on this machine."""
        if self.export_kd_teacher_load is None:
            return Demands()
        from .teacher import flops, memory

        path = self.export_kd_teacher_load
        nbytes = partial(memory, path, self.settings, config)
        return Demands(other_models={"teacher": nbytes}, other_flops=partial(flops, path, config))

    def dry_run(self, line: CommandLine, plan: Plan, forward_step: ForwardStep) -> Iterator[str]:
        """The teacher, and what it takes."""
        if self.export_kd_teacher_load is not None:
            from .teacher import described

            last = len(plan.layers_per_stage) - 1
            nbytes = self.demands(line.config).other_models["teacher"](plan, last)
            yield described(self.export_kd_teacher_load, nbytes, line.config, plan)

    def built(self, run: Run) -> None:
        """The teacher beside the model, and another objective. Not in a trace, which is of the
        model alone. Raises ValueError for a script's own model, and as a load does."""
        if self.export_kd_teacher_load is None or run.runtime.device.type == "meta":
            return
        if run.plan.own_model:
            raise ValueError(
                "--export-kd-teacher-load: needs the GPT of the flags, and the script's "
                "model_provider returned another model; omit it [own-model]"
            )
        from .hook import distill

        distill(run, self.export_kd_teacher_load, self.settings())

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """What remembers the teacher."""
        if self.export_kd_teacher_load is not None:
            from .hook import TeacherRecord

            yield TeacherRecord(loop.run, self.export_kd_teacher_load, self.settings())

    def settings(self) -> Settings:
        """Those of the file. Raises ValueError."""
        from .settings import Settings, read

        return read(self.export_kd_cfg) if self.export_kd_cfg else Settings()
