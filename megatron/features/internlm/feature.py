"""What runs of InternLM have: its log lines, token files, initial values and generated data, and
how its configs and checkpoints are read."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.model import ModelConfig
    from megatron.config.plan.parameters import Scheme
    from megatron.config.plan.plan import Plan
    from megatron.config.tree import Config
    from megatron.features.internlm.dummy import DummySamples
    from megatron.features.internlm.log_format import InternlmLines, StepCounts
    from megatron.features.internlm.token_files import JsonlTokens
    from megatron.training.hook import Hook
    from megatron.training.launch.initialize import Runtime


class TokenFiles:
    """X.bin of JSON lines, and X.bin.meta."""

    index = ".meta"
    content = "JSON"

    def open(self, path: str) -> JsonlTokens:
        """The samples of X.bin."""
        from megatron.features.internlm.token_files import JsonlTokens

        return JsonlTokens(path)


class Demo:
    """The million samples of InternLM's demos."""

    subsets: tuple[str, ...] = ("en", "cn", "code")
    vocabulary = 200

    def open(self, sequence_length: int) -> DummySamples:
        """The samples."""
        from megatron.features.internlm.dummy import DummySamples

        return DummySamples(sequence_length)


@dataclass(frozen=True)
class InternlmConfig(Feature):
    """InternLM."""

    adds = {
        "log_format": {"internlm": "InternLM's lines"},
        "dummy_data": {"internlm": "those of InternLM's demos"},
        "init_scheme": {
            "internlm": "fixed standard deviations that depend on the layer",
            "internlm2": "0.02, at the ends of a layer's branches divided by sqrt(2 (layer + 1))",
        },
    }
    converter: ClassVar = "tools.features.internlm.converter"

    @staticmethod
    def sample_formats() -> tuple[TokenFiles]:
        """Token files of JSON lines."""
        return (TokenFiles(),)

    def generated_samples(self, name: str) -> Demo | None:
        """Those of --dummy-data internlm."""
        return Demo() if name == "internlm" else None

    @staticmethod
    def converter_command(load: str) -> str | None:
        """Of a step of InternLM's training: `load`, or the newest in it (LOAD/50)."""
        from megatron.config.checks.listing import listing

        steps = sorted((n for n in listing(load) if n.isdecimal()), key=int, reverse=True)
        for folder in (load, *(os.path.join(load, step) for step in steps)):
            if any(re.fullmatch(r"model_tp\d+_pp\d+\.pt", name) for name in listing(folder)):
                return f"internlm-import {shlex.quote(folder)} DIR"
        return None

    def init_scheme(self, model: ModelConfig) -> Scheme | None:
        """Those of --init-scheme internlm and internlm2."""
        if not model.init_scheme.startswith("internlm"):
            return None
        from megatron.features.internlm import initial_values

        if model.init_scheme == "internlm2":
            return initial_values.internlm2_scheme(model)
        return initial_values.internlm_scheme(model)

    def counts_subsets(self, config: Config) -> bool:
        """For its log lines."""
        return config.logging.log_format == "internlm"

    def columns(self, config: Config, plan: Plan) -> StepCounts | None:
        """Rates of tokens, where subsets are counted."""
        if not config.counts_subsets:
            return None
        from megatron.features.internlm.log_format import StepCounts

        return StepCounts(config.model.seq_length, plan.world_size)

    def log_format(
        self, config: Config, plan: Plan, runtime: Runtime | None
    ) -> InternlmLines | None:
        """The lines of InternLM."""
        if config.logging.log_format != "internlm":
            return None
        from megatron.features.internlm.log_format import InternlmLines

        return InternlmLines(config, plan, runtime)

    def hooks(self, loop: Loop) -> Iterable[Hook]:
        """No hook: the line about the partition of the optimizer."""
        run = loop.run
        if run.config.logging.log_format == "internlm" and run.runtime.ctx.shard.size > 1:
            from megatron.features.internlm.log_format import print_partition

            print_partition(run.buffers.layout.elements())
        return ()
