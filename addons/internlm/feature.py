"""What runs of InternLM have: its log lines, token files, initial values and generated data, and
how its configs and checkpoints are read."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import AddedValue
from megatron.config.tree import Config, Demands
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.model import ModelConfig
    from megatron.config.plan.parameters import Scheme
    from megatron.config.plan.plan import Plan
    from megatron.training.hook import Hook
    from megatron.training.launch.initialize import Runtime

    from .dummy import DummySamples
    from .log_format import InternlmLines
    from .token_files import JsonlTokens


class TokenFiles:
    """X.bin of JSON lines, and X.bin.meta."""

    index = ".meta"
    content = "JSON"

    def open(self, path: str) -> JsonlTokens:
        """The samples of X.bin."""
        from .token_files import JsonlTokens

        return JsonlTokens(path)


class Demo:
    """The million samples of InternLM's demos."""

    subsets: tuple[str, ...] = ("en", "cn", "code")
    vocabulary = 200

    def open(self, sequence_length: int) -> DummySamples:
        """The samples."""
        from .dummy import DummySamples

        return DummySamples(sequence_length)


def _lines(config: Config, plan: Plan, runtime: Runtime | None) -> InternlmLines:
    from .log_format import InternlmLines

    return InternlmLines(config, plan, runtime)


def _scheme(model: ModelConfig) -> Scheme:
    from .initial_values import internlm_scheme

    return internlm_scheme(model)


def _scheme2(model: ModelConfig) -> Scheme:
    from .initial_values import internlm2_scheme

    return internlm2_scheme(model)


@dataclass(frozen=True)
class InternlmConfig(Feature):
    """InternLM."""

    adds = {
        "log_format": {"internlm": AddedValue("InternLM's lines", _lines)},
        "dummy_data": {"internlm": AddedValue("those of InternLM's demos", Demo)},
        "init_scheme": {
            "internlm": AddedValue("fixed standard deviations that depend on the layer", _scheme),
            "internlm2": AddedValue(
                "0.02, at the ends of a layer's branches divided by sqrt(2 (layer + 1))", _scheme2
            ),
        },
    }
    sample_formats = (TokenFiles(),)

    @staticmethod
    def converter_command(load: str) -> str | None:
        """Of a step of InternLM's training: `load`, or the newest in it (LOAD/50)."""
        from megatron.config.checks.listing import listing

        steps = sorted((n for n in listing(load) if n.isdecimal()), key=int, reverse=True)
        for folder in (load, *(os.path.join(load, step) for step in steps)):
            if any(re.fullmatch(r"model_tp\d+_pp\d+\.pt", name) for name in listing(folder)):
                return f"internlm-import {shlex.quote(folder)} DIR"
        return None

    def demands(self, config: Config) -> Demands:
        """Its log lines have the losses of subsets."""
        return Demands(subsets=config.logging.log_format == "internlm")

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """Rates of tokens, where subsets are counted; the line about the partition of the
        optimizer."""
        run = loop.run
        if not run.config.counts_subsets:
            return
        from .log_format import StepCounts, print_partition

        if run.config.logging.log_format == "internlm" and run.runtime.ctx.shard.size > 1:
            print_partition(run.buffers.layout.elements())
        yield StepCounts(run.config.model.seq_length, run.plan.world_size)
