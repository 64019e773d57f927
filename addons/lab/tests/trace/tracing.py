"""Traces of a command line, for tests; knows no formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.addons.lab.trace.traced_rank import RankTrace, trace_rank, traced_config
from megatron.config import command_line
from megatron.config.command_line import CommandLine
from megatron.config.plan.plan import Plan, make_plan
from megatron.features.registry import RunConfig
from megatron.training.preflight import build_tokenizer
from tests.runs import plot


class Traced:
    """The plan of a command line for `world` ranks, and traces of its ranks."""

    def __init__(self, flags: Sequence[str], world: int):
        dry = ["--dry-run", "--world-size", str(world), "--trace"]
        self.line: CommandLine = command_line.read([*flags, *dry], {}, tree=RunConfig)
        self.config = traced_config(self.line.config)
        self.tokenizer = build_tokenizer(self.config)
        self.plan: Plan = make_plan(self.config, world, self.tokenizer.vocab_size)

    def rank(self, rank: int, forward_step: Any = None) -> RankTrace:
        """The trace of a rank; `forward_step` in place of pretrain_gpt.py's."""
        return trace_rank(
            self.config, self.plan, rank, self.tokenizer, forward_step or plot().forward_step
        )
